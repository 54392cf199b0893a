"""Which drafts stand: a draft is accepted while it equals what the target itself sampled in its place.

Nothing but the target's own samples is ever committed, each drawn with the request's real parameters from logits that
follow committed text, so the output is what the target alone would have written, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence


def committed(drafts: Sequence[int], samples: Sequence[int]) -> list[int]:
    """samples[i] was drawn after drafts[:i]: the accepted ones, and the sample after the last of them."""
    assert len(samples) == len(drafts) + 1, (len(samples), len(drafts))
    accepted = 0
    for draft, sample in zip(drafts, samples, strict=False):
        if draft != sample:
            break
        accepted += 1
    return list(samples[: accepted + 1])
