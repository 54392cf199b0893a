"""The CPU's sampling kernels against the definition: kernels/reference/sampling.py, noise of kernels/noise.py."""

from __future__ import annotations

import pytest
import torch

from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.sampler import draws_of, pick
from sparkdraft.kernels import native, reference
from sparkdraft.kernels.ops import IN_PROMPT, EditedSlots, Ends, LogitEdits, Ops, PackedRows
from sparkdraft.kernels.reference.sampling import allowed

needs_compiler = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no C++ compiler here")
PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.2, top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.3),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=50),
    SamplingParams(temperature=2.0, top_k=5000),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.0, top_p=0.999),
]
DRAWS, CPU = 64, torch.device("cpu")
Rows = list[tuple[Request, int]]  # whose parameters and seed, and at which position


def rows_of(params: SamplingParams, seed: int) -> Rows:
    request = Request("a", 0, [1], params, seed, 8)
    return [(request, position) for position in range(DRAWS)]


def draw(ops: Ops, logits: torch.Tensor, rows: Rows, ids: torch.Tensor | None = None) -> torch.Tensor:
    return pick(ops, logits, draws_of([r for r, _ in rows], [position for _, position in rows], CPU), ids)


@needs_compiler
@pytest.mark.parametrize("columns", [5, 64, 1003, 49152])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_it_draws_what_the_definition_draws(params: SamplingParams, columns: int) -> None:
    logits = torch.randn(DRAWS, columns, generator=torch.Generator().manual_seed(columns)) * 3
    logits[:, 1] = float("-inf")
    rows = rows_of(params, columns)
    assert draw(native, logits, rows).tolist() == draw(reference, logits, rows).tolist()


@needs_compiler
def test_columns_that_stand_for_other_ids_draw_their_noise() -> None:
    logits = torch.randn(DRAWS, 300, generator=torch.Generator().manual_seed(1))
    ids, rows = torch.randperm(1000)[:300], rows_of(SamplingParams(temperature=0.8, top_p=0.95), 3)
    assert draw(native, logits, rows, ids).tolist() == draw(reference, logits, rows, ids).tolist()


@needs_compiler
def test_ties_with_the_last_survivor_survive() -> None:
    """Ten equal ids: top_k of 3 leaves all of them, as it does in the definition."""
    params, logits = SamplingParams(temperature=1.0, top_k=3), torch.zeros(400, 20)
    logits[:, 10:] = -50.0
    request = Request("a", 0, [1], params, 5, 8)
    drawn = draw(native, logits, [(request, position) for position in range(400)])
    assert set(drawn.tolist()) == set(range(10))
    draws = draws_of([request], [0], CPU)
    assert draws
    kept = allowed(logits[:1], draws)
    assert int(torch.isfinite(kept).sum()) == 10


@needs_compiler
def test_a_row_draws_the_same_whatever_rows_are_beside_it() -> None:
    logits = torch.randn(DRAWS, 2048, generator=torch.Generator().manual_seed(2)) * 4
    rows = [row for params in PARAMS for row in rows_of(params, 11)[:7]]
    logits = logits[: len(rows)]
    together = draw(native, logits, rows).tolist()
    assert together == [draw(native, logits[i : i + 1], rows[i : i + 1]).tolist()[0] for i in range(len(rows))]


@needs_compiler
@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_without_a_number_draws_some_column(params: SamplingParams, value: float) -> None:
    logits = torch.full((4, 100), value)
    logits[2:] = torch.randn(2, 100)
    logits[3, 8] = float("nan")
    drawn = draw(native, logits, rows_of(params, 1)[:4]).tolist()
    assert all(0 <= column < 100 for column in drawn)


@needs_compiler
def test_greedy_rows_take_their_largest_beside_rows_that_draw() -> None:
    logits = torch.randn(DRAWS, 1003, generator=torch.Generator().manual_seed(4)).round(decimals=1)  # with many ties
    greedy, warm = (rows_of(SamplingParams(temperature=t), 5) for t in (0.0, 1.0))
    mixed = [(greedy, warm)[i % 2][i] for i in range(DRAWS)]
    assert draws_of([r for r, _ in greedy], range(DRAWS), CPU) is None
    largest, drawn = logits.argmax(-1), draw(reference, logits, warm)
    wanted = [int((largest, drawn)[i % 2][i]) for i in range(DRAWS)]
    assert draw(native, logits, mixed).tolist() == draw(reference, logits, mixed).tolist() == wanted


def test_the_rows_of_a_request_follow_each_other() -> None:
    """`each` rows for each request are the same as rows that are named one by one."""
    requests = [rows_of(SamplingParams(temperature=0.5 + 0.1 * i, top_k=i), i)[0][0] for i in range(3)]
    together = draws_of(requests, [7, 20, 3], CPU, each=4)
    positions = [first + k for first in (7, 20, 3) for k in range(4)]
    alone = draws_of([r for r in requests for _ in range(4)], positions, CPU)
    assert together and alone
    assert torch.equal(together.positions, alone.positions)
    mine, own = together.slots.long(), alone.slots.long()
    assert torch.equal(together.floats[:, mine], alone.floats[:, own])
    assert torch.equal(together.integers[:, mine], alone.integers[:, own])


def random_edits(columns: int, device: str = "cpu") -> LogitEdits:
    """Of six rows: three of one request behind each other, a row of none, one with biases alone, one of all."""

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    counts = torch.randint(0, 3, (3, columns), generator=torch.Generator().manual_seed(columns)).int()
    counts[:, ::3] = 0
    counts[:, 1::4] += IN_PROMPT
    last = columns - 1
    return LogitEdits(
        slots=ints([2, 2, 2, -1, 0, 1]),
        positions=ints([7, 8, 9, 3, 4, 5]),
        ids=ints([0, 3, 3, 1, 1, 0]),
        ahead=ints([0, 1, 2, 0, 0, 0]),
        tables=EditedSlots(
            counts=counts.to(device),
            penalties=torch.tensor([[1, 0, 0], [1.3, 0.5, -0.2], [0.7, 1.5, 0.1]], device=device),
            biased=ints([[0, last, 2], [1, -1, -1], [last, 2, -1]]),
            bias=torch.tensor([[1.5, 0, -4], [-100, 9, 9], [0.5, 0, 9]], device=device),
            until=ints([[0, 4, 5], [0, 9, 9], [0, 9, 99]]),
        ),
    )


@needs_compiler
@pytest.mark.parametrize("columns", [5, 64, 1003])
def test_edits_are_those_of_the_definition(columns: int) -> None:
    edits, logits = random_edits(columns), torch.randn(6, columns, generator=torch.Generator().manual_seed(1))
    expected, found = logits.clone(), logits.clone()
    reference.edit_logits(expected, edits)
    native.edit_logits(found, edits)
    assert torch.equal(found, expected) and torch.equal(found[3], logits[3])
    assert found[:2, 2].isneginf().all() and found[4].isinf().sum() == 1 and found[4, 0] == logits[4, 0] + 1.5


@needs_compiler
@pytest.mark.parametrize("columns", [5, 64, 1003])
def test_masks_forbid_as_the_definition_does(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(6, columns, generator=generator)
    masks = torch.randint(0, 256, (4, (columns + 7) // 8), dtype=torch.uint8, generator=generator)
    masks[2, 0] = 5  # whatever is drawn: some of either
    which = torch.tensor([2, -1, 0, 2, -5, 3], dtype=torch.int32)
    expected, found, wanted = logits.clone(), logits.clone(), logits.clone()
    for row, number in enumerate(which.tolist()):
        for column in range(columns if number >= 0 else 0):
            if not masks[number, column // 8] >> column % 8 & 1:
                wanted[row, column] = float("-inf")
    reference.forbid_bits(expected, masks, which)
    native.forbid_bits(found, masks, which)
    assert torch.equal(expected, wanted) and torch.equal(found, wanted)
    assert found[0].isneginf().any() and found[0].isfinite().any() and torch.equal(found[1], logits[1])


# What a step samples and counts

COMMITTED = [2, -1, 0], [[7, 7, 9], [1, 2, 3], [49, 0, 3]], [2, 2, 0]  # edit slots, samples, accepted drafts


def test_accepted_drafts_and_the_sample_behind_them_are_counted() -> None:
    slots, samples, accepted = (torch.tensor(values, dtype=torch.int32) for values in COMMITTED)
    counts = torch.zeros(3, 50, dtype=torch.int32)
    reference.count_ids(counts, slots, samples, accepted)
    assert {(i, j): int(counts[i, j]) for i, j in counts.nonzero().tolist()} == {(2, 7): 2, (2, 9): 1, (0, 49): 1}
    reference.count_ids(counts, slots, samples)
    assert int(counts[2, 7]) == 3 and int(counts[0, 49]) == 2 and int(counts.sum()) == 6


def sampled_case(device: str = "cpu") -> tuple[PackedRows, Ends, torch.Tensor, torch.Tensor]:
    """Slots 0 and 2 with two rows and one, a row of padding, and prompts that end for the slots 3 and 1."""

    def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    length, edit_slots = ints([11, 0, 6, 0]), ints([5, 6, -1, 7])
    positions, seq_of, slots = ints([10, 11, 5, 0]), ints([0, 0, 2, 1]), ints([10, 11, 85, -1])
    unread = ints([0])
    rows = PackedRows(ints([30, 31, 32, 0]), positions, slots, seq_of, unread, unread, unread)
    ends = Ends(ints([3, 1], torch.int64), ints([2, 6], torch.int64), ints([0, 1, 2, 4, 5, 6, 7, 0]))
    return rows, ends, length, edit_slots


def test_rows_that_sample() -> None:
    found = [part.tolist() for part in reference.sampled_rows(*sampled_case())]
    assert found[0] == [3, 1, 0, 0, 2, -1], "slots"
    assert found[1] == [3, 8, 11, 12, 6, 1], "positions"
    assert found[2] == [7, 6, 5, 5, -1, -1], "edited"
    assert found[3][2:5] == [30, 31, 32] and found[4][:5] == [0, 0, 0, 1, 0], "tokens, and drafts before them"
