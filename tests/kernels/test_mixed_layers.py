"""One step over layers that have nothing in common: each has its own cache, kernel and shape.

A layer of 512 lanes that sees everything and makes its values of its keys, one of 256 with a window, whose pages are
kept apart and lost behind it, and one of 64 with sinks. All kernels against plain torch over one exact cache, with
chunks, single rows and drafts; on a GPU, or under TRITON_INTERPRET=1, those of Triton too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.cache.formats import KVCache
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.windows import StepRoom, WindowGroup
from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import AttentionParams, AttentionView, Ops, RopeArgs
from sparkdraft.models.common.layers import AttentionSpec, RopeSpec
from sparkdraft.models.common.rope import rope_table

WINDOW, SIZE, BLOCKS, CONTEXT, EPS = 20, 16, 24, 256, 1e-6
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
SPECS = [
    AttentionSpec(4, 1, 512, RopeSpec(512, 1e6, PROPORTIONAL), 1.0, qk_norm=True, values="keys"),
    AttentionSpec(4, 2, 256, RopeSpec(256, rotary_dim=64), 1.0, WINDOW, qk_norm=True, values="normed"),
    AttentionSpec(8, 1, 64, RopeSpec(64, 150000.0), 0.125, sinks=True),
]
STEPS = [  # (sequence, its rows): chunks, single rows, and five drafted rows
    [(0, 30)],
    [(1, 10), (0, 1)],
    [(0, 5), (1, 25)],
    [(1, 1), (0, 1)],
]


def table_of(sequences: list[int]) -> list[list[int]]:
    """The blocks of two sequences, in no order."""
    return [[(7 * i + 3 + 11 * s) % 12 * 2 + s for i in range(12)] for s in sequences]


class Layers:
    """The same queries, keys and values for everybody, and the parameters of three layers."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        made = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made).to(device, dtype)

        self.device, self.dtype, self.made = torch.device(device), dtype, made
        # Small gains: at scale 1 the products of long heads would leave one key with all the weight.
        gains = [[random(spec.head_dim) * 0.2 for _ in "qk"] if spec.qk_norm else [None, None] for spec in SPECS]
        self.norms = [(q, k) for q, k in gains]
        self.tables = [rope_table(spec.rope, CONTEXT).to(device) for spec in SPECS]
        sinks = [torch.randn(s.num_heads, generator=made).to(device) if s.sinks else None for s in SPECS]
        self.params = [AttentionParams(s.scale, s.causal, s.window, k) for s, k in zip(SPECS, sinks, strict=True)]

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def step(self, rows: list[tuple[int, int]], done: list[int]) -> tuple[list[Tensor], Tensor, Tensor, AttentionView]:
        """Projections by layer, positions, slots, and the view."""
        places = [(s, p) for s, n in rows for p in range(done[s], done[s] + n)]
        tables = table_of([s for s, _ in rows])
        slots = self.ints([table_of([s])[0][p // SIZE] * SIZE + p % SIZE for s, p in places])
        starts = [sum(n for _, n in rows[:i]) for i in range(len(rows) + 1)]
        contexts = [done[s] + n for s, n in rows]
        view = AttentionView(
            self.ints(starts), self.ints(contexts), self.ints(tables), max(n for _, n in rows), max(contexts)
        )
        return self.projections(len(places)), self.ints([p for _, p in places]), slots, view

    def projections(self, rows: int) -> list[Tensor]:
        heads = [s.num_heads + s.num_kv_heads * (1 if s.values == "keys" else 2) for s in SPECS]
        widths = [n * spec.head_dim for n, spec in zip(heads, SPECS, strict=True)]
        return [torch.randn(rows, n, generator=self.made).to(self.device, self.dtype) for n in widths]

    def run(
        self, kv: KVCache, qkvs: list[Tensor], positions: Tensor, slots: Tensor, view: AttentionView
    ) -> list[Tensor]:
        """One step, layer by layer; a recording may hold it."""
        if kv.begin:
            kv.begin(slots, view)
        out = []
        for i, (spec, qkv) in enumerate(zip(SPECS, qkvs, strict=True)):
            heads = (spec.num_heads, spec.num_kv_heads)
            kv.layers[i].write(
                qkv, RopeArgs(positions, self.tables[i], *heads, *self.norms[i], EPS, spec.values), slots
            )
            q = qkv.view(qkv.shape[0], -1, spec.head_dim)[:, : spec.num_heads]
            out.append(kv.layers[i].attend(q, view, self.params[i]))
        return out


def mixed_cache(ops: Ops, layers: Layers) -> tuple[LayeredKV, WindowGroup]:
    kept = (layers.dtype, layers.device, ops, 16)
    full = DenseKV([spec for spec in SPECS if not spec.window], BLOCKS, SIZE, *kept)
    room = StepRoom(128, 4, 12)
    group = WindowGroup([spec for spec in SPECS if spec.window], BLOCKS, BLOCKS, SIZE, room, *kept)
    for tensor in (*full.k, *full.v, *(t[:-1] for t in (*group.kv.k, *group.kv.v))):
        tensor.fill_(float("nan"))
    return LayeredKV(SPECS, full, {WINDOW: group}, None, ops), group


def move_pages(group: WindowGroup, rows: list[tuple[int, int]], done: list[int], held: dict[int, int]) -> None:
    """Blocks that the next rows of these sequences see or write have a page; others lose theirs, and its content."""
    changes = []
    for s, n in rows:
        first, last = max(done[s] - WINDOW + 1, 0) // SIZE, (done[s] + n - 1) // SIZE
        for i, block in enumerate(table_of([s])[0]):
            if first <= i <= last and block not in held:
                held[block] = min(set(range(BLOCKS)) - set(held.values()))
                changes.append((block, held[block]))
            elif i < first and block in held:
                page = held.pop(block)
                for tensor in (*group.kv.k, *group.kv.v):
                    tensor[page] = float("nan")
                changes.append((block, -1))
    group.send(changes)


def check(ops: Ops, device: str, dtype: torch.dtype, off: float) -> None:
    layers = Layers(device, dtype)
    exact = DenseKV(SPECS, BLOCKS, SIZE, torch.float32, layers.device, reference)
    kv, group = mixed_cache(ops, layers)
    done, held = [0, 0], dict[int, int]()
    for rows in STEPS:
        qkvs, *where = layers.step(rows, done)
        move_pages(group, rows, done, held)
        wanted = layers.run(exact, [qkv.to(torch.float32, copy=True) for qkv in qkvs], *where)
        for got, want in zip(layers.run(kv, qkvs, *where), wanted, strict=True):
            torch.testing.assert_close(got.float(), want, rtol=off, atol=off)
        for s, n in rows:
            done[s] += n if n > 5 else 1  # of five drafted rows the first stands
    assert len(held) < sum(-(-d // SIZE) for d in done), "some pages were lost"


def test_the_reference() -> None:
    check(reference, "cpu", torch.float32, 1e-5)


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
def test_native() -> None:
    check(native, "cpu", torch.float32, 1e-5)


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
def test_a_native_step_of_all_is_one_recording() -> None:
    layers = Layers("cpu", torch.float32)
    kv, group = mixed_cache(native, layers)
    move_pages(group, [(0, 20)], [0, 0], {})
    qkvs, *where = layers.step([(0, 20)], [0, 0])
    inputs = [qkv.clone() for qkv in qkvs]
    expected = [out.clone() for out in layers.run(kv, qkvs, *where)]
    for qkv, given in zip(qkvs, inputs, strict=True):
        qkv.copy_(given)
    found: list[Tensor] = []

    def step() -> Tensor:
        found[:] = layers.run(kv, qkvs, *where)
        return found[-1]

    recording = native.Graph(step)
    assert recording.kernels.count("paged_attention") == 3 and recording.kernels.count("unit_rms") == 2
    for _ in range(2):
        recording.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        for qkv, given in zip(qkvs, inputs, strict=True):
            qkv.copy_(given)


@pytest.mark.gpu
def test_cuda() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.kernels.triton_device import INTERPRET

    if not INTERPRET and not torch.cuda.is_available():
        pytest.skip("no GPU here: `make test-long` runs it in Triton's interpreter")
    from sparkdraft.kernels import cuda

    check(cuda, *(("cpu", torch.float32, 1e-4) if INTERPRET else ("cuda", torch.bfloat16, 0.05)))
