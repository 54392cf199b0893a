"""Hands a model its weights while it is being built, one tensor at a time, each straight into its final form.

A model asks by name and shape; nothing it does not ask for may be left over, and nothing it asks for may be missing:
either is an error that names the tensors. The loader knows the form (float of a dtype on a device, or integers packed
for the CPU kernels), the model does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.linear import BiasedLinear, DenseLinear, Linear, StackedLinear
from sparkdraft.weights.quant.group import GROUP, GroupQuant


class WeightSource(Protocol):
    """The part of a checkpoint that holds tensors."""

    @property
    def path(self) -> Path: ...

    def names(self) -> list[str]: ...

    def read(self, name: str) -> Tensor | GroupQuant: ...


Pack = Callable[[list[GroupQuant]], Linear]
Progress = Callable[[int, int], None]  # tensors done, tensors in all


class Loader:
    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        pack: Pack | None = None,  # keeps matrices as integers; None keeps them as floats of 'dtype'
        progress: Progress | None = None,
    ) -> None:
        self.source, self.device, self.dtype, self.pack = source, device, dtype, pack
        self.notes: list[str] = []  # what could not be had as asked, in words
        self._names = frozenset(source.names())
        self._left = set(self._names)
        self._total = len(self._left)
        self._progress = progress

    def linear(self, rows: Mapping[str, int], width: int, bias: bool = False) -> Linear:
        """One matrix [sum of rows, width], stacked of the named ones that read the same input."""
        parts = [self._read(f"{name}.weight", (count, width)) for name, count in rows.items()]
        biases = [self.vector(f"{name}.bias", count) for name, count in rows.items()] if bias else []
        joined = torch.cat(biases) if biases else None
        if self.pack is None:
            return DenseLinear(torch.cat([self._float(p) for p in parts]), joined)
        integers = self._packed(parts, next(iter(rows)))
        return integers if joined is None else BiasedLinear(integers, joined)

    def vector(self, name: str, size: int) -> Tensor:
        return self._float(self._read(name, (size,)))

    def optional_vector(self, name: str, size: int) -> Tensor | None:
        return self.vector(name, size) if name in self._names else None

    def integers(self, name: str, size: int) -> Tensor:
        """Ids, offsets or flags, in the type they were saved in."""
        part = self._read(name, (size,))
        if not isinstance(part, Tensor) or part.is_floating_point():
            raise UserError(f"{self.source.path}: {name} holds no integers; the file is damaged or of another model")
        return part.to(self.device)

    def ignore(self, names: Iterable[str]) -> None:
        """Tensors that are known, and known not to be needed."""
        self._left.difference_update(names)

    def embedding(self, name: str, count: int, width: int) -> Tensor | GroupQuant:
        """A table that kernels look rows up in, of integers where matrices are."""
        part = self._read(f"{name}.weight", (count, width))
        if self.pack is None or width % GROUP:
            return self._float(part)
        return part if isinstance(part, GroupQuant) else GroupQuant.from_float(part)

    def tied_head(self, embedding: Tensor | GroupQuant) -> Linear:
        """The output head of a model whose file holds that matrix once."""
        self._left.discard("lm_head.weight")
        if self.pack is None:
            return DenseLinear(self._float(embedding))
        return self._packed([embedding], "the embedding")

    def finish(self) -> None:
        """Every tensor of the file has found its place, or the file is not what its config says."""
        left = sorted(n for n in self._left if not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise UserError(f"{self.source.path}: {len(left)} tensors belong to no part of the model: {_some(left)}")

    # ---- the parts

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor | GroupQuant:
        if name not in self._names:
            raise UserError(f"{self.source.path}: tensor {name} is missing; the file is incomplete or of another model")
        self._left.discard(name)
        part = self.source.read(name)
        if tuple(part.shape) != shape:
            raise UserError(f"{self.source.path}: {name} has shape {tuple(part.shape)}, the config says {shape}")
        if self._progress:
            self._progress(self._total - len(self._left), self._total)
        return part

    def _float(self, part: Tensor | GroupQuant) -> Tensor:
        if isinstance(part, GroupQuant):
            return part.dequantize(self.dtype).to(self.device)
        return part.to(self.device, self.dtype)

    def _packed(self, parts: list[Tensor | GroupQuant], name: str) -> Linear:
        assert self.pack is not None
        if parts[0].shape[1] % GROUP:
            self.notes.append(f"{name}: width {parts[0].shape[1]} is no multiple of {GROUP}, kept in float32")
            return DenseLinear(torch.cat([self._float(p) for p in parts]))
        groups = [p if isinstance(p, GroupQuant) else GroupQuant.from_float(p) for p in parts]
        if len({g.bits for g in groups}) == 1:
            return self.pack(groups)
        return StackedLinear([self.pack([g]) for g in groups])


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
