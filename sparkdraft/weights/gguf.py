"""GGUF files, versions 2 and 3: llama.cpp's one-file checkpoints, read without its library.

The header is parsed once over a memory mapping, and every length is checked against the file. Tensors are views of the
mapping; names, config and row order are translated into Hugging Face's. quant/gguf_blocks.py reads quantised types, and
the gguf package those that are unknown there.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.plane_layout import StoredBytes, StoredMatrix, count_stored
from sparkdraft.weights.quant.formats import check_matrix
from sparkdraft.weights.quant.gguf_blocks import BF16, BLOCKS, F16, F32, FORMS, NAMES, read_blocks
from sparkdraft.weights.quant.stated import NOTHING
from sparkdraft.weights.quant.stored import Stored, take_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer


MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, 28: torch.float64}
MAX_DIMS = 4

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs",  # Llama 3's rope scaling: a divisor for each frequency
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Keys of general.sampling -> keys of generation_config.json.
SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# What authors recommend, for chat models whose files do not say it, by general.basename in lower case.
RECOMMENDED = {
    "smollm2": {"temperature": 0.2, "top_p": 0.9},  # from the model card of SmolLM2's instruct models
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str  # as in the file
    kind: int  # ggml type
    shape: tuple[int, ...]  # row-major: [out, in]
    start: int  # byte in the file
    size: int  # bytes


class GgufFile:
    """The header of one file: `meta` (key -> value) and `tensors` (name in the file -> `TensorInfo`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        if self.size < 24:
            self.broken("it is shorter than a header")
        with path.open("rb") as file:
            # Private pages: writing to a tensor by mistake neither crashes nor changes the file.
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._view = memoryview(self.map)
        self._pos = 4
        if self._view[:4] != MAGIC:
            raise UserError(f"{path} does not begin with GGUF: pass a .gguf file, or fetch it again.")
        version = self._number("<I")
        if version not in (2, 3):
            read = "versions 2 and 3 (little-endian) are read"
            raise UserError(f"{path} is GGUF version {version}, and {read}: convert it.")
        num_tensors, num_meta = self._number("<Q"), self._number("<Q")
        # The smallest entry of either kind takes 13 (key, type, bool) or 24 bytes.
        if num_tensors * 24 + num_meta * 13 > self.size:
            self.broken(f"it promises {num_tensors:,} tensors and {num_meta:,} settings")
        self.meta: dict[str, Any] = {}
        for _ in range(num_meta):
            key = self._string()
            self.meta[key] = self._value(self._number("<I"))
        self.tensors = self._tensor_table(num_tensors)

    def broken(self, why: str) -> NoReturn:
        raise UserError(f"The GGUF file {self.path} is damaged or incomplete ({why}): fetch it again.")

    def _take(self, count: int) -> int:
        """Step over `count` bytes and return their start."""
        start = self._pos
        if count > self.size - start:
            self.broken(f"its header goes on after the {self.size:,} bytes of the file")
        self._pos = start + count
        return start

    def _number(self, form: str) -> int:
        return int(struct.unpack_from(form, self._view, self._take(struct.calcsize(form)))[0])

    def _string(self) -> str:
        length = self._number("<Q")
        start = self._take(length)
        return str(self._view[start : start + length], "utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            self.broken(f"it holds a setting of the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self._view, dtype, 1, self._take(dtype.itemsize))[0].item()

    def _array(self) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == STRING:
            return self._strings(count)
        if kind not in SCALARS:
            self.broken(f"it holds a list of the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self._view, dtype, count, self._take(count * dtype.itemsize)).tolist()

    def _strings(self, count: int) -> list[str]:
        """Read a vocabulary: 10^5 strings, each after its length, so the loop is kept tight."""
        if count * 8 > self.size - self._pos:
            self.broken(f"it promises a list of {count:,} strings")
        view, pos, size, unpack = self._view, self._pos, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        add = out.append
        for _ in range(count):
            start = pos + 8
            if start > size:
                self.broken("a list of strings goes on after its end")
            pos = start + unpack(view, pos)[0]
            if pos > size:
                self.broken("a list of strings goes on after its end")
            add(str(view[start:pos], "utf-8", "replace"))
        self._pos = pos
        return out

    def _tensor_table(self, count: int) -> dict[str, TensorInfo]:
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = self._string()
            num_dims = self._number("<I")
            if not 1 <= num_dims <= MAX_DIMS:
                self.broken(f"{name!r} has {num_dims} dimensions")
            shape = struct.unpack_from(f"<{num_dims}Q", self._view, self._take(8 * num_dims))[::-1]
            entries.append((name, shape, self._number("<I"), self._number("<Q")))
        align = self.meta.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align & (align - 1):
            self.broken(f"its alignment is {align}")
        base = -(-self._pos // align) * align
        tensors = {name: self._tensor(name, shape, kind, base + at) for name, shape, kind, at in entries}
        if len(tensors) != count:
            self.broken("two tensors have one name")
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        elements, size = BLOCKS.get(kind) or self._foreign_block(name, kind)
        if shape[-1] % elements:
            self.broken(f"the rows of {name} are not whole blocks")
        nbytes = prod(shape) // elements * size
        if start % 8 or start + nbytes > self.size:
            self.broken(f"{name} needs bytes up to {start + nbytes:,}, the file has {self.size:,}")
        return TensorInfo(name, kind, shape, start, nbytes)

    def _foreign_block(self, name: str, kind: int) -> tuple[int, int]:
        from gguf.constants import GGML_QUANT_SIZES  # takes 0.2 s

        sizes: dict[int, tuple[int, int]] = {int(k): v for k, v in GGML_QUANT_SIZES.items()}
        if kind not in sizes:
            self.broken(f"{name} has the unknown type {kind}")
        return sizes[kind]

    def bytes(self, info: TensorInfo) -> Tensor:
        """The raw bytes of a tensor as uint8, without a copy."""
        return torch.frombuffer(self.map, dtype=torch.uint8, count=info.size, offset=info.start)

    def read(self, name: str) -> Stored:
        """Read one tensor by its name in the file, in the file's row order."""
        info = self.tensors[name]
        if info.size == 0:
            return torch.empty(info.shape)
        if info.kind in FLOATS:
            return self.bytes(info).view(FLOATS[info.kind]).view(info.shape)
        if len(info.shape) == 2 and (read := read_blocks(self.bytes(info), info.kind, info.shape[0])) is not None:
            check_matrix(f"{self.path}: {name}", read, NOTHING)
            return read
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = self.bytes(info).view(*info.shape[:-1], -1).numpy()
        return torch.from_numpy(dequantize(raw, GGMLQuantizationType(info.kind)))


def hf_name(name: str) -> str | None:
    """Hugging Face's name for a tensor of the file; None if it has none."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


class GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GgufFile(path)
        try:
            self._translate(self.file.meta)
        except (TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError) as error:
            self.file.broken(f"a setting is not of the kind it should be: {error}")

    def _translate(self, meta: dict[str, Any]) -> None:
        path = self.path
        if meta.get("split.count", 1) > 1:
            raise UserError(f"{path} is one part of a split GGUF: merge the parts with llama-gguf-split first.")
        self.config = gguf_config(self.file)
        ids = {meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")} - {None}
        self.generation: dict[str, Any] = {"eos_token_id": sorted(ids)} if ids else {}
        self.generation |= sampling_of(meta)
        self.chat_template: str | None = meta.get("tokenizer.chat_template")
        self.special = _special(meta)
        self._names = self._map_names()

    def _map_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for name in self.file.tensors:
            known = hf_name(name)
            if known is None:
                raise UserError(f"{self.path} has the tensor {name}, which no architecture has: use another file.")
            names[known] = name
        return names

    def names(self) -> list[str]:
        return list(self._names)

    def read(self, name: str) -> Stored:
        if name not in self._names:
            raise UserError(f"The checkpoint {self.path} has no tensor {name}: is it a whole model?")
        value = self.file.read(self._names[name])
        heads = self._interleaved_heads(name)
        if heads is None:
            return value
        if heads < 1 or value.shape[0] % (2 * heads):
            self.file.broken(f"{name} has {value.shape[0]} rows for {heads} heads")
        rows = _half_split_rows(value.shape[0], heads)
        return take_rows(value, rows)

    def matrix_types(self) -> dict[str, tuple[str, int]]:
        """Each matrix of the checkpoint -> (GGUF's name of its type, "" for floats; number of weights)."""
        tensors = {name: self.file.tensors[own] for name, own in self._names.items()}
        return {name: (NAMES.get(t.kind, ""), prod(t.shape)) for name, t in tensors.items() if len(t.shape) == 2}

    def stored_bytes(self, unread: tuple[str, ...] = ()) -> StoredBytes:
        sizes = ((t, t.shape[-1] if len(t.shape) > 1 else 1) for t in self.file.tensors.values())
        matrices = (
            StoredMatrix(t.name, prod(t.shape) // (width or 1), width, FORMS.get(t.kind) if len(t.shape) == 2 else None)
            for t, width in sizes
        )
        return count_stored(matrices, self.config["tie_word_embeddings"])

    def _interleaved_heads(self, name: str) -> int | None:
        """The heads whose rows must be reordered: llama.cpp stores Llama's q and k for RoPE over neighbours, Hugging
        Face rotates the two halves of a head."""
        if self.config["model_type"] != "llama" or "_norm" in name:
            return None
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else None

    def tokenizer_json(self) -> RawTokenizer:
        from sparkdraft.weights.gguf_tokenizer import build

        return build(self.file.meta, self.path)


def _half_split_rows(rows: int, heads: int) -> Tensor:
    """Each row's index in the file, in Hugging Face's order: pairs (2i, 2i + 1) become (i, i + dim/2)."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _special(meta: dict[str, Any]) -> dict[str, str]:
    tokens = meta.get("tokenizer.ggml.tokens", [])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {key: meta.get(f"tokenizer.ggml.{stem}_token_id") for key, stem in keys.items()}
    return {key: tokens[i] for key, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    meta = file.meta
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{file.path} has the architecture {arch!r}, and GGUF files of {known} are read: use one of those."
        )
    if meta.get(f"{arch}.expert_count", 0):
        raise UserError(f"{file.path} is a mixture of experts, which is not read from GGUF: use a dense model.")
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} has no token embedding (an adapter or a vocabulary only?): use a whole model.")

    def need(key: str) -> Any:
        value = meta.get(f"{arch}.{key}")
        if not isinstance(value, int | float):
            problem = f"has no single number for {arch}.{key}"
            raise UserError(f"{file.path} {problem}: it is incomplete, or of an unread kind.")
        return value

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = meta.get(f"{arch}.attention.key_length", hidden // heads)
    config = {
        "model_type": arch,
        "architectures": [ARCHITECTURES[arch]],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, arch),
        "partial_rotary_factor": meta.get(f"{arch}.rope.dimension_count", head_dim) / head_dim,
        "sliding_window": meta.get(f"{arch}.attention.sliding_window"),
        "max_position_embeddings": need("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if isinstance(config["num_key_value_heads"], list):
        raise UserError(f"{file.path} has another number of heads in each layer, which is not read from GGUF.")
    return config


def _rope_scaling(file: GgufFile, arch: str) -> dict[str, Any] | None:
    """The rope_scaling of a config. Llama 3's scaling is not metadata but the tensor `rope_freqs`."""
    prefix = f"{arch}.rope.scaling."
    meta = {key[len(prefix) :]: value for key, value in file.meta.items() if key.startswith(prefix)}
    kind = meta.get("type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(f"{file.path} scales rope by {kind!r}, and none, linear and yarn are read: use another file.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.get("factor", 1.0)}
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "attn_factor": "attn_factor",
    }
    if kind == "yarn":
        scaling |= {names[key]: value for key, value in meta.items() if key in names}
    return scaling


def sampling_of(meta: Mapping[str, Any]) -> dict[str, float]:
    """The file's sampling values, with the keys of generation_config.json; RECOMMENDED if it has none."""
    said = {name: meta.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    found = {name: round(value, 6) for name, value in said.items() if isinstance(value, int | float)}
    if found or not meta.get("tokenizer.chat_template"):
        return found
    return dict(RECOMMENDED.get(str(meta.get("general.basename", "")).lower(), {}))
