"""One layer's keys and values as codes in blocks, with uncoded tokens in pages beside them.

    record of a (block, K/V head), T positions of dimension d, plane after plane, each read as one tile
      [K low plane T rows][K high plane, of 3 and 5 bits][V low][V high][K scales T x float16][V scales T x float16]
    pages          float16 [pages, 2, kv_heads, T, d], keys then values, ROTATED as codes are, and keys less the centre:
                   one query, one softmax and one rotation back serve both parts
    page_of        int32 [blocks]: the page that a block has, or -1

A token at position p reads key j uncoded if j < first or p - j < recent, else by its code. The caller makes sure that
the block of such a key has a page (cache/formats).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.layout import SCALE_BYTES, block_width, plane_bytes
from sparkdraft.kernels.turboquant.vectors import Encoded, VectorFormat


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the planes of a record begin, in bytes."""

    block_size: int  # positions
    dim: int
    key_bits: int
    value_bits: int

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of one position in each plane: the key's, then the value's, then the scales of both."""
        scales = SCALE_BYTES * (self.dim // block_width(self.dim))
        return (*plane_bytes(self.dim, self.key_bits), *plane_bytes(self.dim, self.value_bits), scales, scales)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each plane."""
        return tuple(self.block_size * sum(self.planes[:i]) for i in range(len(self.planes)))

    @property
    def nbytes(self) -> int:
        return self.block_size * sum(self.planes)


@dataclass(frozen=True, slots=True)
class CodedLayer:
    layout: RecordLayout
    records: Tensor  # uint8 [blocks, kv_heads, layout.nbytes]
    keys: VectorFormat  # codebook, rotation
    values: VectorFormat
    centre: Tensor | None  # float32 [kv_heads, dim], taken from every key
    pages: Tensor | None  # float16 [pages, 2, kv_heads, block_size, dim]; float32 where it is a reference
    page_of: Tensor | None  # int32 [blocks]
    first: int = 0  # positions from the beginning, and
    recent: int = 0  # from each row back, itself included, that are read uncoded

    @classmethod
    def make(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        keys: VectorFormat,
        values: VectorFormat,
        centre: Tensor | None = None,
        num_pages: int = 0,
        page_dtype: torch.dtype = torch.float16,
        page_of: Tensor | None = None,  # one for all layers: a block has its page in each of them
        first: int = 0,
        recent: int = 0,
    ) -> CodedLayer:
        """All zeros, on the device of the formats' tables. Without page_of there are no pages."""
        assert page_of is not None or not (first or recent), "uncoded rows need pages, and a map to find them by"
        layout = RecordLayout(block_size, keys.dim, keys.bits, values.bits)
        device = keys.levels.device
        records = _zeros((num_blocks, num_kv_heads, layout.nbytes), torch.uint8, device)
        shape = (num_pages, 2, num_kv_heads, block_size, keys.dim)
        pages = None if page_of is None else _zeros(shape, page_dtype, device)
        return cls(layout, records, keys, values, centre, pages, page_of, first, recent)


def planes(layer: CodedLayer) -> tuple[Encoded, Encoded]:
    """Keys and values [blocks, kv_heads, block_size, dim]: views of the records."""
    layout = layer.layout
    views = [
        layer.records[..., start : start + layout.block_size * width].unflatten(-1, (layout.block_size, width))
        for start, width in zip(layout.offsets, layout.planes, strict=True)
    ]
    # Every dim is a multiple of 16, so no scale lies at an odd byte.
    *codes, key_scale, value_scale = views
    split = len(plane_bytes(layout.dim, layout.key_bits))
    return (
        Encoded(tuple(codes[:split]), key_scale.view(torch.float16)),
        Encoded(tuple(codes[split:]), value_scale.view(torch.float16)),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU from the system's zero pages, which take memory only when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
