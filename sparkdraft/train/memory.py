"""Sums of memory for a training run, made before the target's weights are read; what does not fit is refused with them.

Counted high rather than low: a run that dies of memory after an hour has cost more than one that was refused. No torch.
"""

from __future__ import annotations

from sparkdraft.core import UserError
from sparkdraft.models.config import ModelConfig
from sparkdraft.plan.memory import kv_bytes_per_token, scratch_bytes, weight_bytes
from sparkdraft.train.settings import FitSettings

LOGITS = 3 << 29  # bytes of logits alive at once in the loss


def parts(target: ModelConfig, settings: FitSettings, itemsize: int) -> dict[str, int]:
    """Bytes by what they are for."""
    hidden, inter = target.hidden_size, settings.intermediate or target.intermediate_size
    heads = (2 * target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    taps = len(settings.taps) or min(5, target.num_layers)
    parameters = settings.layers * hidden * (heads + 3 * inter) + taps * hidden * hidden
    copies = 3 if settings.optimizer == "muon" else 4  # weights, gradients, one or two moments; all in float32
    saved = 8 * hidden + 2 * heads + 4 * inter  # of a row and layer, for the way back
    context = taps * hidden * itemsize + kv_bytes_per_token(target, itemsize) // target.num_layers * 9
    sums = {
        "target": weight_bytes(target, itemsize),
        "drafter and optimizer": 4 * copies * parameters,
        "the target's step": scratch_bytes(target, settings.context, 0, itemsize) + settings.context * context,
        "the drafter's step": settings.block_rows * saved * settings.layers * itemsize,
        "logits": min(2 * LOGITS, 3 * settings.block_rows * target.vocab_size * itemsize),
    }
    if settings.soft:
        sums["the target's logits"] = settings.context * target.vocab_size * itemsize
    return sums


def check_fits(target: ModelConfig, settings: FitSettings, free: int, itemsize: int) -> None:
    """Raises UserError with the sums when they exceed the free bytes."""
    sums = parts(target, settings, itemsize)
    total = sum(sums.values())
    if total > free:
        table = "\n".join(f"  {name:<22}{size / 2**30:8.2f} GiB" for name, size in sums.items())
        raise UserError(
            f"training a drafter for {settings.target} does not fit in memory:\n{table}\n"
            f"  {'together':<22}{total / 2**30:8.2f} GiB of {free / 2**30:.2f} free\n"
            "Lower --context and --block-rows (a step then learns from less), or take a smaller target."
        )
