"""The trainer end to end on a toy: a tiny target writes, a drafter learns, breaks off, goes on, and drafts.

The target is random, so its greedy text is a function that only training can learn: a drafter that had learnt nothing
would be right once in 320 times.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sparkdraft import LLM, SamplingParams
from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.models.common.config import uniform_config
from sparkdraft.plan.hardware import Hardware
from sparkdraft.train import fit as fit_module
from sparkdraft.train import memory
from sparkdraft.train import run as run_module
from sparkdraft.train.corpus import Corpus, CorpusInfo, CorpusWriter, Finish
from sparkdraft.train.data import make_corpus
from sparkdraft.train.export import read_drafter
from sparkdraft.train.fit import StepGraphs, fit
from sparkdraft.train.run import Run
from sparkdraft.train.settings import FitSettings
from sparkdraft.train.target import load_target
from sparkdraft.util import progress as progress_module
from sparkdraft.util.progress import Meter
from tests.models.tiny import write_tiny

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}<a>"
SMALL = {"layers": 1, "block": 8, "context": 256, "block_rows": 256, "longest": 128, "warmup": 10}


class Killed(BaseException):
    """Nothing catches it: what is on the disk at this instant is what a resumed run finds."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and the corpus that it wrote."""
    root = tmp_path_factory.mktemp("toy")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    write_tiny(root / "target", "llama", **shape, num_key_value_heads=1)
    (root / "target" / "chat_template.jinja").write_text(TEMPLATE)
    (root / "prompts.txt").write_text("".join(f"{word} {i}\n" for i in range(6) for word in ("tell", "why", "how")))
    command = ["train", "data", "--model", str(root / "target"), "--out", str(root / "corpus"), "--device", "cpu"]
    assert main([*command, "--prompts", str(root / "prompts.txt"), "--max-new", "40", "--greedy", "1"]) == 0
    return root


def settings(toy: Path, steps: int, **changes: object) -> FitSettings:
    values = {"target": str(toy / "target"), "data": str(toy / "corpus"), **SMALL, "steps": steps, **changes}
    return FitSettings(**values)  # type: ignore[arg-type]


def command_line(toy: Path, out: Path, *more: str) -> list[str]:
    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = ["train", "fit", "--model", str(toy / "target"), "--data", str(toy / "corpus"), "--out", str(out)]
    return [*command, *flags, "--device", "cpu", *more]


@pytest.fixture(scope="module")
def run(toy: Path) -> Path:
    """A run through the command line, to the end."""
    assert main(command_line(toy, toy / "run", "--steps", "250", "--every", "100")) == 0
    return toy / "run"


def test_it_learns(run: Path) -> None:
    log = Run(run).log()
    assert [entry["step"] for entry in log] == [50, 100, 150, 200, 250]
    assert log[-1]["loss"] < log[0]["loss"] / 2
    assert log[-1]["first"] > 0.5, "a guess is right once in 320 times"


def test_the_drafter_serves_and_changes_no_text(toy: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout in ("zlab", "speculators"):
        assert main(["train", "export", str(run), "--out", str(toy / layout), "--layout", layout]) == 0
    prompts = [f"{word} {i}" for i in range(3) for word in ("tell", "why")]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    plain = LLM(str(toy / "target"), spec="off")
    expected = [c.ids for c in (plain.chat([{"role": "user", "content": p}], params) for p in prompts)]
    for layout in ("zlab", "speculators"):
        llm = LLM(str(toy / "target"), drafter=str(toy / layout), spec="7", ngram=False)
        got = [llm.chat([{"role": "user", "content": p}], params) for p in prompts]
        assert [c.ids for c in got] == expected
        assert llm.engine.drafting.total.mean_acceptance_length > 2, layout


def test_speculators_names_a_target_that_others_find(
    toy: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(toy)
    for given, written in (
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("target", str(toy / "target")),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ):
        command = ["train", "export", str(run), "--out", str(tmp_path / "d"), "--layout", "speculators"]
        assert main([*command, "--model", given, "--force"]) == 0
        config = json.loads((tmp_path / "d" / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == written


def test_eval_says_how_good_it_is(toy: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "export", str(run), "--out", str(toy / "evaluated")])
    capsys.readouterr()
    command = ["train", "eval", "--model", str(toy / "target"), "--drafter", str(toy / "evaluated")]
    assert main([*command, "--dtype", "float32", "--per-class", "1", "--output-len", "12"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out.splitlines()[-1])
    assert "a short run; the full one is --per-class 0 --output-len 384" in output.err
    assert [group["temperature"] for group in report["groups"]] == [0.0, 0.7]
    assert report["groups"][0]["all"]["num_spec_steps"] > 0


def kill_at(instant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 17 is never taken, the checkpoint of step 21 never put in place, or its line in the log left half."""
    step, replace = fit_module.Trainer.step, os.replace

    def dies_in_a_step(self: fit_module.Trainer, number: int) -> None:
        if number == 17:
            raise Killed
        step(self, number)

    def dies_in_a_checkpoint(source: Path, to: Path) -> None:
        if to.name == "state.safetensors" and Run(to.parent).log()[-1]["step"] == 21:
            raise Killed
        replace(source, to)

    def dies_in_the_log(self: Run, entry: dict[str, float]) -> None:
        whole = json.dumps(entry) + "\n"
        with self.log_file.open("a") as file:
            file.write(whole if entry["step"] < 21 else whole[:30])
        if entry["step"] == 21:
            raise Killed

    if instant == "step":
        monkeypatch.setattr(fit_module.Trainer, "step", dies_in_a_step)
    elif instant == "checkpoint":
        monkeypatch.setattr(run_module.os, "replace", dies_in_a_checkpoint)
    else:
        monkeypatch.setattr(Run, "add_log", dies_in_the_log)


@pytest.mark.parametrize(
    "instant", ["checkpoint", *(pytest.param(each, marks=pytest.mark.slow) for each in ("step", "log"))]
)
def test_a_killed_run_goes_on_as_if_unbroken(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    asked = settings(toy, 24, soft=0.5)
    fit(asked, tmp_path / "unbroken", "cpu", every=7)
    kill_at(instant, monkeypatch)
    with pytest.raises(Killed):
        fit(asked, tmp_path / "broken", "cpu", every=7)
    monkeypatch.undo()
    saved = Run(tmp_path / "broken").load()
    assert saved is not None and saved.step == 14
    fit(asked, tmp_path / "broken", "cpu", every=7)
    one, other = (load_file(tmp_path / name / "state.safetensors") for name in ("unbroken", "broken"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    first, second = (
        [{**entry, "seconds": 0} for entry in Run(tmp_path / name).log()] for name in ("unbroken", "broken")
    )
    assert first == second and [entry["step"] for entry in first] == [7, 14, 21, 24]


@pytest.mark.parametrize(("kind", "last"), [(signal.SIGINT, 5), (signal.SIGTERM, 5), (signal.SIGTERM, 51)])
def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: int, last: int
) -> None:
    step, read = fit_module.Trainer.step, fit_module.Meter.read

    def asked_in_a_step(self: fit_module.Trainer, number: int) -> None:
        step(self, number)
        if number == 4:
            os.kill(os.getpid(), kind)

    def asked_in_the_wait(self: fit_module.Meter) -> dict[str, float]:
        """Where a GPU's run spends its time: the host waits for what steps measured. One more step follows."""
        if int(self.sums[1]) == 50:
            os.kill(os.getpid(), kind)
        return read(self)

    patched = (
        (fit_module.Trainer, "step", asked_in_a_step) if last == 5 else (fit_module.Meter, "read", asked_in_the_wait)
    )
    monkeypatch.setattr(*patched)
    command, before = command_line(toy, tmp_path / "run", "--steps", "60"), signal.getsignal(kind)
    assert main(command) == 130
    output = capsys.readouterr()
    assert f"stopped after step {last}: the same command continues" in output.err
    assert json.loads(output.out.splitlines()[-1])["step"] == last
    saved = Run(tmp_path / "run").load()
    assert saved is not None and saved.step == last and signal.getsignal(kind) is before
    monkeypatch.undo()
    assert main(command) == 0 and Run(tmp_path / "run").log()[-1]["step"] == 60


def test_a_run_that_stops_in_its_first_step_begins_again(toy: Path, tmp_path: Path) -> None:
    def asked(step: int, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert fit(settings(toy, 3), tmp_path / "run", "cpu", begin=asked) == 0
    assert Run(tmp_path / "run").load() is None
    assert fit(settings(toy, 3), tmp_path / "run", "cpu") == 3


def test_a_resumed_run_tells_one_time(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed, logged and drawn counts from the beginning of the run."""
    asked, begun, done = settings(toy, 4), list[tuple[int, float]](), list[int]()
    fit(asked, tmp_path / "run", "cpu", every=2, stopped=lambda: len(done) == 2, done=done.append)
    saved = Run(tmp_path / "run").load()
    assert saved is not None and saved.step == 2 and done == [1, 2]
    fit(asked, tmp_path / "run", "cpu", begin=lambda *args: begun.append(args), done=done.append)
    assert begun == [(2, saved.seconds)] and done == [1, 2, 3, 4]
    meter = Meter("training", "steps", shows_left=True)
    now = time.monotonic()
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    meter.resume(1000, 1300, 500.0)
    assert meter.state() == "1000 of 1300 steps, 8 min"
    now += 100
    meter(1100, 1300)
    assert meter.state() == "1100 of 1300 steps, 10 min, about 3 min left"


def test_an_export_is_not_overwritten_without_a_word(
    toy: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "export", str(run), "--out", str(tmp_path / "d")]
    assert main(command) == 0
    modes = {file.stat().st_mode for file in (tmp_path / "d").iterdir()}
    assert len(modes) == 1, "all files are as readable as the first"
    before = (tmp_path / "d" / "config.json").stat().st_ino
    assert main([*command, "--bits", "8"]) == 1
    assert f"{tmp_path / 'd'} is not empty: name another folder, or replace" in capsys.readouterr().err
    assert (tmp_path / "d" / "config.json").stat().st_ino == before
    assert main([*command, "--bits", "8", "--force"]) == 0
    assert "quantization_config" in (tmp_path / "d" / "config.json").read_text()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    assert main([*command, "--force"]) == 1, "what is no drafter is never replaced"
    assert (tmp_path / "d" / "notes.txt").read_text() == "mine"


def test_a_finished_run_is_left_as_it_is_or_made_longer(toy: Path, tmp_path: Path) -> None:
    assert fit(settings(toy, 6), tmp_path / "run", "cpu") == 6
    first = (tmp_path / "run" / "state.safetensors").read_bytes()
    assert fit(settings(toy, 6), tmp_path / "run", "cpu") == 6
    assert (tmp_path / "run" / "state.safetensors").read_bytes() == first
    with pytest.raises(UserError, match="has run 6 steps already"):
        fit(settings(toy, 5), tmp_path / "run", "cpu")
    assert Run(tmp_path / "run").open().settings.steps == 6
    assert fit(settings(toy, 9), tmp_path / "run", "cpu") == 9
    assert [entry["step"] for entry in Run(tmp_path / "run").log()] == [6, 9]


def test_lengths_are_those_of_the_widest_blocks_that_are_trained(toy: Path, tmp_path: Path) -> None:
    fit(settings(toy, 3, block=16, widths=(8,)), tmp_path / "run", "cpu")
    assert Run(tmp_path / "run").log()[-1]["length"] > 1
    meter = fit_module.Meter(16, torch.device("cpu"))
    meter.sums += torch.tensor([3.0, 1.0, 0.5, 0.0, 0.0])
    assert meter.read() == {"loss": 3.0, "first": 0.5}, "no length, for none was measured"


def test_a_loss_that_is_no_number_never_replaces_a_checkpoint(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(settings(toy, 4), tmp_path / "run", "cpu")
    before = (tmp_path / "run" / "state.safetensors").read_bytes()
    monkeypatch.setattr(fit_module.Meter, "read", lambda self: {"loss": float("nan"), "first": 0.0})
    with pytest.raises(UserError, match="after step 8; the last checkpoint is kept"):
        fit(settings(toy, 8), tmp_path / "run", "cpu")
    assert (tmp_path / "run" / "state.safetensors").read_bytes() == before


def test_a_drafter_can_be_gone_on_from_and_grown(toy: Path, run: Path, tmp_path: Path) -> None:
    assert main(["train", "export", str(run), "--out", str(tmp_path / "old"), "--vocab", "40"]) == 0
    old = Run(run).log()[-1]["loss"]
    grown = settings(toy, 50, init=str(tmp_path / "old"), layers=2, lr=1e-4, vector_lr=1e-5)
    fit(grown, tmp_path / "grown", "cpu")
    assert Run(tmp_path / "grown").open().draft["trained_context"] == Run(run).open().draft["trained_context"]
    log = Run(tmp_path / "grown").log()
    assert log[-1]["loss"] < old * 1.3, "the first steps are as good as the last ones were"
    with pytest.raises(UserError, match="--block is 4"):
        fit(settings(toy, 5, init=str(tmp_path / "old"), layers=1, block=4), tmp_path / "less", "cpu")


@pytest.mark.parametrize("soft", [0.0, 0.5])
def test_a_smaller_vocabulary_is_trained_among_its_own_rows(toy: Path, tmp_path: Path, soft: float) -> None:
    asked = settings(toy, 30, vocab=40, soft=soft)
    info, target, corpus = fit_module.prepare(asked, "cpu", None)
    trainer = fit_module.Trainer(asked, target, corpus, DFlashConfig.read(info.draft))
    batch, ids = trainer.batches.take(0), corpus.most_frequent(40).tolist()
    _, teacher = trainer.features(batch)
    labels, whole = trainer.labels(batch, teacher).ids.tolist(), batch.labels.tolist()
    assert labels == [[ids.index(x) if x in ids else -1 for x in row] for row in whole]
    assert any(x >= 0 and x not in ids for row in whole for x in row), "some label must be left out"
    assert (teacher is None) == (soft == 0) and (teacher is None or teacher.shape[1] == 40)
    fit(asked, tmp_path / "run", "cpu")
    assert main(["train", "export", str(tmp_path / "run"), "--out", str(tmp_path / "made")]) == 0
    assert json.loads((tmp_path / "made" / "config.json").read_text())["draft_vocab_size"] == 40
    assert main(["train", "export", str(tmp_path / "run"), "--out", str(tmp_path / "all"), "--vocab", "0"]) == 0
    assert "draft_vocab_size" not in json.loads((tmp_path / "all" / "config.json").read_text())
    with pytest.raises(UserError, match="--vocab is 320; it must be from 1 to 319"):
        fit(settings(toy, 5, vocab=320), tmp_path / "wide", "cpu")
    assert not (tmp_path / "wide").exists()


def test_the_ids_that_were_trained_are_exported_when_the_corpus_has_grown_since(toy: Path, tmp_path: Path) -> None:
    shutil.copytree(toy / "corpus", tmp_path / "corpus")
    before = Corpus(tmp_path / "corpus")
    fit(settings(toy, 2, vocab=40, data=str(tmp_path / "corpus")), tmp_path / "run", "cpu")
    rare = np.bincount(np.concatenate([before.ids(i) for i in range(len(before))]), minlength=320).argsort()[:40]
    with CorpusWriter(tmp_path / "corpus", before.info) as writer:
        writer.add(np.tile(rare, 10_000), 1, before.info.kinds[0], Finish.END, 0.0)
    assert not np.array_equal(Corpus(tmp_path / "corpus").most_frequent(40), before.most_frequent(40))
    assert main(["train", "export", str(tmp_path / "run"), "--out", str(tmp_path / "made")]) == 0
    ids = read_drafter(str(tmp_path / "made"))[2]
    assert ids is not None and ids.tolist() == before.most_frequent(40).tolist()


@pytest.mark.slow
def test_a_smaller_vocabulary_is_exported_to_speculators_with_its_head(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target is kept as floats, because rows cannot be taken out of a head that the CPU kernels have quantised; so
    the texts are those that it writes as floats."""
    shutil.copytree(toy / "target", tmp_path / "target")
    floats = load_target(str(tmp_path / "target"), "cpu")
    make_corpus(floats, tmp_path / "corpus", str(toy / "prompts.txt"), max_new=40, greedy_share=1.0)
    source = {"target": str(tmp_path / "target"), "data": str(tmp_path / "corpus")}
    fit(settings(toy, 60, vocab=60, **source), tmp_path / "run", "cpu")
    command = ["train", "export", str(tmp_path / "run"), "--out"]
    assert main([*command, str(tmp_path / "zlab")]) == 0
    (tmp_path / "target").rename(tmp_path / "moved")
    speculators = [*command, str(tmp_path / "speculators"), "--layout", "speculators"]
    assert main(speculators) == 1 and not (tmp_path / "speculators").exists()
    assert "name the target with --model, or export with --layout zlab" in capsys.readouterr().err
    assert main([*speculators, "--model", str(tmp_path / "moved")]) == 0
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["draft_vocab_size"] == 60
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "moved")
    params, lengths = SamplingParams(max_tokens=48, ignore_eos=True), []
    for layout in ("zlab", "speculators"):
        llm = LLM(str(toy / "target"), dtype="float32", drafter=str(tmp_path / layout), spec="7", ngram=False)
        for i in range(4):
            llm.chat([{"role": "user", "content": f"tell {i}"}], params)
        lengths.append(llm.engine.drafting.total.mean_acceptance_length)
    assert lengths[0] > 1.1 and lengths[1] == pytest.approx(lengths[0], rel=0.1), "but for a head in 16 bits"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_recorded_steps_are_the_steps(toy: Path) -> None:
    asked, weights = settings(toy, 40, soft=0.5), []
    for recorded in (False, True):
        info, target, corpus = fit_module.prepare(asked, "cuda", None)
        with fit_module.stream_of(target.device):
            trainer = fit_module.Trainer(asked, target, corpus, DFlashConfig.read(info.draft))
            graphs = trainer.learn
            assert isinstance(graphs, StepGraphs)
            if not recorded:
                graphs.eager = asked.steps
            for number in range(asked.steps):
                trainer.step(number)
            assert all(bool(shape.graph) == recorded for shape in graphs.shapes.values())
            weights.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
            assert trainer.meter.read()["loss"] > 0
    for name, eager in weights[0].items():
        torch.testing.assert_close(weights[1][name], eager, rtol=0.02, atol=2e-3)


def test_bad_input_is_one_sentence_and_nothing_is_lost(
    toy: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (run / "state.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"holds another run .*layers is 1 there and 2 here"):
        fit(settings(toy, 250, layers=2), run, "cpu")
    with pytest.raises(UserError, match="has layers 0 to 1"):
        fit(settings(toy, 10, aux_layers=(1, 5)), tmp_path / "aux", "cpu")
    with pytest.raises(UserError, match="no training run"):
        Run(tmp_path).open()
    with pytest.raises(
        UserError, match=r"does not fit in memory(.|\n)*Give --context 256 --block-rows \d+: that takes"
    ):
        fit(settings(toy, 10, block_rows=1 << 32), tmp_path / "large", "cpu")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="is a file"):
            fit(settings(toy, 10), out, "cpu")
    with pytest.raises(UserError, match="is not empty and holds no training run"):
        fit(settings(toy, 10), toy / "corpus", "cpu")
    with pytest.raises(UserError, match="no document has an answer of two tokens within 2"):
        fit(settings(toy, 10, longest=2), tmp_path / "short", "cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparkdraft.train.run.save_file", full)
    with pytest.raises(UserError, match="the disk is full"):
        fit(settings(toy, 251), run, "cpu")
    assert (run / "state.safetensors").read_bytes() == before


def test_a_run_that_cannot_go_on_is_refused_before_its_target_is_loaded(toy: Path, tmp_path: Path) -> None:
    loads, run, data = list[str](), tmp_path / "run", tmp_path / "corpus"
    shutil.copytree(toy / "corpus", data)

    @contextmanager
    def loading() -> Iterator[None]:
        loads.append("loaded")
        yield

    def trained(steps: int) -> int:
        return fit(settings(toy, steps, data=str(data)), run, "cpu", loading=loading)

    assert trained(2) == 2 and loads.pop() == "loaded"
    with pytest.raises(UserError, match="has run 2 steps already: --steps cannot be less"):
        trained(1)
    whole = (run / "state.safetensors").read_bytes()
    (run / "state.safetensors").write_bytes(whole[:100])
    with pytest.raises(UserError, match="the checkpoint is damaged"):
        trained(3)
    (run / "state.safetensors").write_bytes(whole)
    with CorpusWriter(data, Corpus(data).info) as writer:
        writer.add(range(20), 3, writer.info.kinds[0], Finish.LENGTH, 0.0)
    with pytest.raises(UserError, match="the data has changed since"):
        trained(3)
    assert not loads


def test_another_vocabulary_and_another_runs_checkpoint_are_refused(toy: Path, tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "corpus", CorpusInfo("other", 321, ("any",))) as writer:
        writer.add(range(20), 3, "any", Finish.LENGTH, 0.0)
    with pytest.raises(UserError, match=r"written by other, whose vocabulary has 321 ids; .* has 320"):
        fit(settings(toy, 10, data=str(tmp_path / "corpus")), tmp_path / "run", "cpu")
    fit(settings(toy, 2), tmp_path / "one", "cpu")
    fit(settings(toy, 2, intermediate=64), tmp_path / "two", "cpu")
    os.replace(tmp_path / "two" / "state.safetensors", tmp_path / "one" / "state.safetensors")
    with pytest.raises(UserError, match="the checkpoint is of another run"):
        fit(settings(toy, 4), tmp_path / "one", "cpu")


def test_blocks_wider_than_the_kernel_are_refused_on_a_gpu(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "detect", lambda config: Hardware("cuda", "a GPU", 8, 1 << 40))
    with pytest.raises(UserError, match="a GPU trains 16 at most"):
        fit(settings(toy, 10, block=32), tmp_path / "run", "auto")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"warmup": -1}, "--warmup is -1; it must be at least 0"),
        ({"seed": -1}, "--seed"),
        ({"vector_lr": -1.0}, "--vector-lr"),
        ({"alpha": 2.0}, "--alpha is 2.0; it must be from 0 to 1"),
        ({"flat": 1.5}, "--flat"),
        ({"aux_layers": (1, 1)}, "names a layer twice"),
        ({"widths": (8, 17)}, "each must be 2 to 16"),
        ({"block_rows": 15}, "one block alone has 16 rows"),
    ],
)
def test_settings_that_make_no_sense(values: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        FitSettings(target="t", data="d", **values)  # type: ignore[arg-type]


def test_sums_of_memory() -> None:
    smollm2 = uniform_config("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, tie_embeddings=True)
    asked = FitSettings(target="smollm2", data="d")
    gpu, cpu = (sum(memory.parts(smollm2, asked, on_gpu).values()) / 2**30 for on_gpu in (True, False))
    assert 8 < gpu < 24 and 8 < cpu < 24
    soft = memory.parts(smollm2, FitSettings(target="smollm2", data="d", soft=0.5), on_gpu=True)
    assert soft["the target's logits"] == 16384 * 49152 * 2
    assert (
        soft["captured steps"] == sum(size for name, size in soft.items() if name.startswith("the ")) + soft["logits"]
    )


def test_a_run_that_does_not_fit_is_told_what_would() -> None:
    """The sums of docs/training.md, for a target of eight billion parameters."""
    qwen = uniform_config("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, tie_embeddings=False, qk_norm=True)
    asked = FitSettings(target="Qwen/Qwen3-8B", data="d", layers=5)
    assert memory.total_bytes(qwen, asked, True) / 2**30 == pytest.approx(127.1, abs=0.1)
    for free, wanted in ((23, (1, 1024, 2688)), (78, (5, 7168, 21504)), (115, (5, 12288, 36864))):
        smaller = memory.fitting(qwen, asked, free << 30, True)
        assert smaller and (smaller.layers, smaller.context, smaller.block_rows) == wanted
        assert memory.fit_in(qwen, smaller, free << 30, True) == (smaller, "")
        with pytest.raises(UserError, match=f"--context {wanted[1]} --block-rows {wanted[2]}: that takes"):
            memory.fit_in(qwen, asked, free << 30, True)
    assert memory.fitting(qwen, asked, 200 << 30, True) == asked
    with pytest.raises(UserError, match="take a smaller target"):
        memory.fit_in(qwen, asked, 16 << 30, True)
    grown = FitSettings(target="Qwen/Qwen3-8B", data="d", layers=5, init="drafter")
    assert memory.fitting(qwen, grown, 23 << 30, True) is None, "what exists keeps its layers"


def test_a_cpu_s_defaults_leave_the_machine_usable() -> None:
    """A step takes seconds, and half of the free memory stays free; what was asked for in numbers is kept."""
    smollm2 = uniform_config("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, tie_embeddings=True)
    asked = FitSettings(target="smollm2", data="d")
    for gib in (8, 14, 100):
        chosen, note = memory.fit_in(smollm2, asked, gib << 30, False, memory.SHRINKS)
        assert memory.total_bytes(smollm2, chosen, False) <= (gib << 30) // 2
        assert chosen.context <= 1024 and chosen.block_rows <= 1024
        assert f"--context {chosen.context} --block-rows {chosen.block_rows} (" in note and f"of {gib}.0 GiB" in note
    assert memory.fit_in(smollm2, asked, 100 << 30, False) == (asked, "")
    assert memory.fit_in(smollm2, asked, 100 << 30, True, memory.SHRINKS) == (asked, "")


@pytest.mark.slow
def test_what_nobody_asked_for_is_made_smaller_and_said(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smollm2 = uniform_config("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, tie_embeddings=True)
    asked = FitSettings(target="smollm2", data="d")
    smaller, note = memory.fit_in(smollm2, asked, 6 << 30, False, memory.SHRINKS)
    flags = f"--context {smaller.context} --block-rows {smaller.block_rows}"
    assert smaller.context < asked.context and memory.total_bytes(smollm2, smaller, False) < 6 << 30
    assert note.startswith("the defaults need ") and flags in note
    one, note = memory.fit_in(smollm2, asked, 12 << 30, False, ("block_rows",))
    assert one.context == asked.context and one.block_rows < asked.block_rows and "--context" not in note
    with pytest.raises(UserError, match=r"does not fit in memory(.|\n)*Give --context"):
        memory.fit_in(smollm2, asked, 6 << 30, False)
    # a run that was made smaller goes on as it began, however much memory there is by then
    said: list[str] = []
    large = settings(toy, 2, block_rows=1 << 32)
    monkeypatch.setattr(fit_module, "detect", lambda config: Hardware("cpu", "a CPU", 2, 1 << 30))
    fit(large, tmp_path / "run", "cpu", shrinks=("block_rows",), say=said.append)
    monkeypatch.setattr(fit_module, "detect", lambda config: Hardware("cpu", "a CPU", 2, 1 << 40))
    taken = Run(tmp_path / "run").open().settings
    assert len(said) == 1 and f"--block-rows {taken.block_rows} " in said[0]
    assert fit(replace(large, steps=3), tmp_path / "run", "cpu", shrinks=("block_rows",), say=said.append) == 3
    assert len(said) == 1 and Run(tmp_path / "run").open().settings == replace(taken, steps=3)
