"""Decides which drafts are accepted, and notices a model that computes NaN or infinities in place of logits.

A draft is accepted if it equals the target's own sample at its position, and so do all drafts before it. Only the
target's samples are committed, so the output is what the target alone would have written, whatever was drafted.

NaN logits have no likeliest id: without a check the text would be empty, or one id forever. The sampler marks such a
sample with the id -1, an overlapped step with a negative number of accepted drafts (engine/slots.py), and the host
raises when it reads either. A trial request at load shows it early, and the error names the tensor to blame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import Checkpoint

NONE = -1  # the sample where logits are not finite


class NotFinite(UserError):
    """A step computed NaN or infinities."""

    def __init__(self, cause: str = "") -> None:
        likely = cause or "its weights may hold NaN or infinities, or its activations exceed the range of the dtype"
        super().__init__(
            f"The model's logits are not finite numbers: {likely}; fetch the checkpoint again, or use --dtype float32."
        )


def committed(drafts: Sequence[int], samples: Sequence[int]) -> list[int]:
    """The accepted drafts, then the target's sample after the last of them; samples[i] was drawn after drafts[:i].
    Raises NotFinite."""
    assert len(samples) == len(drafts) + 1, (len(samples), len(drafts))
    accepted = 0
    for draft, sample in zip(drafts, samples, strict=False):
        if draft != sample:
            break
        accepted += 1
    if samples[accepted] == NONE:
        raise NotFinite
    return list(samples[: accepted + 1])


def checked(logits: Tensor, ids: Tensor) -> Tensor:
    """The ids [rows], NONE where the logit [rows, vocab] of an id is NaN or +inf. Kernels take a NaN for -inf, so a
    row that is NaN only in part passes; one that is NaN as a whole, as after a NaN in the model, does not."""
    chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    return ids.where(chosen < float("inf"), NONE)


def blamed(checkpoint: Checkpoint) -> str:
    """Names the first tensor of a checkpoint that holds NaN or infinities; "" if none does. Reads all of them."""
    for name in checkpoint.names():
        stored = checkpoint.read(name)
        if isinstance(stored, Tensor) and stored.is_floating_point() and not torch.isfinite(stored.float()).all():
            return f"{name} holds NaN or infinities"
    return ""
