"""Models and drafters of named shapes with random weights: speed depends on dimensions, not on what was learned.

Whatever is measured on these says that the weights are random. Random weights write nonsense, so nothing here speaks
of quality, and a random drafter's drafts are accepted only where operate/bench/synthetic.py says so.
named_shapes.py has the dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft.config import EngineConfig
from sparkdraft.drafters.base import DraftConfig
from sparkdraft.drafters.find import DraftSource
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.load import stored_of
from sparkdraft.engine.machine import detect, plan_here
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.tensors import file_tensor_shapes, tensor_shapes
from sparkdraft.operate.bench.coded import form_of, random_coded
from sparkdraft.operate.bench.named_shapes import DRAFTER_FILES, SHAPES, TARGET_FILES, drafter_shape, shape, targets
from sparkdraft.plan.weight_formats import drafter_at_load
from sparkdraft.util.names import spelled
from sparkdraft.weights.loader import Progress
from sparkdraft.weights.plane_layout import EMBEDDINGS, StoredBytes, StoredMatrix, count_stored
from sparkdraft.weights.quant.formats import find_matrices
from sparkdraft.weights.quant.stored import QuantisedExperts, Stored

__all__ = ["DRAFTER_FILES", "SHAPES", "TARGET_FILES", "drafter_shape", "shape"]  # beside what this file defines

BYTES = ("_blocks", "_scales")  # ends of names of tensors that hold bytes
DEVIATION = 0.02  # of weights
# Of embeddings. Small ones drown in what attention adds, which is much the same for all rows of a text: 16 rows would
# reach 12 of 128 experts, 8 each, where rows that choose independently reach 82.
EMBEDDED = 4.0


def random_engine(
    config: EngineConfig, draft: DraftConfig | None = None, progress: Progress | None = None, form: str = ""
) -> Engine:
    """An engine of the shape that config.model names, with random weights, and a drafter of a shape if one is given.

    form: how the matrices of the target's layers are stored (operate/bench/coded.py), but for routers; "" as published.
    """
    model, device = shape(config.model), detect(config).device
    source = None
    if draft:
        source = DraftSource(draft, RandomCheckpoint(draft.tensor_shapes(), device))
        source = source.asked(config.drafter_weights, config.draft_vocab, model)
    weights, caps = (
        random_checkpoint(config.model, device, form),
        drafter_at_load(source.caps, source.weights) if source else None,
    )
    plan = plan_here(config, model, caps, stored_of(config, weights, model, caps))
    return build_engine(plan, config, model, weights, SilentTokenizer(), source, progress)


def random_checkpoint(name: str, device: str, form: str = "") -> RandomCheckpoint:
    return RandomCheckpoint(TARGET_FILES.get(spelled(name, targets()) or name, shape(name)), device, form)


class RandomCheckpoint:
    """Answers like a checkpoint, with tensors drawn on the device as they are asked for."""

    path = Path("random weights")

    def __init__(self, model: ModelConfig | Mapping[str, Any], device: str, form: str = "") -> None:
        """model: specs of equal layers, a config.json, or the shapes of tensors by name. form: of the layers' matrices;
        "" as published."""
        if isinstance(model, ModelConfig):
            self._shapes = tensor_shapes(model)
        else:
            self._shapes = file_tensor_shapes(model) if "model_type" in model else dict(model)
        self._matrices = find_matrices(self.path, {name: _dtype(name) for name in self._shapes})
        self._device, self._form = device, form
        self._generator = torch.Generator(device).manual_seed(0)

    def names(self) -> list[str]:
        parts = {tensor for matrix in self._matrices.values() for tensor in matrix.tensors}
        return [*(name for name in self._shapes if name not in parts), *self._matrices]

    def stored_bytes(self, unread: tuple[str, ...] = ()) -> StoredBytes:
        return count_stored(self._stored(name) for name in self.names() if not name.startswith(unread))

    def _stored(self, name: str) -> StoredMatrix:
        *rows, width = self._matrix_shape(name)
        form = None
        if self._form and self._is_coded(name):
            form = form_of(self._form, width)
        elif name in self._matrices:
            form = form_of("mxfp4", width)
        return StoredMatrix(name, prod(rows), width, form)

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
        if self._device.startswith("cuda"):
            # A file's parts are not on the GPU and leave no gaps there; these do, unless they are given back.
            torch.cuda.empty_cache()
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
        deviation = EMBEDDED if name.endswith(EMBEDDINGS) else DEVIATION
        return torch.randn(size, generator=self._generator, device=self._device, dtype=dtype).mul_(deviation)


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
