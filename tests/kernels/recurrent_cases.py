"""Recurrent layers in small: memories full of what nobody may read, requests of random rows, and steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdraft.kernels.ops import AttentionView, DeltaParams, Ops, RecurrentState, input_ring, record_ring


@dataclass(frozen=True)
class Shape:
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 8
    width: int = 4
    most_rows: int = 6

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Part:
    """Rows of one request: what a step runs from position 'first' on."""

    slot: int
    first: int
    x: Tensor  # [rows, channels], before the convolution
    ab: Tensor  # [rows, 2 * value_heads]

    def cut(self, first: int, last: int) -> Part:
        return Part(self.slot, self.first + first, self.x[first:last], self.ab[first:last])

    def followed_by(self, other: Part) -> Part:
        return replace(self, x=torch.cat((self.x, other.x)), ab=torch.cat((self.ab, other.ab)))

    def __len__(self) -> int:
        return len(self.x)


class Layer:
    """Weights of a layer, and the memory of its requests, filled as if former requests had left it."""

    def __init__(
        self, shape: Shape, slots: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.slots, self.dtype, self.device = shape, slots, dtype, device

        def uniform(*size: int, low: float, high: float) -> Tensor:
            return (torch.rand(size, generator=generator) * (high - low) + low).to(device)

        heads = shape.value_heads
        self.weight = uniform(shape.channels, shape.width, low=-0.5, high=0.5)
        self.params = DeltaParams(
            *(shape.key_heads, heads, shape.key_dim, shape.value_dim),
            rate=-uniform(heads, low=0.05, high=2.0),
            bias=uniform(heads, low=-4.0, high=0.0),
        )
        self._generator = generator

    def memory(self) -> RecurrentState:
        """Not a number, and a state that is ahead of everybody: whoever starts at position 0 must not see it."""
        shape = self.shape
        ring, heads = record_ring(shape.most_rows), shape.value_heads

        def poisoned(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(size, float("nan"), dtype=dtype, device=self.device)

        return RecurrentState(
            state=poisoned(self.slots, heads, shape.key_dim, shape.value_dim),
            base=torch.full((self.slots, heads), 12345, dtype=torch.int32, device=self.device),
            keys=poisoned(self.slots, ring, shape.key_heads, shape.key_dim),
            updates=poisoned(self.slots, ring, heads, shape.value_dim),
            decays=poisoned(self.slots, ring, heads),
            inputs=poisoned(self.slots, input_ring(shape.most_rows, shape.width), shape.channels, dtype=self.dtype),
            most_rows=shape.most_rows,
        )

    def rows(self, slot: int, count: int, first: int = 0) -> Part:
        x = torch.randn(count, self.shape.channels, generator=self._generator)
        ab = torch.randn(count, 2 * self.shape.value_heads, generator=self._generator) * 2
        return Part(slot, first, *(t.to(self.dtype).to(self.device) for t in (x, ab)))

    def step(
        self,
        ops: Ops,
        memory: RecurrentState,
        parts: Sequence[Part],
        padding: int = 0,  # rows behind the batch that belong to nobody
        most: int = 0,  # host's bound on the rows of a sequence, where it is larger than they are
    ) -> list[tuple[Tensor, Tensor]]:
        """Convolution and rule of each part: [rows, channels], [rows, value_heads * value_dim]."""
        view, slots = view_of(parts, self.device, most)
        extra = self.rows(0, padding)
        x = torch.cat([part.x for part in parts] + [torch.full_like(extra.x, float("nan"))])
        ab = torch.cat([part.ab for part in parts] + [torch.full_like(extra.ab, float("nan"))])
        conv = ops.causal_conv(x, self.weight, memory, slots, view)
        o = ops.delta_rule(conv, ab, memory, slots, view, self.params)
        ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
        pairs = zip([0, *ends], ends, strict=False)
        return [(conv[begin:end], o[begin:end]) for begin, end in pairs]


def view_of(parts: Sequence[Part], device: str = "cpu", most: int = 0) -> tuple[AttentionView, Tensor]:
    """Their view, without blocks, and their slots."""
    counts = [len(part) for part in parts]
    starts = [sum(counts[:s]) for s in range(len(parts) + 1)]
    contexts = [part.first + len(part) for part in parts]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = torch.zeros(len(parts), 1, dtype=torch.int32, device=device)
    view = AttentionView(integers(starts), integers(contexts), tables, max(most, *counts, 0), max(contexts))
    return view, integers([part.slot if len(part) else -1 for part in parts])


def random_steps(total: int, most_rows: int, seed: int) -> list[tuple[int, int, int]]:
    """First row, rows that stand and rejected rows behind them, until 'total' stand; every fifth is of a prompt."""
    choose, done, found = torch.Generator().manual_seed(seed), 0, list[tuple[int, int, int]]()

    def below(bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=choose))

    while done < total:
        kept = 1 + below(most_rows)
        if below(5) == 0:
            kept += most_rows
        kept = min(kept, total - done)
        rejected = below(most_rows - kept + 1) if kept <= most_rows else 0
        found.append((done, kept, rejected))
        done += kept
    return found


def row_by_row(layer: Layer, ops: Ops, part: Part) -> tuple[Tensor, Tensor]:
    """A step for each row, so that every row leaves its record; nothing is ever rejected."""
    memory = layer.memory()
    results = [layer.step(ops, memory, [part.cut(i, i + 1)])[0] for i in range(len(part))]
    return torch.cat([conv for conv, _ in results]), torch.cat([o for _, o in results])
