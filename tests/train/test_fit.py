"""The trainer end to end on a toy: a tiny target writes, a drafter learns, breaks off, goes on, and drafts.

The target is random, so its greedy text is a function that only training can learn: a drafter that had learnt nothing
would be right once in 320 times.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparkdraft import LLM, SamplingParams
from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.spec.config import DraftConfig
from sparkdraft.train import fit as fit_module
from sparkdraft.train.fit import fit
from sparkdraft.train.graphs import StepGraphs
from sparkdraft.train.run import Run
from sparkdraft.train.settings import FitSettings
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
    values = {**SMALL, "steps": steps, **changes}
    return FitSettings(target=str(toy / "target"), data=str(toy / "corpus"), **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(toy: Path) -> Path:
    """A run through the command line, to the end."""
    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = ["train", "fit", "--model", str(toy / "target"), "--data", str(toy / "corpus"), "--out", str(toy / "run")]
    assert main([*command, *flags, "--steps", "250", "--every", "100", "--device", "cpu"]) == 0
    return toy / "run"


def test_it_learns(run: Path) -> None:
    log = Run(run).log()
    assert [entry["step"] for entry in log] == [50, 100, 150, 200, 250]
    assert log[-1]["loss"] < log[0]["loss"] / 2
    assert log[-1]["first"] > 0.5, "a guess is right once in 320 times"
    assert (run / "progress.svg").read_text().startswith("<svg")


def test_the_drafter_serves_and_changes_no_text(toy: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout in ("zlab", "speculators"):
        assert main(["train", "export", str(run), "--out", str(toy / layout), "--layout", layout]) == 0
    prompts = [f"{word} {i}" for i in range(3) for word in ("tell", "why")]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    plain = LLM(str(toy / "target"), dtype="float32", spec="off")
    expected = [c.ids for c in (plain.chat([{"role": "user", "content": p}], params) for p in prompts)]
    for layout in ("zlab", "speculators"):
        llm = LLM(str(toy / "target"), dtype="float32", drafter=str(toy / layout), spec="7", ngram=False)
        got = [llm.chat([{"role": "user", "content": p}], params) for p in prompts]
        assert [c.ids for c in got] == expected
        assert llm.engine.drafting.total.mean_acceptance_length > 2, layout


def test_eval_says_how_good_it_is(toy: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "export", str(run), "--out", str(toy / "drafter")])
    capsys.readouterr()
    command = ["train", "eval", "--model", str(toy / "target"), "--drafter", str(toy / "drafter"), "--dtype", "float32"]
    assert main([*command, "--per-class", "1", "--output-len", "12"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [group["temperature"] for group in report["groups"]] == [0.0, 0.7]
    assert report["groups"][0]["all"]["num_spec_steps"] > 0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_killed_run_goes_on_as_if_unbroken(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    asked = settings(toy, 24, optimizer=optimizer, soft=0.5)
    fit(asked, tmp_path / "unbroken", "cpu", every=100)
    step = fit_module.Trainer.step

    def dies(self: fit_module.Trainer, number: int) -> None:
        if number == 17:
            raise Killed
        step(self, number)

    monkeypatch.setattr(fit_module.Trainer, "step", dies)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_recorded_steps_are_the_steps(toy: Path, optimizer: str) -> None:
    asked, weights = settings(toy, 40, optimizer=optimizer, soft=0.5), []
    for recorded in (False, True):
        info, target, corpus = fit_module.prepare(asked, "cuda", None)
        with fit_module.stream_of(target.device):
            trainer = fit_module.Trainer(asked, target, corpus, DraftConfig.read(info.draft))
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
    with pytest.raises(UserError, match="has blocks 0 to 1"):
        fit(settings(toy, 10, taps=(1, 5)), tmp_path / "taps", "cpu")
    with pytest.raises(UserError, match="no training run"):
        Run(tmp_path).open()
    with pytest.raises(UserError, match="does not fit in memory"):
        fit(settings(toy, 10, block_rows=1 << 32), tmp_path / "large", "cpu")
    assert not (tmp_path / "taps").exists() and not (tmp_path / "large").exists()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparkdraft.train.run.save_file", full)
    with pytest.raises(UserError, match="the disk is full"):
        fit(settings(toy, 251), run, "cpu")
    assert (run / "state.safetensors").read_bytes() == before
