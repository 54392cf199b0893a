"""Finds out when a model computes NaN or infinities in place of logits, and says why.

Such a row has no likeliest id: without a check its text is empty or one id for ever, and nothing says so. The sampler
marks it with the id -1 (engine/sampler.py), an overlapped step with a negative number of accepted drafts
(engine/lanes.py), and the host raises when it reads either. At load one trial request runs for this, and the error
names the tensor that is to blame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import Checkpoint

NONE = -1  # the id of a row that has none


class NotFinite(UserError):
    """A step computed no numbers."""

    def __init__(self, cause: str = "") -> None:
        likely = cause or "its weights may hold NaN or infinities, or its activations exceed the range of the dtype"
        super().__init__(
            f"The model's logits are not finite numbers: {likely}; fetch the checkpoint again, or use --dtype float32."
        )


def checked(logits: Tensor, ids: Tensor) -> Tensor:
    """The ids, NONE where the logit of an id is NaN or +inf. logits: [rows, vocab]; ids: int64 [rows]."""
    chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    return ids.where(chosen < float("inf"), NONE)


def blamed(checkpoint: Checkpoint) -> str:
    """Which tensor of a checkpoint holds NaN or infinities; "" if none does. Reads all of them."""
    for name in checkpoint.names():
        stored = checkpoint.read(name)
        if isinstance(stored, Tensor) and stored.is_floating_point() and not torch.isfinite(stored.float()).all():
            return f"{name} holds NaN or infinities"
    return ""
