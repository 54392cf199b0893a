"""`bench depth` over the fake model: what it counts, with real and with synthetic acceptance, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdraft.cli.main import main
from sparkdraft.core import AUTO, UserError
from sparkdraft.operate.bench.depth import Cell, DepthBench, table
from sparkdraft.operate.bench.prompts import read_prompts
from sparkdraft.operate.bench.synthetic import Acceptance
from tests.fakes import FakeBlock, fake_engine

ROOM = {"num_blocks": 800, "block_size": 4, "max_step_tokens": 64}
PROMPTS = {"easy": [[1, 2, 3], [4, 5], [6, 7, 8]], "hard": [[9, 10]]}
DEPTHS = [0, 1, 7, AUTO]
Cells = dict[tuple[int, str, int], Cell]


def sweep(chance: float, acceptance: Acceptance | None = None, output_len: int = 24) -> Cells:
    bench = DepthBench(fake_engine(FakeBlock(chance), **ROOM), output_len, 0.0, acceptance)
    told: list[tuple[int, int]] = []
    cells = bench.sweep(PROMPTS, [1, 2], DEPTHS, lambda done, total: told.append((done, total)))
    assert told[-1] == (7, 7)  # 3 + 1 groups of one, 2 + 1 groups of two
    assert [cell.kind for cell in cells][:9:4] == ["easy", "hard", "all"]
    return {(cell.streams, cell.kind, cell.depth): cell for cell in cells}


def test_every_depth_runs_every_prompt_and_writes_the_same_text() -> None:
    cells, prompts = sweep(0.7), {(1, "easy"): 3, (1, "hard"): 1, (1, "all"): 4, (2, "easy"): 4, (2, "hard"): 2}
    assert len(cells) == 2 * 3 * len(DEPTHS)
    for (streams, kind, depth), cell in cells.items():
        assert cell.prompts == cell.same_text == prompts.get((streams, kind), 6)
        assert cell.tokens >= 24 * cell.prompts / streams and cell.seconds > 0
        if depth != AUTO:
            assert cell.rows == pytest.approx(1 + depth)
    assert cells[1, "all", 0].length == 1.0
    assert cells[1, "all", 7].length == pytest.approx(sum(0.7**k for k in range(8)), rel=0.3)


def test_a_synthetic_acceptance_holds_at_the_deepest_and_is_cut_above_it() -> None:
    acceptance = Acceptance(4.0, 7)
    cells = sweep(0.0, acceptance, output_len=60)
    assert cells[1, "all", 7].length == pytest.approx(4.0, rel=0.12)
    assert cells[2, "all", 7].length == pytest.approx(4.0, rel=0.12)
    assert cells[1, "all", 1].length == pytest.approx(1 + acceptance.p, rel=0.1)
    assert cells[1, "all", 0].length == 1.0


@pytest.mark.parametrize(
    "room, message",
    [
        ({"max_seqs": 2}, "3 streams at once .* are more than the 2 that run at once"),
        ({"num_blocks": 50}, "3 streams at once .* need a KV cache of 204 tokens; it holds 200"),
        ({"max_model_len": 64}, "need a context of 67 tokens; 64 is the most"),
    ],
)
def test_streams_that_would_wait_for_each_other_are_refused(room: dict[str, int], message: str) -> None:
    """Three prompts of three ids, and 2 * (24 + 7 + 1) tokens of output: 17 blocks of 4 each."""
    limits = {"max_seqs": 3, "num_blocks": 51, "max_model_len": 67, "block_size": 4, "max_step_tokens": 64}
    DepthBench(fake_engine(FakeBlock(0.7), **limits), 24, 0.0, None).check(PROMPTS["easy"], 3)
    with pytest.raises(UserError, match=message):
        DepthBench(fake_engine(FakeBlock(0.7), **limits | room), 24, 0.0, None).check(PROMPTS["easy"], 3)


def test_the_report() -> None:
    seconds = {0: 2.0, 1: 1.0, 3: 0.5, AUTO: 0.4}
    cells = [Cell(kind, 1, depth, 100, time, 50) for kind in ("code", "all") for depth, time in seconds.items()]
    lines = table(cells).splitlines()
    assert lines[0].split()[:6] == ["streams", "class", "0", "1", "3", "auto"]
    assert lines[1].split() == ["1", "code", "50.0", "100.0", "200.0", "250.0", "3", "1.25", "5.00", "1.00", "2.00"]


def test_prompts_of_a_user(tmp_path: Path) -> None:
    lines, objects, broken = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    lines.write_text("One?\n\nTwo?\n")
    objects.write_text('{"class": "code", "prompt": "x"}\n{"prompt": "y"}\n')
    assert read_prompts(0, lines) == {"given": ["One?", "Two?"]}
    assert read_prompts(0, objects) == {"code": ["x"], "given": ["y"]}
    lines.write_bytes("\ufeffOne\u2028and a half?\r\nTwo?".encode())
    assert read_prompts(0, lines) == {"given": ["One\u2028and a half?", "Two?"]}
    lines.write_bytes("Où?".encode("latin-1"))
    with pytest.raises(UserError, match="check the path, and that it is UTF-8"):
        read_prompts(0, lines)
    for text, message in (('{"prompt": 3}', "must be a text"), ("{", "line 1 is not JSON"), ("", "holds no prompts")):
        broken.write_text(text)
        with pytest.raises(UserError, match=message):
            read_prompts(0, broken)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--output-len 4", "it must be at least 8"),
        ("--per-class -1", "it must be at least 0"),
        ("--shape qwen3-8b", "go together"),
        ("--shape qwen3-8b --drafter-shape dflash-5x", "--synthetic-acceptance"),
        ("--prompts /no/such/file", "not a file"),
        ("--concurrency 0", "--concurrency is '0'"),
        ("--concurrency 1,4 --max-seqs 2", "--concurrency has 4; --max-seqs lets 2 run at once"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "depth", *flags.split()]) == 1
    assert message in capsys.readouterr().err
