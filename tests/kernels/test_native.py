"""The C++ kernels against the torch reference, and against themselves: same bits in every batch and thread count.

Shapes are odd on purpose: outputs that do not fill a strip, contexts that do not fill a tile, spans that begin mid-way.
What a build does without a compiler is here too; how fast the kernels are is tools/cpu_kernels.py's.
"""

from __future__ import annotations

import math
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparkdraft.kernels import native, reference
from sparkdraft.kernels.native import build, library
from sparkdraft.kernels.ops import (
    GELU_TANH,
    SILU,
    Activation,
    AttentionParams,
    AttentionView,
    CannotCapture,
    Norm,
    Normed,
    RopeArgs,
)
from sparkdraft.weights.quant.stored import GroupQuant, as_float
from tests.kernels.integers import group_linear

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))

ROWS = (1, 2, 3, 5, 8, 17, 300)
REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    native.set_threads(2)


def random_quant(out: int, width: int, bits: int, offset: bool = True) -> GroupQuant:
    groups = width // 32
    scale = (torch.rand(out, groups) * 0.02 - 0.005).half()
    if bits == 8:
        return GroupQuant(8, torch.randint(-128, 128, (out, groups, 32), dtype=torch.int8), scale, None)
    q = torch.randint(0, 256, (out, groups, 16), dtype=torch.uint8)
    return GroupQuant(4, q, scale, (torch.randn(out, groups) * 0.05).half() if offset else None)


def expected_linear(x: Tensor, w: GroupQuant) -> Tensor:
    return group_linear(x, w.q, w.scale, w.offset)


# ---- matmul ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out", "width", "bits"), [(37, 576, 4), (96, 1536, 4), (50, 64, 8), (129, 96, 8), (3, 32, 4)])
def test_linear_is_the_reference(rows: int, out: int, width: int, bits: int) -> None:
    w = random_quant(out, width, bits)
    x = torch.randn(rows, width)
    torch.testing.assert_close(native.PackedLinear.pack([w]).linear(x), expected_linear(x, w), rtol=2e-5, atol=2e-5)


def test_linear_takes_zeros_ties_and_extremes() -> None:
    w = random_quant(20, 128, 4)
    x = torch.zeros(4, 128)
    x[1] = torch.arange(128) - 64.5  # ties when rounded
    x[2, :32], x[3, 5] = 1e-30, 1e30
    torch.testing.assert_close(native.PackedLinear.pack([w]).linear(x), expected_linear(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_large_elements_do_not_make_the_rest_of_their_groups_coarse(bits: int) -> None:
    """Hidden states have a few channels far above the others; rounded with them, their neighbours lose most bits."""
    w, x = random_quant(40, 576, bits), torch.randn(12, 576)
    exact = as_float(w).double()
    packed = native.PackedLinear.pack([w])

    def error(x: Tensor) -> float:
        return float((packed.linear(x) - x.double() @ exact.t()).norm())

    without = error(x)
    x[:, 70], x[:, 507] = 100.0, -60.0
    assert error(x) < 1.2 * without
    torch.testing.assert_close(packed.linear(x), expected_linear(x, w), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_no_number_spoils_its_own_row_alone(value: float, bits: int) -> None:
    packed = native.PackedLinear.pack([random_quant(20, 128, bits)])
    x = torch.randn(9, 128)
    expected = packed.linear(x)
    for column in (0, 37, 127):
        spoilt = x.clone()
        spoilt[4, column] = value
        y = packed.linear(spoilt)
        assert not y[4].isfinite().any()
        assert torch.equal(y[:4], expected[:4]) and torch.equal(y[5:], expected[5:])


def test_parts_are_stacked_with_and_without_offsets() -> None:
    parts = [random_quant(33, 96, 4), random_quant(10, 96, 4, offset=False), random_quant(7, 96, 4)]
    x = torch.randn(6, 96)
    packed = native.PackedLinear.pack(parts)
    expected = torch.cat([expected_linear(x, p) for p in parts], dim=1)
    assert (packed.in_features, packed.out_features) == (96, 50)
    torch.testing.assert_close(packed.linear(x), expected, rtol=2e-5, atol=2e-5)


def test_weights_may_be_strided_views_of_a_file() -> None:
    out, groups = 21, 5
    raw = torch.randint(0, 256, (out, groups, 20), dtype=torch.uint8)
    raw[..., :4] = (torch.randn(out, groups, 2) * 0.01).half().view(torch.uint8)
    halves = raw[..., :4].view(torch.float16)
    w = GroupQuant(4, raw[..., 4:], halves[..., 0], halves[..., 1])
    x = torch.randn(3, groups * 32)
    torch.testing.assert_close(native.PackedLinear.pack([w]).linear(x), expected_linear(x, w), rtol=2e-5, atol=2e-5)


def test_add_to_adds_in_place_to_strided_rows() -> None:
    w = random_quant(37, 64, 4)
    wide, x = torch.randn(9, 80), torch.randn(9, 128)[:, :64]
    residual = wide[:, :37]
    packed = native.PackedLinear.pack([w])
    expected = residual + packed.linear(x)
    rest = wide[:, 37:].clone()
    packed.add_to(residual, x)
    assert torch.equal(residual, expected) and torch.equal(wide[:, 37:], rest)


@pytest.mark.parametrize(
    ("out", "width", "bits"), [(101, 576, 4), (77, 1536, 4), (53, 224, 4), (130, 576, 8), (9, 32, 8)]
)
def test_a_row_of_a_matmul_has_the_same_bits_in_every_batch(out: int, width: int, bits: int) -> None:
    packed = native.PackedLinear.pack([random_quant(out, width, bits)])
    x = torch.randn(300, width)
    x[::3, 7], x[::4, width - 1] = 40.0, -50.0  # outliers: none, one or two in a row
    whole = packed.linear(x)
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64, 299):
            assert torch.equal(packed.linear(x[:rows]), whole[:rows]), (threads, rows)
            assert torch.equal(packed.linear(x[300 - rows :]), whole[300 - rows :]), (threads, rows)


def mixed_parts() -> list[GroupQuant]:
    """Parts of 4, 8 and 4 bits, of which none fills a strip."""
    return [random_quant(33, 96, 4), random_quant(10, 96, 8), random_quant(7, 96, 4)]


@pytest.mark.parametrize("form", ["4 bits", "8 bits", "mixed"])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_bias_is_added_to_each_row(form: str, rows: int) -> None:
    bias, x, residual = torch.randn(50), torch.randn(rows, 96), torch.randn(rows, 50)
    parts = mixed_parts() if form == "mixed" else [random_quant(50, 96, int(form[0]))]
    biased, plain = native.keep_matrix(parts, bias, as_float), native.keep_matrix(parts, None, as_float)
    y = biased.linear(x)
    torch.testing.assert_close(y, torch.cat([expected_linear(x, p) for p in parts], 1) + bias, rtol=2e-5, atol=2e-5)
    assert torch.equal(y, plain.linear(x) + bias), "the bias is added to the finished sum"
    expected = residual + y
    biased.add_to(residual, x)
    assert torch.equal(residual, expected)
    assert torch.equal(biased.linear(x[-1:]), y[-1:])


# ---- between the matmuls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [576, 64, 100])
def test_rms_norm(rows: int, dim: int) -> None:
    x, weight = torch.randn(rows, dim + 4)[:, :dim], torch.randn(dim)
    y = native.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y, reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    assert torch.equal(native.rms_norm(x[-1:], weight, 1e-5), y[-1:])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv", "dim", "rotary"), [(9, 3, 64, 64), (4, 4, 128, 128), (8, 1, 64, 32)])
def test_qk_norm_rope(normed: bool, heads: int, kv: int, dim: int, rotary: int) -> None:
    qkv, table = torch.randn(300, (heads + 2 * kv) * dim), torch.rand(1000, rotary) * 2 - 1
    positions = torch.randint(0, 1000, (300,), dtype=torch.int32)
    norms = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    expected, one = qkv.clone(), qkv[123:124].clone()
    args = RopeArgs(positions, table, heads, kv, *norms, 1e-6)
    reference.qk_norm_rope(expected, args)
    native.qk_norm_rope(qkv, args)
    native.qk_norm_rope(one, args._replace(positions=positions[123:124]))
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(one, qkv[123:124])


CLAMPED = Activation("clamped_swiglu", 7.0)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLAMPED], ids=lambda a: a.kind)
@pytest.mark.parametrize("rows", ROWS)
def test_gated(rows: int, activation: Activation) -> None:
    gate_up = torch.randn(rows, 2 * 1531) * torch.tensor([0.1, 1, 20]).repeat(1021)[: 2 * 1531]
    y = native.gated(gate_up, activation)
    expected = reference.gated(gate_up, activation)
    # torch's GELU loses what is small beside 1: 1 + tanh(x) of a large negative x
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=3e-5 if activation == GELU_TANH else 1e-30)
    assert torch.equal(native.gated(gate_up[-1:], activation), y[-1:])


def test_gelu_is_that_of_doubles() -> None:
    gate = torch.linspace(-13, 13, 4001)
    y = native.gated(torch.cat((gate, torch.ones(4001))).unsqueeze(0), GELU_TANH)
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    far = gate.abs() < 5  # beyond, doubles lose it too
    torch.testing.assert_close(y[0].double()[far], expected[far], rtol=3e-6, atol=1e-12)
    torch.testing.assert_close(y[0].double(), expected, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLAMPED], ids=lambda a: a.kind)
def test_activations_at_the_ends(activation: Activation) -> None:
    gate = torch.tensor([0.0, -87.5, 87.5, -1e4, 1e4, 1e-20, -86.9, 7.0, 7.1, -1e15, 1e15])
    for up in (1.0, -8.0, 9.0):
        gate_up = torch.cat((gate, torch.full((11,), up))).unsqueeze(0)
        torch.testing.assert_close(
            native.gated(gate_up, activation), reference.gated(gate_up, activation), rtol=2e-6, atol=1e-22
        )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", [1.0, 0.7, 3])
def test_add_normed(rows: int, scale: float) -> None:
    wide, y = torch.randn(rows, 120), torch.randn(rows, 104)[:, :100]
    residual, norm, then = wide[:, :100], Norm(torch.randn(100), 1e-5), Norm(torch.ones(100), 1e-6)
    expected, rest = residual.clone(), wide[:, 100:].clone()
    last = residual[-1:].clone()
    reference.add_normed(expected, y, norm, then, scale)
    added = native.add_normed(residual, y, norm, then, scale)
    assert added.x is residual and added.norm is then and torch.equal(wide[:, 100:], rest)
    torch.testing.assert_close(residual, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(native.add_normed(last, y[-1:], norm, then, scale).x, residual[-1:])


@pytest.mark.parametrize("cap", [30.0, 5])
def test_softcap(cap: float) -> None:
    """The head hands its rows through: from nothing to far beyond the cap."""
    size = torch.cat((torch.zeros(1), torch.logspace(-12, 3, 700)))
    x = torch.cat((size, -size)).unsqueeze(1).contiguous()
    normed, head = Normed(x, Norm(torch.ones(1), 1e30)), native.FloatLinear(torch.full((1, 1), 1e15))
    found = native.norm_logits(normed, head, cap)
    expected = torch.tanh(native.norm_logits(normed, head).double() / cap) * cap
    torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=0)
    assert found.abs().max() <= cap and (found[:701].diff(dim=0) >= -2e-6 * cap).all()
    assert torch.equal(native.norm_logits(Normed(x[9:12], normed.norm), head, cap), found[9:12])


def test_kv_write_skips_negative_slots() -> None:
    qkv = torch.randn(300, (9 + 6) * 64).view(300, 15, 64)
    slots = torch.randperm(40 * 16)[:300].int()
    slots[::7] = -1
    caches = [torch.zeros(40, 3, 16, 64) for _ in range(4)]
    native.kv_write(qkv[:, 9:12], qkv[:, 12:], caches[0], caches[1], slots)
    reference.kv_write(qkv[:, 9:12], qkv[:, 12:], caches[2], caches[3], slots)
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


# ---- attention ------------------------------------------------------------------------------------------------------


def batch(heads: int, kv: int, dim: int, queries: list[int], contexts: list[int], block: int = 16) -> tuple:
    """q (a strided view of qkv), caches and view of sequences with these query rows and contexts."""
    need = [-(-c // block) for c in contexts]
    order = torch.randperm(sum(need)).int()
    tables = torch.zeros(len(need), max(need) + 2, dtype=torch.int32)
    for s, n in enumerate(need):
        tables[s, :n] = order[sum(need[:s]) : sum(need[: s + 1])]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    caches = [torch.randn(sum(need), kv, block, dim) for _ in range(2)]
    qkv = torch.randn(sum(queries), heads + 2 * kv, dim)
    view = AttentionView(starts, torch.tensor(contexts).int(), tables, max(queries), max(contexts))
    return qkv[:, :heads], *caches, view


@pytest.mark.parametrize(("heads", "kv", "dim"), [(9, 3, 64), (4, 4, 128), (8, 1, 64), (2, 1, 20), (2, 2, 256)])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 37), (False, 50), (True, 1)])
def test_attention_is_the_reference(heads: int, kv: int, dim: int, causal: bool, window: int) -> None:
    q, k, v, view = batch(heads, kv, dim, [1, 0, 5, 70, 17], [130, 9, 5, 70, 1100])
    scale = 1 / math.sqrt(dim)
    y = native.paged_attention(q, k, v, view, AttentionParams(scale, causal, window))
    expected = reference.paged_attention(q, k, v, view, AttentionParams(scale, causal, window))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=3e-6)


def one_row(view: AttentionView, row: int) -> AttentionView:
    """The last sequence alone, as if only 'row' of its rows were computed now."""
    context = int(view.context_len[-1]) - (int(view.query_start[-1]) - 1 - row)
    return AttentionView(torch.tensor([0, 1]).int(), torch.tensor([context]).int(), view.block_tables[-1:], 1, context)


@pytest.mark.parametrize("window", [0, 700])
def test_a_row_of_attention_has_the_same_bits_in_a_chunk_and_alone(window: int) -> None:
    q, k, v, view = batch(9, 3, 64, [3, 300], [40, 2400])
    whole = native.paged_attention(q, k, v, view, AttentionParams(0.125, window=window))
    for threads in (1, 2, 3):
        native.set_threads(threads)
        assert torch.equal(native.paged_attention(q, k, v, view, AttentionParams(0.125, window=window)), whole)
        for row in (3, 4, 66, 150, 301, 302):
            alone = native.paged_attention(
                q[row : row + 1], k, v, one_row(view, row), AttentionParams(0.125, window=window)
            )
            assert torch.equal(alone[0], whole[row]), (threads, row)


@pytest.mark.parametrize("context", [9, 64, 127, 129, 300, 600])
def test_the_rows_of_a_drafted_block_have_the_bits_that_each_has_alone(context: int) -> None:
    q, k, v, view = batch(9, 3, 64, [1, 8], [77, context])
    whole = native.paged_attention(q, k, v, view, AttentionParams(0.125))
    for threads in (1, 2, 3, 8):  # more threads than queries in a slice, too
        native.set_threads(threads)
        assert torch.equal(native.paged_attention(q, k, v, view, AttentionParams(0.125)), whole), threads
        for row in range(1, 9):
            alone = native.paged_attention(q[row : row + 1], k, v, one_row(view, row), AttentionParams(0.125))
            assert torch.equal(alone[0], whole[row]), (threads, row)


def test_attention_never_reads_past_the_context() -> None:
    q, k, v, view = batch(4, 2, 64, [2], [21])
    last = int(view.block_tables[0, 1])
    k[last, :, 5:], v[last, :, 5:] = float("nan"), float("nan")
    assert native.paged_attention(q, k, v, view, AttentionParams(0.125)).isfinite().all()


# ---- other vectors --------------------------------------------------------------------------------------------------

MATMUL_BITS = """
import hashlib, torch
from tests.kernels.test_native import native, random_quant
torch.manual_seed(0)
digest = hashlib.sha256()
for out, width, bits in ((101, 576, 4), (53, 224, 8)):
    packed = native.PackedLinear.pack([random_quant(out, width, bits)])
    for rows in (1, 3, 8, 60):
        digest.update(packed.linear(torch.randn(rows, width)).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 has vectors of several widths")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-DSPARKDRAFT_PLAIN"])
def test_narrower_vectors_are_the_reference_too_and_give_a_matmul_the_same_bits(flag: str) -> None:
    def run(flags: str, *arguments: str) -> str:
        command = [sys.executable, *arguments]
        environment = os.environ | {"SPARKDRAFT_CXXFLAGS": flags}
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(flag, "-m", "pytest", *map(str, Path(__file__).parent.glob("test_native*.py")))
    assert run(flag, "-c", MATMUL_BITS) == run("", "-c", MATMUL_BITS)


# ---- building -------------------------------------------------------------------------------------------------------


def test_without_a_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "c", type(library.c)())
    monkeypatch.setattr(library, "_reason", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native.unavailable_reason() == (
        "no C++ compiler found (looked for $CXX, c++, g++, clang++): install one, or run with --dtype float32"
    )


def fake_compiler(folder: Path, body: str) -> str:
    script = folder / "cxx"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return str(script)


def test_a_failing_compiler_is_named_with_its_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'x.cpp:1: error: boom' >&2; exit 1"))
    with pytest.raises(build.BuildError, match=r"error: boom.*--dtype float32"):
        build.library(tmp_path)
    assert not list((tmp_path / "native").iterdir())  # nothing half-made is left


@pytest.mark.slow
def test_concurrent_builds_leave_one_whole_library(tmp_path: Path) -> None:
    slow = 'for last; do :; done; [ "$1" = --version ] && exit 0; echo half > "$last"; sleep 0.3; echo whole > "$last"'
    code = "import sys; from sparkdraft.kernels.native import build; print(build.library().read_text())"
    environment = {
        **os.environ,
        "CXX": fake_compiler(tmp_path, slow),
        "SPARKDRAFT_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", code]
    runs = [subprocess.Popen(command, env=environment, cwd=REPO, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [run.communicate()[0].strip() for run in runs] == ["whole"] * 3
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1


# ---- recording ------------------------------------------------------------------------------------------------------


def test_a_recording_follows_its_inputs() -> None:
    table, packed = random_quant(20, 64, 8), native.PackedLinear.pack([random_quant(64, 64, 4)])
    x, ids, weight = torch.randn(3, 64), torch.tensor([1, 2, 3], dtype=torch.int32), torch.rand(64)

    def step() -> Tensor:
        residual = native.embed(ids, table)
        hidden = native.rms_norm(x, weight, 1e-5)
        packed.add_to(residual, hidden)
        return packed.linear(residual)

    recording = native.Graph(step)
    for seed in range(3):
        x.copy_(torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)))
        ids.copy_(torch.tensor([seed, 7, 19 - seed]))
        assert torch.equal(recording.replay(), step())


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLAMPED], ids=lambda a: a.kind)
def test_all_that_a_layer_may_ask_for_is_recorded(activation: Activation) -> None:
    """Two floating-point arguments, a scaled table of floats and of integers, parts of several bits, biases, a cap."""
    gate_up = native.keep_matrix(mixed_parts(), torch.randn(50), as_float)
    head = native.FloatLinear(torch.randn(11, 25), torch.randn(11))
    ids, integers, floats = torch.arange(4, dtype=torch.int32), random_quant(20, 96, 4), torch.randn(20, 25)
    norm, wide = Norm(torch.rand(25), 1e-5), Norm(torch.rand(96), 1e-6)

    def step() -> Tensor:
        y = native.norm_gated(Normed(native.embed(ids, integers, 3.5), wide), gate_up, activation)
        added = native.add_normed(native.embed(ids, floats, 1.25), y, norm, norm, 0.5)
        return native.norm_logits(added, head, 4)

    recording = native.Graph(step)
    for seed in range(3):
        ids.copy_(torch.randint(0, 20, (4,), generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(recording.replay(), step())


def test_an_operator_that_a_recording_would_miss_is_named() -> None:
    x, ones, first = torch.randn(2, 64), torch.ones(64), torch.tensor([0])
    gathers = ([0], first, True, ([0],), (first,), (slice(None), [0, 1]), (..., first))
    for name, step in [
        ("add", lambda: native.rms_norm(x, ones, 1e-5).add(1)),
        *(("__getitem__", lambda by=by: native.rms_norm(x, ones, 1e-5)[by]) for by in gathers),
        ("cat", lambda: torch.cat((x, x))),
    ]:
        with pytest.raises(CannotCapture, match=name):
            native.Graph(step)
    native.rms_norm(x, ones, 1e-5)  # and the kernels are back in their places


@pytest.mark.parametrize("bits", [4, 8])
def test_embed_is_the_reference(bits: int) -> None:
    table, ids = random_quant(50, 96, bits), torch.randint(0, 50, (7,), dtype=torch.int32)
    torch.testing.assert_close(native.embed(ids, table), reference.embed(ids, table), rtol=1e-6, atol=1e-7)
    for form in (table, table.dequantize()):
        found = native.embed(ids, form, 7.5)
        torch.testing.assert_close(found, reference.embed(ids, table, 7.5), rtol=1e-6, atol=1e-6)
        assert torch.equal(found, native.embed(ids, form) * 7.5)


def test_gathers_and_taps_copy_rows() -> None:
    x, ids = torch.randn(9, 40)[:, :24], torch.tensor([8, 0, 0, 3], dtype=torch.int32)
    assert torch.equal(native.embed(ids, x), x[ids.long()])
    aux_hidden = torch.full((9, 3, 24), math.nan)
    native.store_aux(x, aux_hidden, 1, torch.empty(0))
    assert torch.equal(aux_hidden[:, 1], x) and aux_hidden[:, 0].isnan().all()


def test_rows_are_joined_as_the_reference_does() -> None:
    wide = torch.randn(5, 40)
    for rows in (0, 1, 5):
        left, right = wide[:rows, :12], wide[:rows, 20:37]  # parts of wider rows
        assert torch.equal(native.concat(left, right), reference.concat(left, right))


def test_recordings_of_one_owner_lie_over_each_other() -> None:
    """Each replays rightly after any other has run, and a hundred take no more memory than the largest."""
    x, weight = torch.randn(64, 576), torch.rand(576)
    recordings = {}
    for rows in (64, 1, 7, 33, 64 - 1, 2):
        beside = next(iter(recordings.values()), None)
        recordings[rows] = native.Graph(
            lambda rows=rows: native.rms_norm(native.rms_norm(x[:rows], weight, 1e-5), weight, 1e-5), beside
        )
    arena = recordings[64].arena
    assert all(r.arena is arena for r in recordings.values()) and len(arena._chunks) == 1
    for rows in (2, 64, 7, 1, 63, 33):
        x.copy_(torch.randn(64, 576))
        expected = native.rms_norm(native.rms_norm(x[:rows], weight, 1e-5), weight, 1e-5)
        assert torch.equal(recordings[rows].replay(), expected)


def test_an_arena_grows_by_what_does_not_fit() -> None:
    arena = native.graph.Arena()
    large = arena.take(3 * native.graph.CHUNK)
    small = arena.take(10)
    assert large.data_ptr() + large.nbytes <= small.data_ptr() or small.data_ptr() + small.nbytes <= large.data_ptr()
    arena.restart()
    assert arena.take(3 * native.graph.CHUNK).data_ptr() == large.data_ptr()
    assert arena.take(10).data_ptr() == small.data_ptr()
