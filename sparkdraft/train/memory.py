"""Sums of memory for a training run, made before the target's weights are read. A run that does not fit is refused with
them.

The estimates are high rather than low: a run that runs out of memory after an hour costs more than one that was
refused. No torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sparkdraft.core import UserError
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import LayerSpec
from sparkdraft.models.common.sizes import ModelSizes, model_sizes
from sparkdraft.plan.memory import weight_bytes
from sparkdraft.train.settings import FitSettings

CHUNK_ROWS = 15360  # rows whose logits a GPU holds at once in the loss: 1.5 GB of bf16 over 49152 ids
SHARES = tuple(part / 8 / 2**halved for halved in range(20) for part in (8, 7, 6, 5))  # shares of a step's text to try
LEAST_CONTEXT, LEAST_BLOCKS = 1024, 64  # a smaller step teaches next to nothing
CPU_CHUNK_ROWS = 512  # rows whose logits a CPU holds at once in the loss
CPU_LOGITS = 8  # copies of these logits: logits, labels (also as int64), products, gradients
CPU_SHARE = 0.5  # of a CPU's free memory, for settings that nobody asked for: other programs need the rest
CPU_STEP = {"context": 1024, "block_rows": 1024}  # the most by default on a CPU, where larger steps take minutes
CPU_SCORES = 1 << 20  # (row, key) pairs of a head for which a CPU has weights at once, unless one block has more
CPU_WEIGHTS = 6  # copies of the weights of attention that are there at once: scores, masks, weights, gradients
CHUNKS = 4  # anchors of so small a part of what a block sees share a copy of it: a block sees at most that much more
LAID_OUT = CHUNKS + 1  # rows of these copies for each of a batch's tokens, at most
SHRINKS = ("context", "block_rows")  # settings that are made smaller where nobody asked for a number


def parts(target: ModelConfig, settings: FitSettings, on_gpu: bool) -> dict[str, int]:
    """Bytes, by what they are for."""
    itemsize = 2 if on_gpu else 4
    hidden, drafter = target.hidden_size, _drafter_sizes(target, settings)
    aux_layers = len(settings.aux_layers) or min(5, target.num_layers)
    parameters = drafter.active_in_layers + aux_layers * hidden * hidden
    vocab = settings.vocab or target.vocab_size
    copies = 3  # weights, gradients, momentum; all in float32
    context = aux_layers * hidden * itemsize + drafter.layers[0].kv * itemsize * 9
    if settings.window or settings.init:  # rows are laid out again: copies and gradients of each layer
        context += LAID_OUT * drafter.layers[0].kv * settings.layers * (2 * itemsize + 4)
    step = {
        "the target's step": target_step(target, settings.context, 0, itemsize) + settings.context * context,
        "the drafter's step": _drafter_step(target, settings, itemsize),
        "logits": _logit_rows(settings, on_gpu) * vocab * itemsize,
    }
    if settings.soft:
        step["the target's logits"] = settings.context * vocab * itemsize
    if on_gpu:  # graphs keep their own memory, beside that of a shape that has not been captured yet
        step["captured steps"] = sum(step.values())
    else:
        step["attention"] = _dense_attention(target, settings, itemsize)
    return {
        "target": weight_bytes(target, itemsize),
        "drafter and optimizer": (4 * copies + itemsize) * parameters,  # with the weights in the dtype of the matmuls
        **step,
    }


def target_step(target: ModelConfig, rows: int, sampled: int, itemsize: int) -> int:
    """A layer's activations, more than the engine counts: batches here have many shapes, which fragment memory."""
    sizes = model_sizes(target)
    width = 4 * sizes.hidden + sizes.projected + sizes.mlp
    return 2 * rows * width * itemsize + 4 * sampled * target.vocab_size * 4


def _drafter_step(target: ModelConfig, settings: FitSettings, itemsize: int) -> int:
    """Bytes that each layer keeps for the backward pass, and those that are alive while one layer's runs."""
    sizes = _drafter_sizes(target, settings)
    saved = 4 * sizes.hidden + 3 * (sizes.projected + sizes.mixed) // 2 + sizes.mlp
    return settings.block_rows * (saved * (settings.layers + 1) + 6 * sizes.hidden) * itemsize


def _drafter_sizes(target: ModelConfig, settings: FitSettings) -> ModelSizes:
    """Sizes of the drafter to be made: layers like the target's, with an MLP of their own size."""
    attention, mlp = target.uniform()
    mlp = replace(mlp, intermediate_size=settings.intermediate or mlp.intermediate_size)
    return model_sizes(replace(target, layers=(LayerSpec(attention, mlp),) * settings.layers))


def _logit_rows(settings: FitSettings, on_gpu: bool) -> int:
    return min(CHUNK_ROWS, settings.block_rows) if on_gpu else CPU_LOGITS * min(CPU_CHUNK_ROWS, settings.block_rows)


def _dense_attention(target: ModelConfig, settings: FitSettings, itemsize: int) -> int:
    """A CPU's attention has a weight for every row and token of a few blocks; what was computed is not kept."""
    most = max(CPU_SCORES, settings.block * (min(settings.context, settings.longest) + settings.block))
    rows = settings.block_rows * target.uniform()[0].query_width * (settings.layers + 1)  # the results
    return (CPU_WEIGHTS * most * target.uniform()[0].num_heads + rows) * itemsize


def total_bytes(target: ModelConfig, settings: FitSettings, on_gpu: bool) -> int:
    return sum(parts(target, settings, on_gpu).values())


def fitting(
    target: ModelConfig, settings: FitSettings, free: int, on_gpu: bool, shrinks: Collection[str] = (*SHRINKS, "layers")
) -> FitSettings | None:
    """The same run made smaller until it fits: steps with less text first, then fewer layers; None if nothing fits.
    shrinks: the settings that may change."""
    fewest = 1 if "layers" in shrinks and not settings.init else settings.layers  # what exists is not made shallower
    least = {"context": LEAST_CONTEXT, "block_rows": LEAST_BLOCKS * settings.block}
    for layers in range(settings.layers, fewest - 1, -1):
        for share in SHARES:
            sizes: dict[str, Any] = {n: _shrunk(getattr(settings, n), share, least[n]) for n in SHRINKS if n in shrinks}
            smaller = replace(settings, layers=layers, **sizes)
            if total_bytes(target, smaller, on_gpu) <= free:
                return smaller
    return None


def _shrunk(value: int, share: float, least: int) -> int:
    return max(int(value * share), min(value, least))


def fit_in(
    target: ModelConfig, settings: FitSettings, free: int, on_gpu: bool, shrinks: Collection[str] = ()
) -> tuple[FitSettings, str]:
    """Settings that fit into the free bytes, and a sentence if they are not the given ones. Only the settings in
    'shrinks' are changed; raises UserError with the sums, and with what would fit, if that is not enough. On a CPU they
    are also made small enough for a step of seconds, and to leave memory to other programs where that is possible."""
    sums = parts(target, settings, on_gpu)
    total = sum(sums.values())
    if total <= free and (on_gpu or not shrinks):
        return settings, ""
    quick: dict[str, Any] = {n: min(getattr(settings, n), CPU_STEP[n]) for n in shrinks if not on_gpu}
    first = replace(settings, **quick)
    polite = None if on_gpu else fitting(target, first, int(free * CPU_SHARE), on_gpu, shrinks)
    if smaller := polite or fitting(target, first, free, on_gpu, shrinks):
        flags = " ".join(f"--{name.replace('_', '-')} {getattr(smaller, name)}" for name in SHRINKS if name in shrinks)
        now = f"({total_bytes(target, smaller, on_gpu) / 2**30:.1f} of {free / 2**30:.1f} GiB of free memory)"
        why = f"the defaults need {total / 2**30:.0f} GiB of memory" if total > free else "the defaults are for a GPU"
        less = "" if smaller == settings else f"{why}: training with {flags} {now}, so that a step learns from less"
        return smaller, less
    table = "\n".join(f"  {name:<22}{size / 2**30:8.2f} GiB" for name, size in sums.items())
    raise UserError(
        f"training a drafter for {settings.target} does not fit in memory:\n{table}\n"
        f"  {'together':<22}{total / 2**30:8.2f} GiB of {free / 2**30:.2f} free\n"
        + _advice(target, settings, free, on_gpu)
    )


def _advice(target: ModelConfig, settings: FitSettings, free: int, on_gpu: bool) -> str:
    smaller = fitting(target, settings, free, on_gpu)
    if smaller is None:
        return "No --layers, --context and --block-rows make it fit: take a smaller target, or free some memory."
    flags = f"--context {smaller.context} --block-rows {smaller.block_rows}"
    if smaller.layers < settings.layers:
        flags = f"--layers {smaller.layers} {flags}"
    size = total_bytes(target, smaller, on_gpu) / 2**30
    fewer = "" if settings.vocab else "; --vocab makes the logits smaller"
    return f"Give {flags}: that takes {size:.2f} GiB, and a step learns from less{fewer}."
