"""The Triton kernels of drafter training against their torch definitions, forward and backward.

On a GPU, or few shapes under TRITON_INTERPRET=1, with fresh outputs poisoned as in test_cuda.py. The last part needs
no GPU: it compiles each tile for sm_90 and sm_121 and reads the shared memory it takes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft.train.kernels import block_attention, draft_loss
from sparkdraft.train.loss import Labels, LossOptions, chunked_loss, reference_loss
from sparkdraft.train.model import reference_attention
from tests.kernels.ahead_of_time import GPUS
from tests.kernels.test_cuda import LIMIT, TYPES, assert_close, compile_kernel
from tests.kernels.triton_device import DEVICE, DTYPES, INTERPRET, compiled, gpu, integers, randn

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Block attention


def make_edges(documents: list[int], each: int) -> tuple[Tensor, Tensor]:
    """Starts and anchors: 'each' anchors of every document, its first and its last token among them."""
    starts, anchors, first = [], [], 0
    for length in documents:
        inner = torch.randint(0, length, (each - 2,)).tolist()
        anchors += sorted(first + a for a in [0, length - 1, *inner])
        starts += [first] * each
        first += length
    return integers(starts), integers(anchors)


def make_inputs(
    blocks: int, width: int, heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype
) -> list[Tensor]:
    """Views of fused matrices, with NaN beside them."""
    fused = randn(blocks * width, heads + 2 * kv_heads + 1, head_dim, dtype=dtype)
    context = randn(tokens, 2 * kv_heads + 1, head_dim, dtype=dtype)
    fused[:, -1], context[:, -1] = float("nan"), float("nan")
    q, block_k, block_v, _ = fused.split((heads, kv_heads, kv_heads, 1), dim=1)
    context_k, context_v, _ = context.split((kv_heads, kv_heads, 1), dim=1)
    return [t.requires_grad_() for t in (q, block_k, block_v, context_k, context_v)]


def check_attention(
    inputs: list[Tensor], starts: Tensor, anchors: Tensor, width: int, strided_grad: bool = False
) -> list[Tensor]:
    dtype, scale = inputs[0].dtype, inputs[0].shape[2] ** -0.5
    plain = [t.detach().float().requires_grad_() for t in inputs]
    expected = reference_attention(*plain, starts, anchors, width, scale)
    got = block_attention.block_attention(*inputs, starts, anchors, width, scale)
    assert got.dtype == dtype
    assert_close(got.detach(), expected.detach(), dtype)
    grad = randn(*got.shape, dtype=dtype)
    if strided_grad:
        grad = grad.transpose(0, 2).contiguous().transpose(0, 2)
    grads = torch.autograd.grad(got, inputs, grad)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, plain, grad.float()), strict=True):
        assert mine.dtype == dtype
        assert_close(mine, theirs, dtype)
    return [got.detach(), *grads]


SHAPES = [  # width, heads, kv_heads, head_dim
    (16, 6, 2, 64),
    (8, 3, 1, 64),
    (2, 2, 2, 32),
    (7, 5, 1, 48),
    (16, 16, 1, 128),
]
GPU_SHAPES = [
    (16, 9, 3, 64),
    (8, 9, 3, 64),
    (16, 16, 8, 128),
    (4, 32, 8, 128),
    (16, 12, 12, 80),
    (5, 16, 1, 16),
    (8, 14, 2, 64),
]
SHAPES = [(dtype, *shape) for dtype in DTYPES for shape in SHAPES + GPU_SHAPES * (not INTERPRET)]


@gpu
@pytest.mark.parametrize("dtype, width, heads, kv_heads, head_dim", SHAPES)
def test_block_attention(dtype: torch.dtype, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
    documents = [70, 1, 64, 140, 5] if not INTERPRET else [40, 1, 24, 75]
    starts, anchors = make_edges(documents, 3 if INTERPRET else 9)
    inputs = make_inputs(len(starts), width, heads, kv_heads, head_dim, sum(documents), dtype)
    check_attention(inputs, starts, anchors, width)


@gpu
def test_tokens_that_no_block_sees_have_no_gradient() -> None:
    starts, anchors = integers([20, 20, 150]), integers([20, 30, 150])
    inputs = make_inputs(3, 4, 4, 2, 32, 200, torch.float32)
    *_, grad_k, grad_v = check_attention(inputs, starts, anchors, 4, strided_grad=True)
    for grad in (grad_k, grad_v):
        assert (grad[20:30] != 0).any(-1).all() and (grad[:20] == 0).all() and (grad[30:] == 0).all()


@gpu
def test_no_blocks_and_no_tokens() -> None:
    inputs = make_inputs(0, 4, 4, 2, 32, 70, torch.float32)
    *_, grad_k, grad_v = check_all_empty(inputs, integers([]), integers([]))
    assert (grad_k == 0).all() and (grad_v == 0).all()
    inputs = make_inputs(2, 4, 4, 2, 32, 0, torch.float32)
    check_all_empty(inputs, integers([0, 0]), integers([0, 0]))


def check_all_empty(inputs: list[Tensor], starts: Tensor, anchors: Tensor) -> list[Tensor]:
    out = block_attention.block_attention(*inputs, starts, anchors, 4, 0.2)
    return list(torch.autograd.grad(out.sum(), inputs))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRET or not torch.cuda.is_available(), reason="real sizes need a GPU")
@pytest.mark.parametrize("width, each", [(16, 49), (8, 98)])
def test_real_sizes_give_the_same_bits_twice(width: int, each: int) -> None:
    documents = torch.randint(40, 480, (62,)).tolist()
    starts, anchors = make_edges(documents, each)
    inputs = make_inputs(len(starts), width, 9, 3, 64, sum(documents), torch.bfloat16)
    grad = randn(*inputs[0].shape, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        out = block_attention.block_attention(*inputs, starts, anchors, width, 0.125)
        runs.append([out, *torch.autograd.grad(out, inputs, grad)])
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*runs, strict=True))


# Draft loss

OPTIONS = [LossOptions(alpha=1.0), LossOptions(), LossOptions(alpha=0.2, soft=0.6)]


def make_loss(
    blocks: int, positions: int, dim: int, vocab: int, dtype: torch.dtype, tokens: int = 9
) -> tuple[Tensor, Tensor, Labels]:
    hidden = randn(blocks, positions + 1, dim, dtype=dtype)[:, 1:].requires_grad_()  # the mask rows: strided
    head = randn(vocab, dim, dtype=dtype) * dim**-0.5 * 2
    ids = torch.randint(0, vocab, (blocks, positions), device=DEVICE)
    likely = (hidden.detach().float() @ head.float().t()).argmax(-1)
    ids = torch.where(torch.rand(ids.shape, device=DEVICE) < 0.5, likely, ids)
    ids[-1], ids[0, -1] = -1, -1
    rows = torch.randint(-1, tokens, (blocks, positions), device=DEVICE)
    teacher = randn(tokens, vocab + 8, dtype=dtype)[:, :vocab]
    return hidden, head, Labels(ids, teacher, rows, torch.rand(blocks, positions, device=DEVICE) + 0.5)


def check_loss(hidden: Tensor, head: Tensor, labels: Labels, options: LossOptions, chunk_rows: int) -> None:
    dtype = hidden.dtype
    report = chunked_loss(hidden, head, labels, options, chunk_rows)
    (grad,) = torch.autograd.grad(report.loss * 3, hidden)
    plain = hidden.detach().float().requires_grad_()
    teacher = None if labels.teacher is None else labels.teacher.float()
    expected = reference_loss(plain, head.float(), replace(labels, teacher=teacher), options)
    (wanted,) = torch.autograd.grad(expected.loss * 3, plain)
    assert_close(report.loss.detach(), expected.loss.detach(), dtype)
    assert_close(report.entropy, expected.entropy, dtype)
    assert grad.dtype == dtype and grad.shape == hidden.shape
    largest = wanted.abs().max()
    assert_close(grad / largest, wanted / largest, dtype)
    if dtype == torch.float32:
        assert torch.equal(report.correct, expected.correct)
    assert expected.correct.any() and not report.correct[labels.ids < 0].any()
    with torch.no_grad():
        again = chunked_loss(hidden, head, labels, options, chunk_rows)
    assert torch.equal(again.loss, report.loss.detach()) and not again.loss.requires_grad


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "blocks, positions, dim, vocab, chunk_rows",
    [(5, 3, 16, 50, 7), (3, 7, 32, 5000, 100)] + [(300, 15, 576, 49152, 1000)] * (not INTERPRET),
)
def test_draft_loss(
    blocks: int, positions: int, dim: int, vocab: int, chunk_rows: int, options: LossOptions, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden, head, labels = make_loss(blocks, positions, dim, vocab, dtype)
    check_loss(hidden, head, labels, options, chunk_rows)


@gpu
def test_hard_labels_need_no_teacher() -> None:
    torch.manual_seed(0)
    hidden, head, labels = make_loss(4, 3, 16, 50, torch.float32)
    check_loss(hidden, head, Labels(labels.ids), LossOptions(soft=0.5), 100)
    check_loss(hidden, head, replace(labels, inverse_temperature=None), LossOptions(soft=0.5), 100)


@gpu
def test_a_tie_goes_to_the_lowest_id() -> None:
    hidden, head = torch.ones(1, 3, 16, device=DEVICE), torch.zeros(9000, 16, device=DEVICE)
    head[[77, 5000, 8999]] = 1.0
    labels = Labels(torch.tensor([[77, 5000, 8999]], device=DEVICE))
    assert chunked_loss(hidden, head, labels, LossOptions()).correct.tolist() == [[True, False, False]]


@gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_an_empty_batch(options: LossOptions) -> None:
    hidden, head, labels = make_loss(4, 3, 16, 50, torch.float32)
    labels.ids.fill_(-1)
    report = chunked_loss(hidden, head, labels, options)
    assert report.loss.item() == 0 and (torch.autograd.grad(report.loss, hidden)[0] == 0).all()
    assert not report.correct.any() and (report.entropy == 0).all()
    none = hidden.detach()[:0].requires_grad_()
    report = chunked_loss(none, head, Labels(labels.ids[:0]), options)
    assert report.loss.item() == 0 and torch.autograd.grad(report.loss, none)[0].shape == none.shape


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRET or not torch.cuda.is_available(), reason="only a GPU can wait for its host")
def test_nothing_waits_for_the_device() -> None:
    starts, anchors = make_edges([70, 200], 9)
    inputs = make_inputs(18, 8, 9, 3, 64, 270, torch.bfloat16)
    hidden, head, labels = make_loss(18, 7, 64, 1000, torch.bfloat16)

    def step() -> None:
        out = block_attention.block_attention(*inputs, starts, anchors, 8, 0.125)
        torch.autograd.grad(out, inputs, out.detach())
        report = chunked_loss(hidden, head, labels, LossOptions(soft=0.5), 50)
        torch.autograd.grad(report.loss, hidden)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Ahead of time compiles


def attention_shared(kernel: object, capability: int, dtype: torch.dtype, head_dim: int, width: int, group: int) -> int:
    tile, names = block_attention._tiles(head_dim, dtype, GPUS[capability]), kernel.arg_names
    scalars = {"scale": "fp32", "scale_log2": "fp32", "tokens": "i32"}
    floats, ints = ("lse", "delta"), ("starts", "anchors", "lows", "highs")
    types = {
        name: "*fp32" if name in floats else "*i32" if name in ints else scalars.get(name, "*" + TYPES[dtype])
        for name in names
        if not name.isupper()
    }
    types |= {name: "i32" for name in names if name.startswith("stride_")}
    whole = kernel is block_attention._grad_context
    lanes = tile.key_lanes if whole else block_attention._block_lanes(width, group, tile.lanes)
    constants = {
        "KV_HEADS": 3, "GROUP": group, "WIDTH": width, "HEAD_DIM": head_dim,
        "DIM": block_attention._padded(head_dim), "LANES": lanes, "KEYS": tile.keys,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
    constants |= {} if whole else {"OWN": block_attention.OWN}
    return compile_kernel(kernel, capability, types, constants, tile.warps, tile.stages).metadata.shared


@compiled
@pytest.mark.parametrize("capability", [90, 121])
@pytest.mark.parametrize("dtype, head_dim", [(dtype, dim) for dtype in TYPES for dim in (32, 64, 128)])
@pytest.mark.parametrize("name", ["_forward", "_grad_block", "_grad_context"])
def test_block_attention_compiles(name: str, dtype: torch.dtype, head_dim: int, capability: int) -> None:
    kernel = getattr(block_attention, name)
    used = attention_shared(kernel, capability, dtype, head_dim, 16, 3)
    print(f"sm_{capability} {name} head_dim {head_dim} {TYPES[dtype]}: {used} bytes")
    assert used < LIMIT[capability]


@compiled
@pytest.mark.parametrize("capability", [90, 121])
def test_odd_blocks_compile(capability: int) -> None:
    for name in ("_forward", "_grad_block", "_grad_context"):
        for width, group, head_dim in ((8, 3, 64), (7, 5, 80), (2, 1, 32), (16, 16, 128)):
            kernel = getattr(block_attention, name)
            assert attention_shared(kernel, capability, torch.bfloat16, head_dim, width, group) < LIMIT[capability]


@compiled
@pytest.mark.parametrize("capability", [90, 121])
@pytest.mark.parametrize("soft", [False, True])
def test_draft_loss_compiles(soft: bool, capability: int) -> None:
    wide = {"ids": "*i64", "teacher_rows": "*i64", "correct": "*i1", "logits": "*bf16", "teacher": "*bf16"}
    plain = {"stride_row": "i32", "stride_teacher": "i32", "vocab": "i32", "soft": "fp32"}
    absent = [] if soft else ["teacher", "teacher_rows", "temperatures"]
    for kernel in (draft_loss._row_stats, draft_loss._to_gradient):
        names = [name for name in kernel.arg_names if not name.isupper() and name not in absent]
        types = {name: (wide | plain).get(name, "*fp32") for name in names}
        constants = {"SOFT": soft, "BLOCK": draft_loss.SOFT_BLOCK if soft else draft_loss.BLOCK} | dict.fromkeys(absent)
        assert compile_kernel(kernel, capability, types, constants, draft_loss.WARPS).metadata.shared < LIMIT[121]
