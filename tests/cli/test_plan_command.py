"""`sparkdraft plan` as typed: what it prints, that it loads no torch, and a sentence for every mistake."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.cli.main import main
from sparkdraft.drafters.find import default_drafter
from sparkdraft.drafters.mtp import MtpConfig
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.shapes import TARGET_FILES
from sparkdraft.operate.forecast.machine import FOLDER
from tests.patience import PATIENT

ROOT = Path(__file__).parent.parent.parent
GB10 = ["plan", "--machine", "gb10", "--model"]
KEYS = {
    "plan", "machine", "memory_gib", "max_tokens", "max_streams", "plain_tok_s", "drafted_tok_s", "low", "high",
    "best_depth", "break_even_tokens", "break_even_chance", "by_class", "recommended", "alternatives",
}  # fmt: skip

WITHOUT_TORCH = """
import sys
from sparkdraft.cli.main import main
status = main(sys.argv[1:])
heavy = {"torch", "triton", "transformers"} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""


def test_no_torch_is_imported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TARGET_FILES["gpt-oss-20b"]), encoding="utf-8")
    command = [
        *GB10,
        str(model),
        "--drafter",
        "gpt-oss-20b-dflash",
        "--compare",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True, timeout=PATIENT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["best_depth"] > 0


def test_a_head_in_the_models_file_drafts_as_in_service_without_torch(tmp_path: Path) -> None:
    config = TARGET_FILES["qwen3.5-27b"]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    head = json.dumps(dict.fromkeys(MtpConfig.of(read_config(config)).tensor_shapes(), empty)).encode()
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    command = [sys.executable, "-c", WITHOUT_TORCH, *GB10, str(tmp_path), "--weights", "fp8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["drafter"] == "mtp" and found["best_depth"] > 0
    assert "drafting with the MTP head in the model's own file" in done.stderr


def test_weights_that_are_still_to_come_are_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET_FILES["qwen3.5-27b"]), encoding="utf-8")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert main([*GB10, str(tmp_path)]) == 0
    assert "whether the model's file holds a head that drafts is not known" in capsys.readouterr().err.replace(
        "\n", " "
    )


def test_it_ends_with_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GB10, "qwen3-8b", "--drafter", "dflash-5x", "--compare", "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found.keys() >= KEYS
    assert found["low"] < found["drafted_tok_s"] < found["high"] and found["best_depth"] == 15
    parts = [size for name, size in found["memory_gib"].items() if name not in ("total", "free", "head room")]
    assert sum(parts) == pytest.approx(found["memory_gib"]["total"], abs=0.01)
    shown = "\n".join(text)
    for words in (
        "weights, bfloat16",
        "drafter's K/V",
        "head room",
        "drafting pays from",
        "recommended: Serve it with",
    ):
        assert words in shown
    assert len(found["alternatives"]) == 18


def test_the_docs_show_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    docs = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    found = re.search(r"```\n(sparkdraft plan [^\n]*)\n```\n\n```\n(.*?)```", docs, re.S)
    assert found and main(found[1].split()[1:]) == 0
    assert capsys.readouterr().out == found[2]
    assert runpy.run_path(str(ROOT / "tools/flag_table.py"))["plan_table"]() in docs, "run tools/flag_table.py"


def test_without_a_drafter_there_is_nothing_to_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GB10, "qwen3-8b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["drafted_tok_s"] is None and found["best_depth"] == 0 and not found["by_class"]
    assert found["low"] < found["plain_tok_s"] < found["high"] and found["drafter"] is None


def test_the_embedded_model_has_its_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--machine", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        found["drafter"] == "smollm2-dflash"
        and found["weights"] == "quantised"
        and found["by_class"]["code"]["depth"] > 0
    )


def test_streams_that_do_not_fit_at_once_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    for streams, fits in ((4, True), (64, False)):
        assert main([*GB10, "qwen3-8b", "--concurrency", str(streams), "--context", "32768", "--json"]) == 0
        *text, last = capsys.readouterr().out.splitlines()
        found = json.loads(last)
        assert found["holds_all"] == fits == (found["max_streams"] >= streams)
        marks = [line for line in text if "NOT ALL FIT AT ONCE: 18 of 64 streams run" in line]
        assert len(marks) == (not fits)


def test_speeds_are_those_of_streams_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for streams in ("1000", "177"):
        assert main(["plan", "--machine", "h200", "--model", "qwen3-8b", "--concurrency", streams, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[0]["running"] == found[1]["running"] == 177 and found[0]["plain_tok_s"] == found[1]["plain_tok_s"]


def test_no_speed_is_printed_of_what_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafter takes the memory that a stream needs: that is said, and it is recommended to leave it out."""
    (busy := tmp_path / "busy.json").write_text(
        json.dumps(json.loads((FOLDER / "rtx-5090.json").read_text()) | {"memory_gib": 29.1})
    )
    command = ["plan", "--machine", str(busy), "--model", "qwen3.5-27b", "--weights", "nvfp4", "--compare"]
    command += ["--drafter", "qwen3.5-27b-dflash"]
    assert main([*command, "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found, said = json.loads(last), "\n".join(text)
    assert "speed: none, because no stream of 4,096 tokens can run" in said and "dialogue (" not in said
    assert "recommended: Serve it with --kv exact --drafter none" in said and "; without it 35,200 fit" in said
    assert found["running"] == 0 and not found["by_class"]
    assert not any(found[name] for name in ("plain_tok_s", "drafted_tok_s", "low", "high"))
    assert not found["plain_step_ms"] and re.search(r"nvfp4 +exact +yes +- +24.7 +960 +0\n", said)
    assert all(each["tok_s"] is None for each in found["alternatives"] if "tok_s" in each and not each["max_streams"])
    command[command.index("nvfp4")] = "fp8"
    assert main(command) == 1, "neither smaller weights nor leaving out the drafter is enough alone"
    assert "in nvfp4 and without the drafter it would fit, with 35,200 tokens" in capsys.readouterr().err


def test_an_acceptance_takes_the_place_of_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GB10, "qwen3-8b", "--drafter", "dflash-5x", "--acceptance", "6.5", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["by_class"].values()
    assert found["tokens_per_step"] == pytest.approx(6.5) and found["depth"] == 15


def test_an_mtp_head_makes_a_pass_per_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """So the best depth is between the least and the most, where a block drafter's would be the most."""
    for name in ("qwen3.5-27b", "qwen3.5-35b-a3b"):
        assert main([*GB10, name, "--weights", "fp8", "--drafter", "mtp", "--acceptance", "3", "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["drafter"] == "mtp" and found["memory_gib"]["drafter's K/V"] > 0
        (drafted,) = found["by_class"].values()
        assert 1 <= drafted["depth"] < 6
    assert main([*GB10, "qwen3-8b", "--drafter", "mtp"]) == 1
    assert "A qwen3 model has no MTP head that is read" in capsys.readouterr().err


def test_a_drafter_may_be_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    folder = default_drafter("smollm2")
    assert folder and main([*GB10, "smollm2-135m", "--drafter", folder]) == 0
    assert "drafter's weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "no-such-model"], "Unknown model 'no-such-model'. Known shapes are tiny, .*gpt-oss-120b"),
        (["--model", "gpt-oss-129b"], "did you mean gpt-oss-120b"),
        (["--drafter", "dflash-6x"], "Unknown drafter 'dflash-6x'; did you mean dflash-5x"),
        (["--model", "gemma4-31b", "--machine", "rtx-5090"], "does not fit.*in nvfp4 it would fit"),
        (["--model", "qwen3.5-27b", "--machine", "rtx-5090"], "does not fit.*weights 50.2.*in nvfp4 it would fit"),
        (
            ["--model", "gemma4-31b", "--machine", "rtx-5090", "--weights", "nvfp4", "--drafter", "gemma4-31b-dflash"],
            "without the drafter it would fit, with [0-9,]+ tokens of context",
        ),
        (["--machine", "gb20"], "Unknown machine 'gb20'; did you mean gb10"),
        (["--kv", "fp4"], "kv is 'fp4'"),
        (["--weights", "fp3"], "'fp3' is no format"),
        (["--weights", "nvfp4", "--machine", "cpu"], "on a CPU the engine keeps matrices quantised"),
        (["--weights", "quantised"], "runs on a CPU only"),
        (["--concurrency", "0"], "ask for 1 stream or more"),
        (["--drafter-weights", "fp8"], "need a drafter: name one with --drafter"),
        (["--drafter-weights", "int3"], "drafter_weights is 'int3'"),
        (["--drafter", "dflash-5x", "--drafter-weights", "fp8", "--machine", "cpu"], "the sums are those of 8 bits"),
        (["--drafter", "dflash-5x", "--draft-vocab", "no-such-file"], "draft_vocab is no-such-file.*cannot be read"),
        (["--context", "99999999"], "was made for 1 to 40,960 tokens"),
        (["--drafter", "gpt-oss-20b-dflash"], "does not fit the model"),
        (["--acceptance", "3"], "needs a drafter"),
        (["--drafter", "dflash-5x", "--acceptance", "20"], "commits 1 to 16 tokens"),
        (["--kv", "turboquant", "--model", "gemma4-31b"], "head dims 64, 128, 256"),
    ],
)
def test_every_mistake_is_a_sentence(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*flags, *(["--model", "qwen3-8b"] if "--model" not in flags else [])]
    given += ["--machine", "gb10"] if "--machine" not in flags else []
    assert main(["plan", *given]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert re.search(words, said[-1]) and len([line for line in said if line.startswith("sparkdraft:")]) == 1


def test_a_hub_id_that_cannot_be_fetched_names_the_shape_of_that_name(tmp_path: Path) -> None:
    here = dict(os.environ, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    for model, shape in (("Qwen/Qwen3-8B", "--model qwen3-8b"), ("acme/nosuch", "")):
        command = [sys.executable, "-m", "sparkdraft.cli.main", *GB10, model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT, env=here)
        assert done.returncode == 1 and "hub" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.endswith(f"{shape}\n") and ("shape" in done.stderr) == bool(shape), done.stderr
