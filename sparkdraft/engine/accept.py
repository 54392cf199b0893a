"""Decides which drafts are accepted: a draft is accepted if it equals the target's own sample in its row, and so do all
drafts before it.

Only the target's own samples are committed. Each is drawn with the request's real parameters from logits that follow
committed text, so the output is what the target alone would have written, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkdraft.engine.finite import NONE, NotFinite


def committed(drafts: Sequence[int], samples: Sequence[int]) -> list[int]:
    """The accepted drafts, then the target's sample after the last of them. samples[i] was drawn after drafts[:i].

    Raises NotFinite where that sample is none.
    """
    assert len(samples) == len(drafts) + 1, (len(samples), len(drafts))
    accepted = 0
    for draft, sample in zip(drafts, samples, strict=False):
        if draft != sample:
            break
        accepted += 1
    if samples[accepted] == NONE:
        raise NotFinite
    return list(samples[: accepted + 1])
