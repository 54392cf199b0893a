"""Models of published shapes with random weights, to measure speed without a download."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from sparkdraft.config import EngineConfig
from sparkdraft.drafters.base import DraftConfig
from sparkdraft.drafters.find import DraftSource
from sparkdraft.drafters.ngram import NGRAM_DEPTH
from sparkdraft.engine.build import build_engine
from sparkdraft.engine.drafting import check_depths
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.load import Opened, stored_of
from sparkdraft.engine.machine import detect, plan_here
from sparkdraft.engine.profile import Subject
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.tensors import file_tensor_shapes, tensor_shapes
from sparkdraft.operate.bench.shapes import DRAFTER_FILES, SHAPES, TARGET_FILES, drafter_shape, shape, targets
from sparkdraft.text.tokenizer import BYTE_OF
from sparkdraft.util.names import spelled
from sparkdraft.weights.loader import Progress
from sparkdraft.weights.plane_layout import EMBEDDINGS, StoredBytes, StoredMatrix, count_stored
from sparkdraft.weights.planes import form_of
from sparkdraft.weights.quant.formats import find_matrices
from sparkdraft.weights.quant.stored import Coded, QuantisedExperts, Stored

__all__ = ["DRAFTER_FILES", "SHAPES", "TARGET_FILES", "drafter_shape", "shape"]  # beside what this file defines

BYTES = ("_blocks", "_scales")  # ends of names of tensors that hold bytes
CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"  # a template
DEVIATION = 0.02  # of weights
# Small embeddings drown in what attention adds, which is much the same for all tokens of a text: 16 would reach 12 of
# 128 experts, 8 each, where tokens that choose independently reach 82.
EMBEDDED = 4.0


def random_engine(
    config: EngineConfig, draft: DraftConfig | None = None, progress: Progress | None = None, form: str = ""
) -> Engine:
    """Return an engine of config.model's shape with random weights, and with a drafter if a shape is given. form:
    format of the matrices of the target's layers, except routers; "" as published."""
    opened = open_random(config, draft, form)
    model, weights = opened.model_config, opened.checkpoint
    plan = plan_here(config, model, opened.caps, stored_of(config, weights, model, opened.caps))
    return build_engine(plan, config, model, weights, SilentTokenizer(), opened.drafter, progress)


def open_random(config: EngineConfig, draft: DraftConfig | None = None, form: str = "") -> Opened:
    """Return the parts of an engine with random weights. engine/load.py makes one that is warmed up and writes text;
    that of `random_engine` is neither."""
    model, found, source = shape(config.model), detect(config), None
    if draft:
        source = DraftSource(draft, RandomCheckpoint(draft.tensor_shapes(), found.device))
        source = source.asked(config.drafter_weights, config.draft_vocab, model)
    most = source.caps.max_depth if source else NGRAM_DEPTH if config.ngram else 0
    check_depths(config.num_draft, config.depths, most, bool(source))
    weights = random_checkpoint(config.model, found.device, form)
    subject = Subject.of(found, config.model, weights.config, weights.stored_bytes()[:2], "")
    return Opened(config, weights, model, source, subject, [])


def random_checkpoint(name: str, device: str, form: str = "") -> RandomCheckpoint:
    return RandomCheckpoint(TARGET_FILES.get(spelled(name, targets()) or name, shape(name)), device, form)


class RandomCheckpoint:
    """A checkpoint whose tensors are drawn on the device as they are asked for."""

    path = Path("random weights")
    chat_template: str | None = CHAT

    def __init__(self, model: ModelConfig | Mapping[str, Any], device: str, form: str = "") -> None:
        """model: specs of equal layers, a config.json, or the shapes of tensors by name. form: format of the layers'
        matrices; "" as published."""
        if isinstance(model, ModelConfig):
            self._shapes = tensor_shapes(model)
        else:
            self._shapes = file_tensor_shapes(model) if "model_type" in model else dict(model)
        self._matrices = find_matrices(self.path, {name: _dtype(name) for name in self._shapes})
        self._device, self._form = device, form
        self.config: dict[str, Any] = {}  # no key of it is needed beside the specs
        self.generation: dict[str, Any] = {}
        self.special: dict[str, Any] = {}
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
            form = form_of(random_coded(self._form, 1, width, torch.Generator()))
        elif name in self._matrices:
            form = form_of(random_coded("mxfp4", 1, width, torch.Generator()))
        return StoredMatrix(name, prod(rows), width, form)

    def _is_coded(self, name: str) -> bool:
        """Tell if a tensor is a matrix of a layer, or the matrices of its experts."""
        others = ("mlp.gate.weight", "router.weight", "router.proj.weight", "bias")  # routers, and experts' biases
        return ".layers." in f".{name}" and len(self._matrix_shape(name)) > 1 and not name.endswith(others)

    def tokenizer_json(self) -> RawTokenizer:
        """Return a tokenizer whose ids beyond the bytes are words."""
        vocab_size = next(size[0] for name, size in self._shapes.items() if name.endswith(EMBEDDINGS))
        letters = dict(sorted(BYTE_OF.items(), key=itemgetter(1))[:vocab_size])
        tokenizer = RawTokenizer(models.BPE(letters | {f"Ġ{i}": i for i in range(len(letters), vocab_size)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

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
    """The dtype as safetensors spells it."""
    return "U8" if name.endswith(BYTES) else "BF16"


class SilentTokenizer:
    """A tokenizer for engines whose text nobody reads."""

    eos_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return b""

    first_bytes = token_bytes

    def is_special(self, token: int) -> bool:
        return False


# ---- random quantised weights with a mean of 0

SPREAD = 0.02  # standard deviation of the weights, about
FORMS = ("mxfp4", "int4", "nvfp4", "fp8")


def random_coded(form: str, out: int, width: int, generator: torch.Generator) -> Coded:
    """Return a random matrix [out, width] in a format of FORMS, on the generator's device."""
    device = generator.device
    if form == "fp8":
        codes = torch.randn((out, width), generator=generator, device=device, dtype=torch.bfloat16).mul_(16)
        return Coded(
            "e4m3", codes.to(torch.float8_e4m3fn).view(torch.uint8), width, None, None,
            torch.full((out,), SPREAD / 16, device=device),
        )  # fmt: skip
    codes = torch.randint(256, (out, width // 2), generator=generator, device=device, dtype=torch.uint8)
    if form == "mxfp4":
        return Coded("e2m1", codes, 32, torch.full((out, width // 32), 120, dtype=torch.uint8, device=device))
    if form == "nvfp4":
        scale = torch.ones((out, width // 16), device=device).to(torch.float8_e4m3fn)
        return Coded("e2m1", codes, 16, scale, None, torch.full((out,), SPREAD / 2.9, device=device))
    assert form == "int4", form
    group = _int4_group(width)
    scale = torch.full((out, width // group), SPREAD / 4.2, dtype=torch.float16, device=device)
    return Coded("int4", _centred(codes), group, scale)


def _centred(codes: Tensor) -> Tensor:
    """Give INT4 codes (two per byte) a mean of 0: -8 becomes 0. A matrix whose mean is not 0 adds the same to all its
    outputs and makes all tokens alike, layer by layer: 16 of them reach 20 experts where independent tokens reach 82.
    """
    for nibble, zero in ((0x0F, 0x08), (0xF0, 0x80)):
        codes[codes & nibble == 0] |= zero
    return codes


def _int4_group(width: int) -> int:
    return next(size for size in (128, 64, 32, 16) if width % size == 0)
