"""Named shapes of models and of drafters with random weights: speed depends on dimensions, not on what was learned.

Whatever is measured on these says that the weights are random. Random weights write nonsense, so nothing here speaks
of quality, and a random drafter's drafts are accepted only where bench/synthetic.py says so.

Models of equal layers are a line of SHAPES. For the others, and for the drafters published for them, shapes.json has
their config.json, which their own architecture's file reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft.bench.coded import BYTES as BYTES_PER_WEIGHT
from sparkdraft.bench.coded import random_coded
from sparkdraft.bench.tensors import drafter_tensor_shapes, file_tensor_shapes, tensor_shapes
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.machine import detect, plan_here
from sparkdraft.models.config import ModelConfig, uniform_config
from sparkdraft.models.layers import AttentionSpec, DenseSpec, LayerSpec
from sparkdraft.models.registry import read_config
from sparkdraft.spec.dflash_config import DFlashConfig, check_fits
from sparkdraft.spec.registry import DFlashKind, DraftSource
from sparkdraft.train.recipe import spread_taps
from sparkdraft.weights.loader import Progress
from sparkdraft.weights.plane_layout import StoredBytes
from sparkdraft.weights.quant.formats import find_matrices
from sparkdraft.weights.quant.stored import QuantisedExperts, Stored

_qwen3, _llama = partial(uniform_config, "qwen3", qk_norm=True), partial(uniform_config, "llama")

SHAPES = {
    "tiny": _qwen3(8, 64, 128, 4, 2, 32, 512, 4096, 1e-6, 1e6, None, True, qk_norm=True),  # does it run at all?
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 1e5, None, True),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, 1e6, None, True, qk_norm=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6, None, False, qk_norm=True),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, None, False),
}
_FILES = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
TARGET_FILES: dict[str, dict[str, Any]] = _FILES["targets"]  # as in config.json
DRAFTER_FILES: dict[str, dict[str, Any]] = _FILES["drafters"]  # in z-lab's dialect; RoPE's theta is not always known


BYTES = ("_blocks", "_scales")  # ends of names of tensors that hold bytes


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """DFlash layers with the dimensions of the target's own; embedding and head are the target's."""

    num_layers: int
    block_size: int = 16
    num_taps: int = 5


DRAFTER_SHAPES = {"dflash-5x": DrafterShape(5), "dflash-3x": DrafterShape(3)}


def shape(name: str) -> ModelConfig:
    if name in TARGET_FILES:
        return read_config(TARGET_FILES[name])
    if name not in SHAPES:
        raise UserError(f"shape '{name}' is not known; known are {', '.join([*SHAPES, *TARGET_FILES])}")
    return SHAPES[name]


def drafter_shape(name: str, target: ModelConfig) -> DFlashConfig:
    """The drafter of this name, if it fits the target."""
    if name in DRAFTER_FILES:
        draft = DFlashConfig.read(DRAFTER_FILES[name])
    elif name in DRAFTER_SHAPES:
        draft = _like(target, DRAFTER_SHAPES[name], name)
    else:
        known = ", ".join([*DRAFTER_SHAPES, *DRAFTER_FILES])
        raise UserError(f"drafter shape '{name}' is not known; known are {known}")
    check_fits(draft, target)
    return draft


def _like(target: ModelConfig, own: DrafterShape, name: str) -> DFlashConfig:
    layer = target.layers[0]
    attention, mlp = layer.mixer, layer.mlp
    is_alike = all(each == layer for each in target.layers)
    if not (is_alike and isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec)):
        raise UserError(
            f"drafter shape '{name}' copies the target's layers, which must be dense and all alike; this "
            f"{target.model_type} model's are not: use one of {', '.join(DRAFTER_FILES)}"
        )
    layer = LayerSpec(replace(attention, qk_norm=True, causal=False), mlp)
    return DFlashConfig(
        model=replace(target, model_type="qwen3", layers=(layer,) * own.num_layers, tie_embeddings=True),
        taps=spread_taps(target.num_layers, own.num_taps),
        block_size=own.block_size,
        mask_token_id=target.vocab_size - 1,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
    )


def random_engine(
    config: EngineConfig, draft: DFlashConfig | None = None, progress: Progress | None = None, form: str = ""
) -> Engine:
    """An engine of the shape that config.model names, with random weights, and a drafter of a shape if one is given.

    form: how the matrices of the target's layers are stored (bench/coded.py), but for routers; "" as published.
    """
    model, device = shape(config.model), detect(config).device
    source = DraftSource(DFlashKind(), draft, RandomCheckpoint(draft, device)) if draft else None
    weights = RandomCheckpoint(TARGET_FILES.get(config.model, model), device, form)
    plan = plan_here(config, model, source.caps if source else None, weights.stored_bytes())
    return build_engine(plan, config, model, weights, SilentTokenizer(), source, progress)


class RandomCheckpoint:
    """Answers like a checkpoint, with tensors drawn on the device as they are asked for."""

    path = Path("random weights")

    def __init__(self, model: ModelConfig | DFlashConfig | Mapping[str, Any], device: str, form: str = "") -> None:
        """model: specs of equal layers, or a config.json. form: of the layers' matrices; "" as published."""
        if isinstance(model, DFlashConfig):
            self._shapes = drafter_tensor_shapes(model)
        else:
            self._shapes = tensor_shapes(model) if isinstance(model, ModelConfig) else file_tensor_shapes(model)
        self._matrices = find_matrices(self.path, {name: _dtype(name) for name in self._shapes})
        self._device, self._form = device, form
        self._generator = torch.Generator(device).manual_seed(0)

    def names(self) -> list[str]:
        parts = {tensor for matrix in self._matrices.values() for tensor in matrix.tensors}
        return [*(name for name in self._shapes if name not in parts), *self._matrices]

    def stored_bytes(self) -> StoredBytes:
        quantised = floats = 0
        for name in self.names():
            tensors = self._matrices[name].tensors if name in self._matrices else (name,)
            count = prod(self._matrix_shape(name))
            if self._form and self._is_coded(name):
                quantised += int(count * BYTES_PER_WEIGHT[self._form])
            elif name in self._matrices:
                quantised += sum(prod(self._shapes[tensor]) for tensor in tensors)
            else:
                floats += count
        return StoredBytes(quantised, floats)

    def _is_coded(self, name: str) -> bool:
        """Whether a tensor is a matrix of a layer, or the matrices of its experts."""
        others = ("mlp.gate.weight", "router.weight", "router.proj.weight", "bias")  # routers, and experts' biases
        return ".layers." in f".{name}" and len(self._matrix_shape(name)) > 1 and not name.endswith(others)

    def _matrix_shape(self, name: str) -> tuple[int, ...]:
        if name not in self._matrices:
            return self._shapes[name]
        *rows, groups, half = self._shapes[self._matrices[name].tensors[0]]
        return (*rows, groups * half * 2)  # of MXFP4: two weights per byte

    def _coded(self, name: str) -> Stored:
        *experts, out, width = self._matrix_shape(name)
        made = [random_coded(self._form, out, width, self._generator) for _ in range(prod(experts))]
        return QuantisedExperts(made) if experts else made[0]

    def read(self, name: str) -> Stored:
        if self._form and self._is_coded(name):
            return self._coded(name)
        matrix = self._matrices.get(name)
        return matrix.format.read(name, *map(self._tensor, matrix.tensors)) if matrix else self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        size = self._shapes[name]
        if name.endswith(BYTES[0]):  # MXFP4, two weights per byte
            return torch.randint(256, size, generator=self._generator, device=self._device, dtype=torch.uint8)
        if name.endswith(BYTES[1]):  # its groups' exponents, 127 for 1
            return torch.full(size, 120, dtype=torch.uint8, device=self._device)
        if name.endswith(("bias", "sinks")):
            return torch.zeros(size, device=self._device)
        if len(size) == 1:
            return torch.ones(size, device=self._device)
        dtype = torch.float32 if self._device == "cpu" else torch.bfloat16
        return torch.randn(size, generator=self._generator, device=self._device, dtype=dtype).mul_(0.02)


def _dtype(name: str) -> str:
    """As safetensors spells it."""
    return "U8" if name.endswith(BYTES) else "BF16"


class SilentTokenizer:
    """For engines whose text nobody reads."""

    eos_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return b""

    first_bytes = token_bytes

    def is_special(self, token: int) -> bool:
        return False
