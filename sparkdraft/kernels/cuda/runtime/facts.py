"""Facts about the GPU: whether the tiles of a model were measured on it, and how kernels are launched."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparkdraft.core import Fact
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.recurrent import delta_chunks, delta_steps
from sparkdraft.kernels.cuda.runtime import pdl, tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.cuda.runtime.tuned import Key
from sparkdraft.kernels.ops import KernelShapes

MOST_NAMED = 8  # keys that a reason lists


def facts(asked: KernelShapes, device: torch.device) -> list[Fact]:
    gpu = gpu_of(device)
    found = [fact for name, keys in tile_keys(asked).items() if (fact := tiles(name, keys, gpu))]
    if asked.coded_dims:
        found.append(Fact("tiles of coded attention", "fixed: the kernels have one form for every GPU"))
    return [*found, launches(device, gpu)]


def tile_keys(asked: KernelShapes) -> dict[str, set[Key]]:
    """By the fact's name, all that the model's launches look up."""
    matrices = {key for each in asked.matrices for key in few_tokens.tile_keys(each)}
    of_experts = {key for each in asked.experts for key in experts.tile_keys(*each, asked.most_rows)}
    of_attention = {key for dim in asked.head_dims for key in paged.tile_keys(dim, asked.itemsize)}
    recurrent: set[Key] = set()
    for heads, key_dim, value_dim in asked.recurrent:
        recurrent.add(delta_steps.tile_key(key_dim, value_dim))
        recurrent.update(delta_chunks.tile_keys(heads, key_dim, value_dim, asked.itemsize))
    return {
        "matrix tiles": matrices,
        "expert tiles": of_experts,
        "attention tiles": of_attention,
        "recurrent tiles": recurrent,
    }


def tiles(name: str, keys: Iterable[Key], gpu: Gpu) -> Fact | None:
    """None: the model has nothing of the kind."""
    wanted = sorted(set(keys))
    if not wanted:
        return None
    guessed = [key for key in wanted if not tuned.is_measured(gpu, key)]
    if not guessed:
        return Fact(name, f"measured on {gpu.name}")
    fitted = [key for key in guessed if tuned.find(gpu, key)]
    ruled = [key for key in guessed if not tuned.find(gpu, key)]
    how = " and ".join(["chosen to fit its shared memory"] * bool(fitted) + ["chosen by rule"] * bool(ruled))
    if len(guessed) == len(wanted):
        return Fact(name, how, f"none of {_named(guessed)} was measured on {gpu.name}")
    return Fact(
        name,
        f"{len(wanted) - len(guessed)} of {len(wanted)} measured on {gpu.name}, the others {how}",
        f"not measured: {_named(guessed)}",
    )


def _named(keys: list[Key]) -> str:
    shown = [f"{key.kernel} {' x '.join(map(str, key.shape))} ({key.form})" for key in keys[:MOST_NAMED]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def launches(device: torch.device, gpu: Gpu) -> Fact:
    """Programmatic dependent launch: a kernel is set up while the one before still runs."""
    if pdl.active(device):
        return Fact("kernel launches", "overlapped")
    return Fact("kernel launches", "one after the other", f"overlap needs sm_90 or later; this GPU is {gpu.name}")
