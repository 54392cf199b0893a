"""`bench report` on a tiny model: every figure has its ceiling, pages and JSON agree, a page needs no other file, and
what the time or the machine does not allow is listed."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdraft.cli import bench_report
from sparkdraft.cli.main import main
from sparkdraft.config import EngineConfig
from sparkdraft.core import AUTO, UserError
from sparkdraft.engine import machine
from sparkdraft.llm import LLM
from sparkdraft.operate.bench import report
from sparkdraft.operate.bench.depth import Cell, DepthBench
from sparkdraft.operate.bench.formats import Memory
from sparkdraft.operate.bench.offline import Bench, Ceilings, Load
from sparkdraft.operate.bench.report import Budget, KvRow, Rate, Report, SpeedRow, Start, commit, environment
from sparkdraft.operate.forecast import rates
from sparkdraft.plan.hardware import cpu
from sparkdraft.speculation.stats import SpecStats
from tests.cli.said import said
from tests.drafters.tiny_mtp import write_target
from tests.models.tiny import write_tiny

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
QUICK = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--output-len", "8")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.SIZE, "cpu", 1 << 20)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 1024}
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama", shards="1GB", **shape)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Tags(HTMLParser):
    """Tags that are open, tags that were closed in another order, and whatever a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "data")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "data")]


def made() -> Report:
    """Figures that can be worked out by hand."""
    found = Report({"model": "a <b> model", "machine": "a box, 2 cores", "command": "sparkdraft bench report"})
    found.start = Start(4.0, 700, 0.5)
    for streams in (1, 4):
        plain, drafted = Rate(50.0 * streams, 200.0 * streams), Rate(80.0 * streams, 400.0 * streams)
        found.speeds.append(SpeedRow("code", 0, streams, plain, drafted, 3.25, 2, 2))
    found.kv = [KvRow("exact", Memory(100, 16.0, 10, 1000, 1.0)), KvRow("fp8", problem="it has no kernels | here")]
    found.left_out, found.notes = ["prose: the time ran out (--minutes)"], ["float32: no compiler"]
    return found


def test_pages_have_every_figure_beside_its_ceiling() -> None:
    text, page = report.markdown(made(), "report.svg"), report.html(made())
    assert "| first token | 4.00 s | 0.50 s (12%) | 700 MB |" in text
    assert "| code | 0 | 4 | 200.0 | 800.0 (25%) | 320.0 | 1600.0 (20%) | 1.60 | 3.25 | 2 of 2 |" in text
    assert "prose: the time ran out" in text and "![charts](report.svg)" in text and "`sparkdraft bench report`" in text
    for cell in (
        "4.00 s",
        "0.50 s (12%)",
        "800.0 (25%)",
        "1600.0 (20%)",
        "does not run here: it has no kernels | here",
    ):
        assert f"<td>{cell}</td>" in page
    tags = Tags(page)
    assert not tags.wrong and not tags.open and not tags.loaded, "it needs no other file, and is well formed"
    assert "a &lt;b&gt; model" in page and "<b>" not in page and page.count("<svg") == 1
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)


def test_columns_of_a_table_are_as_many_as_its_heads() -> None:
    for table in report.tables(made()):
        assert {len(row) for row in table.rows} == {len(table.heads)}, table.title
    plain = made()
    plain.speeds = [SpeedRow("code", 0, 1, Rate(1.0, 2.0), None, 1.0, 1, 1)]
    table = report.tables(plain)[1]
    assert table.heads == ["class", "context", "streams", "plain tok/s", "ceiling"] and len(table.rows[0]) == 5


def test_time_that_is_spent_is_not_spent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    budget = Budget(10)
    assert budget.allows("speed", "first")
    with budget.spent_on("speed"):
        clock[0] = 6.0
    assert not budget.allows("speed", "second"), "4 seconds are left, and it took 6"
    assert budget.allows("kv", "another kind") and budget.left_out == ["second: the time ran out (--minutes)"]
    clock[0] = 11.0
    assert not budget.allows("kv", "third")


def test_a_ceiling_is_what_the_bandwidth_allows(tiny: Path) -> None:
    """Two streams: the weights once, and the K/V of both at the middle of their output."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_seqs": 2, "prefix_cache": False}
    llm = LLM(str(tiny), drafter="none", ngram=False, **options)
    bench = Bench(llm.engine, llm.model_config, Ceilings(1e9, None))
    ids = [[5 + i for i in range(20)], [9 + i for i in range(30)]]
    row = report.speed_row(bench, DepthBench(llm.engine, 8, 0.0, None), "code", ids, 0, 2)
    read = llm.engine.runner.model.nbytes(2) + 2 * llm.engine.runner.kv.bytes_read(25 + 4)
    assert row.plain.ceiling == pytest.approx(2 * 1e9 / read) and row.drafted is None and row.ratio is None
    assert row.plain.share == pytest.approx(row.plain.tok_s / row.plain.ceiling) and row.prompts == row.same_text == 2


def test_a_drafted_ceiling_counts_the_passes_that_were_made(tmp_path: Path) -> None:
    """A chain makes a pass per draft, in the steps in which it drafts: not in those of n-grams, nor in plain ones."""
    folder, _ = write_target(tmp_path, "qwen3_5")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_seqs": 1, "max_step_tokens": 32}
    llm = LLM(str(folder), drafter="mtp", ngram=False, profile="none", prefix_cache=False, **options)
    bench, load = Bench(llm.engine, llm.model_config, Ceilings(1.0, None)), Load(1, 20, 8)
    proposer, stats = llm.engine.drafting.proposer, SpecStats()
    assert proposer and proposer.chain
    one = proposer.drafter.reads(1)
    for drafted, source in ((3, "mtp"), (1, "mtp"), (0, ""), (4, "ngram")):
        stats.record(drafted, 0, source)
    assert stats.by_drafter == (2, 4)
    cell = Cell("qa", 1, AUTO, 4, 1.0, 4, stats.num_draft_tokens, 1, 1, *stats.by_drafter)
    read = sum(bench.floor_bytes(load, drafts=2.0).values())
    read += 4 / 4 * (one.propose + 24 * one.kv_per_token) + 2 / 4 * one.observe
    assert report._rate(bench, load, cell).ceiling == pytest.approx(1 / read)
    sweep = DepthBench(llm.engine, 8, 0.0, None).sweep({"qa": [list(range(5, 25))]}, [1], [0, 2], lambda *_: None)
    counts = {cell.depth: (cell.drafter_steps, cell.drafter_drafts) for cell in sweep if cell.kind == "qa"}
    assert counts[0] == (0, 0) and 0 < 2 * counts[2][0] == counts[2][1]


def test_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment(cpu(), "sparkdraft bench report")
    assert {"date", "machine", "versions", "sparkdraft", "command"} <= found.keys()
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(report.__file__).parent, capture_output=True, text=True
    )
    assert head.stdout.strip().startswith(commit().split()[0]) or "unknown" in commit()

    def gone(*args: Any, **more: Any) -> Any:
        raise FileNotFoundError("git")

    monkeypatch.setattr(report.subprocess, "run", gone)
    assert commit() == "unknown (not a git checkout)"


def test_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--classes", "qa", "--context", "0,16,4000", "--concurrency", "1,2", "--kv-formats", "fp8", "--no-start")
    assert main(["bench", "report", "--model", str(tiny), *QUICK, *args, "--out", str(tmp_path)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "report.json").read_text())
    assert [(row["context"], row["streams"]) for row in found["speeds"]] == [(0, 1), (0, 2), (16, 1), (16, 2)]
    for row in found["speeds"]:
        assert row["kind"] == "qa" and row["plain"]["tok_s"] > 0 and row["plain"]["ceiling"] > 0 and row["drafted"]
    assert len(found["left_out"]) == 2 and "qa, 4000 tokens before, 1 streams" in found["left_out"][0]
    assert [row["name"] for row in found["kv"]] == ["exact", "fp8"] and all(row["speeds"] for row in found["kv"])
    assert found["kv"][1]["memory"]["bytes_per_token"] * 4 == found["kv"][0]["memory"]["bytes_per_token"]
    assert found["start"] is None and "Start-up" not in (tmp_path / "report.md").read_text()
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    first = found["speeds"][0]["plain"]["tok_s"]
    for numbers in (re.findall(r"<td>([\d.]+)</td>", page), re.findall(r"\| ([\d.]+) \|", text)):
        assert any(abs(float(each) - first) < 0.06 for each in numbers), "both are rounded"
    assert not Tags(page).wrong and (tmp_path / "report.svg").is_file()


@pytest.mark.slow
def test_a_start_of_its_own(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--classes", "qa", "--context", "0", "--concurrency", "1", "--kv-formats", "exact", "--no-ngram")
    assert main(["bench", "report", "--model", str(tiny), *QUICK, *args, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    start = found["start"]
    assert 0 < start["floor_seconds"] < start["seconds"] and start["peak_mb"] > 50
    assert found["speeds"][0]["drafted"] is None and "drafted" not in (tmp_path / "report.md").read_text()


def test_no_time_is_said(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("--classes", "qa", "--context", "0", "--concurrency", "1", "--minutes", "0.0001", "--out", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["sparkdraft", "bench", "report", "--model", str(tiny), *args])
    assert main(["bench", "report", "--model", str(tiny), *QUICK, *args]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["speeds"] == [] and found["start"] is None and len(found["left_out"]) >= 3
    assert found["left_out"][0] == "start-up: the time ran out (--minutes)"
    page = (tmp_path / "report.md").read_text()
    assert "the time ran out" in page
    assert f"--model .../{tiny.name}" in page and str(tiny.parent) not in page and str(tmp_path) not in page


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--classes", "poems"], "--classes names 'poems'; classes are"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--output-len", "2"], "--output-len is 2"),
        (["--per-class", "0"], "--per-class is 0"),
        (["--kv-formats", "k9v9"], "--formats names 'k9v9'"),
        (["--concurrency", "x"], "--concurrency is 'x'"),
        (["--concurrency", "1,4", "--max-seqs", "2"], "--concurrency has 4; --max-seqs lets 2 run at once"),
        (["--out", "/dev/null/here"], "--out is /dev/null/here, which cannot be written to"),
    ],
)
def test_what_can_not_be_measured(args: list[str], words: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", "--model", str(tiny), *QUICK, *args]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == "" and len(said(printed.err)) == 1, printed.err


def test_formats_without_an_exact_plan_and_an_early_end_lose_no_figure(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exact cache has no plan, fp8's speed is measured, and the next format ends the run."""
    stored: list[Any] = []
    plan, row = machine.plan_here, bench_report._kv_row

    def refuse_exact(config: EngineConfig, *args: Any, **more: Any) -> Any:
        stored.append(more.get("stored"))
        if config.kv == "exact":
            raise UserError("it does not fit")
        return plan(config, *args, **more)

    def end_early(args: Any, fmt: Any, *more: Any) -> Any:
        if fmt.name == "k4v3":
            raise UserError("no memory is left")
        return row(args, fmt, *more)

    monkeypatch.setattr(machine, "plan_here", refuse_exact)
    monkeypatch.setattr(bench_report, "_kv_row", end_early)
    args = ("--classes", "qa", "--context", "0", "--concurrency", "1", "--kv-formats", "fp8,k4v3", "--no-start")
    assert main(["bench", "report", "--model", str(tiny), *QUICK, *args, "--out", str(tmp_path)]) == 1
    assert "no memory is left" in capsys.readouterr().err
    found, text = json.loads((tmp_path / "report.json").read_text()), (tmp_path / "report.md").read_text()
    assert found["speeds"] and found["left_out"] == ["whatever came after this: no memory is left"]
    assert [(row["name"], row["memory"], bool(row["speeds"])) for row in found["kv"]] == [
        ("exact", None, False),
        ("fp8", None, True),
    ]
    assert "| exact | does not run here: it does not fit |" in text and "| fp8 | - | - | - | " in text
    assert stored and all(stored), "quantised weights are counted as they are stored"
