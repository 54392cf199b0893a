"""Gives a model its weights while it is built, one tensor at a time, each in its final form.

A model asks by name and shape. A tensor that is missing, or that nobody asked for, is an error that names it. The file
decides how each matrix is stored (weights/quant), and the kernels that will read it decide how it is kept
(`keep_matrix`, `keep_table`); a matrix that they have no form for is kept as floats, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sparkdraft.core import Fallback, UserError
from sparkdraft.weights.keeping import KeepsWeights
from sparkdraft.weights.linear import CannotKeep, ExpertLinear, Linear
from sparkdraft.weights.quant.quantise import QUANTISERS
from sparkdraft.weights.quant.stored import QuantisedExperts, Stored, as_float, take_rows
from sparkdraft.weights.quantised_cache import QuantisedCache


class WeightSource(Protocol):
    """The part of a checkpoint that holds tensors."""

    @property
    def path(self) -> Path: ...

    def names(self) -> list[str]:
        """As `Checkpoint.names`."""

    def read(self, name: str) -> Stored: ...


Progress = Callable[[int, int], None]  # tensors done, tensors in all


class Loader:
    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,  # of activations, and of what is kept as floats
        ops: KeepsWeights,  # the kernels that will read the weights
        progress: Progress | None = None,
        under: str = "",  # prefix of this model's tensors; another loader reads the others
        weights: str = "auto",  # how float matrices are rounded, of quantise.QUANTISERS; auto: not at all
        cache: QuantisedCache | None = None,  # keeps rounded matrices for the next load
        option: str = "weights",  # the option by which the user asked for rounding, for messages
        all_floats: bool = False,  # keep every matrix as floats, whatever the file holds
    ) -> None:
        self.source, self.device, self.dtype, self.ops = source, device, dtype, ops
        self.fallbacks: list[Fallback] = []
        self._rounded: dict[str, list[str]] = {}  # reason -> matrices whose numbers differ from the file's
        self._names = frozenset(name for name in source.names() if name.startswith(under))
        self._left = set(self._names)
        self._total = len(self._left)
        self._progress = progress
        self._weights, self._num_quantised, self._cache, self._option = weights, 0, cache, option
        self._all_floats = all_floats

    def linear(
        self, rows: Mapping[str, int], width: int, bias: bool = False, fused: str = "", as_stored: bool = False
    ) -> Linear:
        """One matrix [sum of rows, width], stacked of named matrices that read the same input.

        fused: the name under which some files hold it stacked already. as_stored: never quantise floats, as for a head.
        """
        if fused and f"{fused}.weight" in self._names:
            rows = {fused: sum(rows.values())}
        parts = [self._matrix(f"{name}.weight", (count, width)) for name, count in rows.items()]
        if not bias:
            self._leave_empty_biases(rows, parts)
        if not as_stored:
            parts = [self._quantise(part, name) for part, name in zip(parts, rows, strict=True)]
        biases = [self.vector(f"{name}.bias", count) for name, count in rows.items()] if bias else []
        return self._keep(parts, torch.cat(biases) if biases else None, next(iter(rows)))

    def picked_linear(self, parts: Sequence[tuple[str, int, Tensor | None]], width: int) -> Linear:
        """One matrix stacked of chosen rows, where the file's order is not the one that kernels want.

        parts: the name of a matrix, its rows in the file, and which of them are taken, in order; None: all.
        """
        found = [(self._matrix(f"{name}.weight", (count, width)), ids) for name, count, ids in parts]
        return self._keep([part if ids is None else take_rows(part, ids) for part, ids in found], None, parts[0][0])

    def float_linear(self, name: str, rows: int, width: int, bias: bool = False) -> Linear:
        """A matrix that is always kept as floats, such as a router's, whose choices are discrete."""
        part = self._matrix(f"{name}.weight", (rows, width))
        own = self.vector(f"{name}.bias", rows) if bias else None
        return self.ops.keep_float_matrix([part], own, self._float)

    def experts(self, name: str, rows: Mapping[str, int], width: int, count: int, fused: str) -> ExpertLinear:
        """One matrix [sum of rows, width] per expert.

        A file holds them one by one, as 'name'.7.gate_proj, or in one tensor 'name'.gate_up_proj ('fused').
        """
        total = sum(rows.values())
        for whole in (f"{name}.{fused}", f"{name}.{fused}.weight"):
            if whole in self._names:
                matrices = self.expert_matrices(whole, count, total, width)
                return self.keep_experts([[matrix] for matrix in matrices], None, whole)
        each = [
            [self._matrix(f"{name}.{e}.{part}.weight", (n, width)) for part, n in rows.items()] for e in range(count)
        ]
        return self.keep_experts(each, None, name)

    def keep_experts(
        self, experts: Sequence[Sequence[Stored]], bias: Tensor | None, name: str = "experts"
    ) -> ExpertLinear:
        """experts: for each, the parts that its matrix is stacked of. name: for notes."""
        experts = [[self._wanted(self._quantise(part, name)) for part in parts] for parts in experts]
        try:
            kept = self.ops.keep_experts(experts, bias, self._float)
        except CannotKeep as reason:
            self._note_floats(name, reason)
            kept = self.ops.keep_float_experts(experts, bias, self._float)
        self._count_rounded(kept, name)
        return kept

    def expert_matrices(self, name: str, count: int, rows: int, width: int, turned: bool = False) -> list[Stored]:
        """The matrices [rows, width] of one tensor, by expert. turned: floats are stored as [width, rows]."""
        part = self._take(name)
        if isinstance(part, Tensor):
            self._check(name, part.shape, (count, width, rows) if turned else (count, rows, width))
            self._check_floats(name, part)
            return [each.t() if turned else each for each in part]
        self._check(name, part.shape, (count, rows, width))
        assert isinstance(part, QuantisedExperts)  # nothing else has three dimensions
        return list(part.experts)

    def floats(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of any shape that is not a matrix. dtype: None for the type of activations."""
        part = self._read(name, shape)
        return self._float(part) if dtype is None else as_float(part, dtype).to(self.device)

    def has(self, name: str) -> bool:
        return name in self._names

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.floats(name, (size,), dtype)

    def integers(self, name: str, size: int) -> Tensor:
        """Ids, offsets or flags, in the type they were saved in."""
        part = self._read(name, (size,))
        if not isinstance(part, Tensor) or part.is_floating_point():
            raise UserError(f"{self.source.path}: {name} holds no integers; the file is damaged or of another model")
        return part.to(self.device)

    def embedding(self, name: str, count: int, width: int) -> Stored:
        """A table in which kernels look up rows."""
        part = self._wanted(self._matrix(f"{name}.weight", (count, width)))
        table = self.ops.keep_table(part, self._float)
        if not isinstance(table, Tensor) and not isinstance(part, Tensor):
            some = torch.arange(0, count, max(1, count // 64))
            kept, stored = (as_float(take_rows(each, some)).cpu() for each in (table, part))
            if not torch.equal(kept, stored):
                self._rounded.setdefault("an embedding has 8 bits or its own integers", []).append(name)
        return table

    def tied_head(self, table: Stored, name: str = "lm_head", as_stored: bool = True) -> Linear:
        """The head of a model that uses its embedding as the head. A float copy in the file is ignored; a quantised
        one is another matrix and is used. as_stored: as in `linear`."""
        if f"{name}.weight" in self._left:
            own = self._take(f"{name}.weight")
            if not isinstance(own, Tensor):
                self._check(f"{name}.weight", own.shape, (table.shape[0], table.shape[1]))
                return self._keep([own], None, name)
        return self._keep([table if as_stored else self._quantise(table, name)], None, "the embedding")

    def head_of(self, rows: Stored) -> Linear:
        """A head of chosen rows. It is never cached: the file does not determine which rows they are."""
        return self._keep([self._quantise(rows, "the head", cached=False)], None, "the head")

    def ignore(self, names: Iterable[str]) -> None:
        self._left.difference_update(names)

    def leave(self, prefix: str) -> int:
        """Leave the tensors under a prefix to another loader (under=prefix). Returns how many there are."""
        names = [name for name in self._left if name.startswith(prefix)]
        self.ignore(names)
        return len(names)

    def note(self, name: str, reason: str, is_choice: bool = False) -> None:
        self.fallbacks.append(Fallback(name, reason, is_choice))

    def finish(self) -> None:
        """Raise UserError if a tensor of the file was not used; add the notes on rounding."""
        left = sorted(n for n in self._left if not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise UserError(f"{self.source.path}: {len(left)} tensors belong to no part of the model: {_some(left)}")
        if self._weights != "auto" and not self._num_quantised:
            raise UserError(
                f"{self._option} is {self._weights}, and {self.source.path} has no matrix of floats that could be "
                "quantised: leave it on auto"
            )
        if self._cache:
            self._cache.finish()
            if self._cache.problem:
                self.note(*self._cache.problem)
        for reason, names in self._rounded.items():
            what = "1 quantised matrix is" if len(names) == 1 else f"{len(names)} quantised matrices are"
            self.note(f"{what} rounded to 8 bits", f"{reason}: {_some(names, 2)}")

    def _read(self, name: str, shape: tuple[int, ...]) -> Stored:
        part = self._take(name)
        self._check(name, part.shape, shape)
        return part

    def _take(self, name: str) -> Stored:
        if name not in self._names:
            raise UserError(f"{self.source.path}: tensor {name} is missing; the file is incomplete or of another model")
        self._left.discard(name)
        if self._progress:
            self._progress(self._total - len(self._left), self._total)
        return self.source.read(name)

    def _check(self, name: str, has: Sequence[int], shape: tuple[int, ...]) -> None:
        if tuple(has) != shape:
            raise UserError(f"{self.source.path}: {name} has shape {tuple(has)}, the config says {shape}")

    def _matrix(self, name: str, shape: tuple[int, int]) -> Stored:
        part = self._read(name, shape)
        if isinstance(part, Tensor):
            self._check_floats(name, part)
        return part

    def _leave_empty_biases(self, names: Iterable[str], parts: Iterable[Stored]) -> None:
        """Ignore the biases of zeros that GPTQ's tools write for every matrix; `finish` names others."""
        for name, part in zip(names, parts, strict=True):
            bias = f"{name}.bias"
            if bias in self._left and not isinstance(part, Tensor) and not bool(as_float(self.source.read(bias)).any()):
                self._left.discard(bias)

    def _quantise(self, part: Stored, name: str, cached: bool = True) -> Stored:
        if self._weights == "auto" or not isinstance(part, Tensor):
            return part
        quantiser, multiple = QUANTISERS[self._weights]
        if part.shape[1] % multiple:
            self.note(
                f"a matrix that is not {self._weights}", f"{name}: width {part.shape[1]} is no multiple of {multiple}"
            )
            return part
        self._num_quantised += 1
        if self._cache is None or not cached:
            return quantiser(part.to(self.device))
        key = self._cache.key(name)
        if kept := self._cache.read(key, (part.shape[0], part.shape[1])):
            return kept.to(self.device)
        made = quantiser(part.to(self.device))
        self._cache.write(key, made)
        return made

    def _check_floats(self, name: str, part: Tensor) -> None:
        if not part.is_floating_point() or part.element_size() < 2:
            kind = str(part.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.source.path}: {name} is stored as {kind}, and the tensors beside it make no format that is "
                "read: use the same model in 16 bits, or a GGUF file of it"
            )

    def _keep(self, parts: list[Stored], bias: Tensor | None, name: str) -> Linear:
        parts = [self._wanted(part) for part in parts]
        try:
            kept = self.ops.keep_matrix(parts, bias, self._float)
        except CannotKeep as reason:
            self._note_floats(name, reason)
            kept = self.ops.keep_float_matrix(parts, bias, self._float)
        self._count_rounded(kept, name)
        return kept

    def _count_rounded(self, kept: Linear | ExpertLinear, name: str) -> None:
        if kept.rounded:
            self._rounded.setdefault(kept.rounded, []).append(name)

    def _note_floats(self, name: str, reason: CannotKeep) -> None:
        kind = str(self.dtype).removeprefix("torch.")
        self.note(f"a {kind} matrix among quantised ones", f"{name}: {reason}, kept in {kind}")

    def _wanted(self, part: Stored) -> Stored:
        return self._float(part) if self._all_floats else part

    def _float(self, part: Stored) -> Tensor:
        if isinstance(part, Tensor):
            return part.to(self.device, self.dtype)
        return as_float(part, self.dtype).to(self.device)


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
