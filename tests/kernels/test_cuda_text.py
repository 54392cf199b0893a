"""Drafts from a request's own text and the masks of grammars in Triton, against the reference; test_text.py holds that
against brute force."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.cuda.sampling import forbid, text
from tests.kernels.ahead_of_time import LIMIT, captured_launches, check_order, compile_launch
from tests.kernels.ahead_of_time import empty as made
from tests.kernels.text_cases import TEXTS
from tests.kernels.triton_device import DEVICE, INTERPRET, compiled, gpu, gpu_only, integers, randn

pytestmark = pytest.mark.usefixtures("poisoned_empty")
KEPT = 77  # stands where nothing may be written


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few ids are read by several programs, each of which has several blocks."""
    monkeypatch.setattr(text, "BLOCK", 8)
    monkeypatch.setattr(text, "PARTS", 4)


def check_match(ids: Tensor, length: Tensor, min_match: int, depth: int, dtype: torch.dtype = torch.int32) -> Tensor:
    drafts = torch.full((len(ids), depth + 3), KEPT, dtype=dtype, device=DEVICE)
    expected, wanted = drafts.cpu(), reference.match_text
    matched = cuda.match_text(ids, length, min_match, drafts[:, 1 : depth + 1])  # rows apart
    assert matched.tolist() == wanted(ids.cpu(), length.cpu(), min_match, expected[:, 1 : depth + 1]).tolist()
    assert drafts.tolist() == expected.tolist()
    return matched


@gpu
@settings(
    max_examples=40 if INTERPRET else 300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    min_match=st.integers(1, 9),
    depth=st.integers(1, 17),
    room=st.sampled_from([128, 133]),
)
@pytest.mark.usefixtures("small_blocks")
def test_the_match_is_that_of_the_definition(texts: list[list[int]], min_match: int, depth: int, room: int) -> None:
    ids = integers([each + [3] * (room - len(each)) for each in texts])  # what is past a text may look like it
    check_match(ids, integers([len(each) for each in texts]), min_match, depth)


@gpu
def test_long_texts_of_different_lengths() -> None:
    """Blocks as they are; a phrase at the very start, one across the border of two blocks, an empty row, a full one,
    one that says it is longer than it may be, and none."""
    rng, room = random.Random(0), 6 * text.BLOCK
    ids = torch.tensor([[rng.randint(0, 999) for _ in range(room)] for _ in range(7)], dtype=torch.int32)
    lengths = [room, 3000, 0, text.BLOCK + 1, room + 9, 1, 2000]
    for seq, (start, count) in enumerate([(0, 12), (text.BLOCK - 5, 40), (0, 0), (5, 9), (4000, 20), (0, 0), (0, 0)]):
        end = min(lengths[seq], room)
        ids[seq, end - count : end] = ids[seq, start : start + count]
    for dtype in (torch.int32, torch.int64):
        matched = check_match(ids.to(DEVICE), integers(lengths), 8, 15, dtype)
        assert matched.tolist() == [12, 32, 0, 9, 20, 0, 0]


@gpu
@pytest.mark.parametrize("width", [1, 4, 7])
def test_samples_are_appended_as_the_definition_appends_them(width: int) -> None:
    rng, seqs, room = random.Random(width), 9, 20
    lengths = [0, 1, room - 1, room - 2, room, room + 1, 5, 6, 7]
    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(0, 99, (seqs, room), dtype=torch.int32)
        samples = torch.randint(100, 999, (seqs, width + 3), dtype=dtype)  # as in the result of accept_drafts
        samples[:, width] = torch.tensor([rng.randint(0, width) for _ in range(seqs)])
        found = ids.to(DEVICE)
        theirs = samples.to(DEVICE)
        cuda.append_text(found, integers(lengths), theirs[:, :width], theirs[:, width])
        reference.append_text(ids, torch.tensor(lengths).int(), samples[:, :width], samples[:, width])
        assert found.tolist() == ids.tolist()


@gpu
@pytest.mark.parametrize("columns", [5, 64, 1003])
def test_masks_forbid_as_the_definition_does(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forbid, "BLOCK", 256)
    logits = randn(6, columns + 3)[:, :columns]  # a row is longer than its columns
    masks = torch.randint(0, 256, (4, (columns + 7) // 8 + 1), dtype=torch.uint8, device=DEVICE)
    masks[2, 0] = 5  # whatever is drawn: some of either
    which, expected, before = integers([2, -1, 0, 2, -5, 3]), logits.clone(), logits.clone()
    reference.forbid_bits(expected, masks, which)
    cuda.forbid_bits(logits, masks, which)
    assert torch.equal(logits, expected) and torch.equal(logits[[1, 4]], before[[1, 4]])
    assert logits[0].isneginf().any() and logits[0].isfinite().any()


@gpu
def test_no_sequences_and_no_rows() -> None:
    none = integers([])
    assert cuda.match_text(none.view(0, 8), none, 3, none.view(0, 4)).shape == (0,)
    cuda.append_text(none.view(0, 8), none, none.view(0, 4), none)
    cuda.forbid_bits(randn(0, 8), torch.zeros(1, 1, dtype=torch.uint8, device=DEVICE), none)


@gpu_only
def test_a_graph_follows_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appending and matching, captured once: the lengths and counts are data."""
    monkeypatch.undo()  # capture wants the real torch.empty
    seqs, room, depth = 3, 5000, 7
    ids, length = torch.randint(0, 3, (seqs, room), dtype=torch.int32, device=DEVICE), integers([40, 2000, 0])
    samples, count = integers([[1, 2, 0, 1]] * seqs), integers([4, 1, 3])
    drafts = torch.zeros((seqs, depth), dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        cuda.append_text(ids, length, samples, count)
        length.add_(count.where(length > 0, 0))
        return cuda.match_text(ids, length, 4, drafts)

    state = [ids, length, drafts]
    start = [tensor.clone() for tensor in state]
    step()
    for tensor, before in zip(state, start, strict=True):
        tensor.copy_(before)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matched = step()
    own, known, expected = (tensor.cpu() for tensor in start)
    for number in range(20):
        samples.fill_(number % 3)
        graph.replay()
        reference.append_text(own, known, samples.cpu(), count.cpu())
        known += count.cpu().where(known > 0, 0)
        assert matched.tolist() == reference.match_text(own, known, 4, expected).tolist()
        assert drafts.tolist() == expected.tolist() and ids.tolist() == own.tolist()


# Ahead of time compiles: no GPU, but not under the interpreter, which replaces the compiler


def text_step(seqs: int, room: int, depth: int) -> None:
    """Each operator once, on tensors without memory."""

    def ints(*shape: int) -> Tensor:
        return made(*shape, dtype=torch.int32)

    result = ints(seqs, depth + 4)
    cuda.append_text(ints(seqs, room), ints(seqs), result[:, : depth + 1], result[:, depth + 1])
    cuda.match_text(ints(seqs, room), ints(seqs), 8, ints(seqs, depth))
    cuda.match_text(ints(seqs, room), ints(seqs), 8, ints(seqs, depth).long())
    columns = 40000
    masks = made(seqs, columns // 8, dtype=torch.uint8)
    cuda.forbid_bits(made(seqs, columns, dtype=torch.float32), masks, ints(seqs))


@compiled
@pytest.mark.parametrize("capability", LIMIT)
@pytest.mark.parametrize("seqs, room, depth", [(1, 4096, 1), (64, 262144, 15)])
def test_every_kernel_compiles_and_waits(
    seqs: int, room: int, depth: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = captured_launches(monkeypatch, capability, lambda: text_step(seqs, room, depth))
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["_append_text", *["_match_part", "_draft_match"] * 2, "_forbid_bits"]
    for launch in launches:
        built, signature = compile_launch(capability, launch)
        assert built.metadata.launch_pdl and built.metadata.shared <= LIMIT[capability], launch.kernel
        check_order(launch.kernel, signature, built.asm["ptx"])
