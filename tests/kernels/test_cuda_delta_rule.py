"""Recurrent layers in Triton against their definition: on a GPU, or small shapes under TRITON_INTERPRET=1.

Memories and fresh outputs are poisoned. Rows of short steps must have the same bits however they are cut into steps and
whatever is rejected behind them; rows of prompts, which go through chunks, only the same values. The last part needs no
GPU: it compiles the launches of published models for sm_90 and sm_121; speed is left to tools/cuda_delta_rule.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.recurrent import delta_chunks, delta_steps
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.ops import AttentionView, DeltaParams, RecurrentState, input_ring, record_ring
from tests.kernels.ahead_of_time import (
    GPUS,
    LIMIT,
    captured_launches,
    check_order,
    compile_launch,
    empty,
    spilled_bytes,
)
from tests.kernels.recurrent_cases import Layer, Part, Shape, random_steps, row_by_row
from tests.kernels.triton_device import (
    DEVICE,
    DTYPES,
    INTERPRET,
    assert_close,
    compiled,
    gpu,
    gpu_only,
    integers,
    no_interpreter,
    randn,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SMALL = Shape(1, 2, 16, 16, most_rows=5)
QWEN = Shape(2, 6, 128, 128, most_rows=16)


def assert_memory(ours: RecurrentState, theirs: RecurrentState, dtype: torch.dtype) -> None:
    assert torch.equal(ours.base, theirs.base), "the units of those who read it are gone"
    assert torch.equal(ours.inputs.nan_to_num(), theirs.inputs.nan_to_num())
    for name in ("state", "keys", "updates", "decays"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(a.isnan(), b.isnan()), name
        assert_close(a.nan_to_num(), b.nan_to_num(), dtype)


def run_both(layer: Layer, steps: list[list[Part]], most: int = 0) -> tuple[RecurrentState, RecurrentState]:
    ours, theirs = layer.memory(), layer.memory()
    for parts in steps:
        got, expected = (
            layer.step(ops, m, parts, most=most, padding=3) for ops, m in ((cuda, ours), (reference, theirs))
        )
        for a, b in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
            assert_close(a, b, layer.dtype) if len(b) else None
    return ours, theirs


# Short steps


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", [1, 2])
def test_short_steps(slices: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around rings and over borders, with rejected rows, an empty sequence, one of nobody, and padding."""
    monkeypatch.setattr(delta_steps, "choose_tile", lambda *_: delta_steps.Tile(16 // slices, 1))
    layer = Layer(SMALL, 3, dtype, DEVICE)
    count = 40 if INTERPRET else 100
    a, b, steps = layer.rows(2, count), layer.rows(0, count), []
    nobody = Part(-1, -2, *(t * float("nan") for t in (layer.rows(0, 2).x, layer.rows(0, 2).ab)))
    for done, kept, rejected in random_steps(count, SMALL.most_rows, 1):
        for first, last in [(done, min(done + 5, done + kept))] + [(done + 5, done + kept)] * (kept > 5):
            run = a.cut(first, last)
            run = run.followed_by(layer.rows(2, rejected)) if kept <= 5 else run
            steps.append([run, a.cut(0, 0), nobody, b.cut(first, last)])
    ours, theirs = run_both(layer, steps)
    assert ours.state[1].isnan().all() and (ours.base < 2**20).all()
    assert_memory(ours, theirs, dtype)


@gpu
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRET else DTYPES)
@pytest.mark.parametrize("shape", [SMALL, Shape(1, 1, 128, 128, most_rows=5)] + [QWEN] * (not INTERPRET), ids=str)
def test_same_bits_in_every_cutting_and_company(
    shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 100
    if INTERPRET:
        count = 8 if shape.key_dim > 16 else 36
        monkeypatch.setattr(delta_steps, "choose_tile", lambda *_: delta_steps.Tile(min(64, shape.value_dim), 1))
    layer = Layer(shape, 3, dtype, DEVICE)
    part, other = layer.rows(2, count), layer.rows(0, count)
    expected = row_by_row(layer, cuda, part)
    for seed in range(2):
        memory = layer.memory()
        for done, kept, rejected in random_steps(count, shape.most_rows, seed):
            for first in range(done, done + kept, shape.most_rows):
                last = min(first + shape.most_rows, done + kept)
                run = part.cut(first, last).followed_by(layer.rows(2, rejected * (kept <= shape.most_rows)))
                got = layer.step(cuda, memory, [run] if seed else [other.cut(first, last), run])[-1]
                for each, whole in zip(got, expected, strict=True):
                    assert torch.equal(each[: last - first], whole[first:last]), (seed, first, last, rejected)


@gpu
def test_rows_of_nobody_are_zeros() -> None:
    layer = Layer(SMALL, 2, device=DEVICE)
    part, memory = layer.rows(0, 5), layer.memory()
    nobody = Part(-1, 0, *(torch.full_like(t[:3], float("nan")) for t in (part.x, part.ab)))
    for count, most in ((5, 0), (5, 40)):
        results = layer.step(cuda, memory, [part.cut(0, 0), nobody, part.cut(0, count), nobody], most=most, padding=2)
        assert not results[1][0].any() and not results[3][1].any()
    assert memory.state[1].isnan().all() and memory.inputs[1].isnan().all() and (memory.base[1] == 12345).all()


# Parts of prompts


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_in_parts(dtype: torch.dtype) -> None:
    """Beside each other, beside short steps, from the middle of chunks and over several, longer than all rings."""
    layer = Layer(SMALL, 4, dtype, DEVICE)
    a, b, c = layer.rows(2, 150), layer.rows(0, 150), layer.rows(3, 150)
    cuts = [
        ((0, 10), (0, 5), (0, 64)), ((10, 16), (5, 7), (64, 70)), ((16, 17), (7, 71), (70, 71)),
        ((17, 20), (71, 72), (71, 72)), ((20, 150), (72, 80), (72, 72)), ((150, 150), (80, 81), (72, 149)),
    ]  # fmt: skip
    steps = [[part.cut(*at) for part, at in zip((a, b, c), each, strict=True)] for each in cuts]
    assert_memory(*run_both(layer, steps), dtype)


@gpu
def test_prompts_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 bits, by two passes over the halves of the state: as bfloat16 does it, which the interpreter lacks."""
    monkeypatch.setattr(delta_chunks, "HALVES", {torch.float16: tl.float16})
    layer = Layer(SMALL, 2, torch.float16, DEVICE)
    part = layer.rows(1, 140)
    assert_memory(*run_both(layer, [[part.cut(0, 100)], [part.cut(100, 140)]]), torch.float16)


@gpu
@pytest.mark.parametrize("start", [0, 37])
def test_a_prompt_of_real_heads_is_exact_to_a_few_parts_in_a_million(start: int) -> None:
    """Keys that are nearly alike, and decays near 1: the triangular system is then at its worst."""
    layer = Layer(Shape(1, 1, 128, 128, most_rows=2) if INTERPRET else QWEN, 1, device=DEVICE)
    part = layer.rows(0, 200)
    part.x[:, layer.shape.key_heads * 128 : 2 * layer.shape.key_heads * 128] += 3.0
    part.ab[:, : layer.shape.value_heads] -= 6.0
    ours, theirs = layer.memory(), layer.memory()
    for first, last in ((0, start), (start, 200)):
        if first == last:
            continue
        got, expected = (
            layer.step(ops, m, [part.cut(first, last)])[0][1] for ops, m in ((cuda, ours), (reference, theirs))
        )
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (ours.state - theirs.state).abs().max() < 1e-5 * theirs.state.abs().max()


@gpu
def test_a_bound_larger_than_the_rows() -> None:
    """A launch is shaped by the host's bound: sequences go the way that their own rows say."""
    layer = Layer(SMALL, 2, device=DEVICE)
    part, other = layer.rows(1, 40), layer.rows(0, 40)
    steps = [[part.cut(i, i + 4), other.cut(i, i + 4)] for i in range(0, 40, 4)]
    assert_memory(*run_both(layer, steps, most=100), torch.float32)


# Around the rule


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm(dtype: torch.dtype) -> None:
    for heads, dim in ((3, 24), (6, 128), (48, 128)):
        o, gate = randn(5, heads * dim + 8, dtype=dtype)[:, : heads * dim], randn(5, 2 * heads * dim, dtype=dtype) * 4
        gate, gain = gate[:, heads * dim :], torch.rand(dim, device=DEVICE) + 0.5
        gate[0, 0], gate[0, 1] = -200.0, 200.0
        assert_close(
            cuda.gated_norm(o, gate, gain, 1e-5), reference.gated_norm(o.float(), gate.float(), gain, 1e-5), dtype
        )


@gpu
def test_find_states() -> None:
    slot_of = integers([-1, 7, 3, -1, 5])
    tables = integers([[1, 2, 0], [4, 1, 2], [2, 0, 0], [0, 0, 0], [3, 3, 3]])
    view = AttentionView(integers([0, 1, 5, 5, 8, 9]), integers([17, 20, 3, 0, 4]), tables, 4, 20)
    out = integers([99] * 6)
    cuda.find_states(slot_of, view, 16, out[:5])
    assert out.tolist() == [3, 7, -1, -1, -1, 99]


@gpu_only
@pytest.mark.parametrize("rows", [4, 40])
def test_a_recorded_layer_replays_at_other_lengths(rows: int) -> None:
    layer = Layer(QWEN, 2, torch.bfloat16, DEVICE)
    part, memory, again = layer.rows(1, 8 * rows), layer.memory(), layer.memory()
    gain, gate = torch.rand(128, device=DEVICE), randn(rows, 6 * 128, dtype=torch.bfloat16)
    x, ab, slots = part.x[:rows].clone(), part.ab[:rows].clone(), integers([0])
    view = AttentionView(integers([0, rows]), integers([rows]), integers([[0] * 40]), rows, 8 * rows)

    def run() -> Tensor:
        cuda.find_states(integers_at, view, 16, slots)
        conv = cuda.causal_conv(x, layer.weight, memory, slots, view)
        return cuda.gated_norm(cuda.delta_rule(conv, ab, memory, slots, view, layer.params), gate, gain, 1e-6)

    integers_at = integers([1])
    run()
    recording = cuda.Graph(run)
    for first in range(0, 8 * rows, rows):
        x.copy_(part.x[first : first + rows])
        ab.copy_(part.ab[first : first + rows])
        view.context_len.fill_(first + rows)
        got = recording.replay()
        o = layer.step(cuda, again, [part.cut(first, first + rows)])[0][1]
        assert torch.equal(got, cuda.gated_norm(o, gate, gain, 1e-6)), first


# Ahead of time: no GPU, but not under the interpreter


def recurrent_step(
    key_heads: int, heads: int, dtype: torch.dtype, rows: int, seqs: int = 2, most_rows: int = 16
) -> None:
    """A layer's operators on tensors without memory."""
    dim, slots, width = 128, 4, 4
    channels, ring = (2 * key_heads + heads) * dim, record_ring(most_rows)
    wide, whole = torch.float32, torch.int32
    memory = RecurrentState(
        empty(slots, heads, dim, dim, dtype=wide), empty(slots, heads, dtype=whole),
        empty(slots, ring, key_heads, dim, dtype=wide), empty(slots, ring, heads, dim, dtype=wide),
        empty(slots, ring, heads, dtype=wide), empty(slots, input_ring(most_rows, width), channels, dtype=dtype),
        most_rows,
    )  # fmt: skip
    params = DeltaParams(key_heads, heads, dim, dim, empty(heads, dtype=wide), empty(heads, dtype=wide))
    tables = empty(seqs, 8, dtype=whole)
    view = AttentionView(empty(seqs + 1, dtype=whole), empty(seqs, dtype=whole), tables, rows, 4096)
    states = empty(seqs, dtype=whole)
    cuda.find_states(empty(9, dtype=whole), view, 16, states)
    x, ab = empty(rows * seqs, channels, dtype=dtype), empty(rows * seqs, 2 * heads, dtype=dtype)
    conv = cuda.causal_conv(x, empty(channels, width, dtype=wide), memory, states, view)
    o = cuda.delta_rule(conv, ab, memory, states, view, params)
    cuda.gated_norm(o, empty(*o.shape, dtype=dtype), empty(dim, dtype=wide), 1e-6)


@compiled
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_of_a_27b_compile(dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which is what such models run in, nothing is spilled, but for a tile that was measured: the widest
    of prompts spills 140 bytes and is a quarter faster than the next (docs/numbers/recurrent-h200.md)."""
    found = {}
    for rows in (1, 16, 2000):
        step = lambda rows=rows: recurrent_step(16, 48, dtype, rows)  # noqa: E731
        launches = captured_launches(monkeypatch, capability, step)
        assert len(launches) == (4 if rows <= 16 else 6)
        found |= {launch.kernel: launch for launch in launches}
    assert len(found) == 6
    for launch in found.values():
        made, signature = compile_launch(capability, launch)
        assert made.metadata.shared <= LIMIT[capability] and made.metadata.launch_pdl, launch
        most = 140 if launch.kernel is delta_chunks._through and capability == 90 else 0
        assert dtype != torch.bfloat16 or spilled_bytes(made) <= most, (launch.kernel, launch.options)
        check_order(launch.kernel, signature, made.asm["ptx"])


@no_interpreter
@pytest.mark.parametrize("capability", GPUS)
def test_steps_of_all_sizes_are_one_kernel(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a launch but its grid depends on rows or sequences, so a row's bits cannot either."""
    options = []
    for rows, seqs in ((1, 1), (3, 1), (16, 1), (16, 16), (1, 64), (2000, 3)):
        step = lambda r=rows, s=seqs: recurrent_step(16, 48, torch.bfloat16, r, s)  # noqa: E731
        launches = captured_launches(monkeypatch, capability, step)
        options.append([launch.options for launch in launches if launch.kernel is delta_steps._delta_rule])
    assert all(each == options[0] for each in options)


def test_tiles_fit_a_head() -> None:
    for target in GPUS.values():
        for shape in {(128, 128), (64, 64), *tuned.tables(target).get((delta_steps.KERNEL, "32bit"), {})}:
            tile = delta_steps.choose_tile(*shape, target)
            assert shape[1] % tile.block_v == 0 and shape[1] // tile.block_v <= delta_steps.MOST_SLICES
            for itemsize in (2, 4):
                through = delta_chunks.choose_tiles(48, *shape, itemsize, target)[1]
                assert shape[1] % through.block_v == 0
