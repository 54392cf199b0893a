"""The command for vLLM as a user gets it: its flags with those of EXTRA_ARGS, its forms, and the way back."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.bridges.importing import read
from sparkdraft.bridges.vllm.command import Choices, shell
from sparkdraft.cli.main import main
from tests.bridges.test_export_vllm import GEMMA, QWEN, REDHAT, exported


def test_what_extra_args_say_to_vllm_alone_is_handed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = """--seed=3 -tp 2 --max-num-seqs 4 -cc.mode=3 --reasoning-parser x --no-enable-lora --attention-backend a"""
    monkeypatch.setenv("EXTRA_ARGS", own)
    monkeypatch.setenv("ATTENTION_BACKEND", "b")
    monkeypatch.setenv("MAX_NUM_SEQ", "9")
    assert main(["export", "vllm", "--model", QWEN]) == 0
    out, notes = capsys.readouterr()
    words = shlex.split(out.replace("\\\n", " "))
    assert words[-6:] == ["--seed=3", "--reasoning-parser", "x", "--no-enable-lora", "-cc", '{"mode": 3}']
    assert words[words.index("--tensor-parallel-size") + 1] == "2" and words[words.index("--max-num-seqs") + 1] == "4"
    assert words[words.index("--attention-backend") + 1] == "A" and words.count("--reasoning-parser") == 1
    assert "handed on to vLLM: --seed=3" in notes and "did you mean MAX_NUM_SEQS?" in notes
    assert "one machine" not in notes
    monkeypatch.setenv("EXTRA_ARGS", """--speculative-config '{"method": "eagle3", "model": "e"}'""")
    assert main(["export", "vllm", "--model", QWEN]) == 0
    out = capsys.readouterr().out
    assert out.count("--speculative-config") == 1 and "eagle3" in out


def test_what_is_always_done_here_is_asked_of_vllm_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "--enable-auto-tool-choice --tool-call-parser llama3_json --no-async-scheduling "
    own += "--no-enable-prompt-tokens-details --enable-chunked-prefill"
    monkeypatch.setenv("EXTRA_ARGS", own)
    assert main(["export", "vllm", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--drafter", "none"]) == 0
    out, notes = capsys.readouterr()
    words = shlex.split(out.replace("\\\n", " "))
    assert words[-6:] == own.split() and words.count("--enable-auto-tool-choice") == 1
    assert "no parser of vLLM is known" not in notes and "auto chooses by the model" not in notes


def test_what_comes_only_near_to_a_flag_of_extra_args_is_not_sent_in_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exported_words(*flags: str) -> tuple[list[str], str]:
        assert main(["export", "vllm", "--model", "Qwen/Qwen3-8B", *flags]) == 0
        out, notes = capsys.readouterr()
        return shlex.split(out.replace("\\\n", " ")), notes

    drafter = {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 7}
    own = ["--speculative-config", json.dumps(drafter | {"attention_backend": "FLASH_ATTN", "quantization": "fp8"})]
    own += ["--kv-cache-dtype", "nvfp4", "--dtype", "float16", "--override-generation-config", '{"n": 2, "top_k": 3}']
    monkeypatch.setenv("EXTRA_ARGS", shlex.join(own))
    words, notes = exported_words()
    assert words[-6:] == own[-6:] and "counterpart" not in notes and "nearest" not in notes
    assert all(words.count(flag) == 1 for flag in own if flag.startswith("--"))
    assert json.loads(words[words.index(own[0]) + 1]) == json.loads(own[1])
    words, _ = exported_words("--dtype", "float32", "--kv", "fp8", "--drafter", "none")
    assert words[words.index("--dtype") + 1] == "float32" and words[words.index("--kv-cache-dtype") + 1] == "fp8"
    assert "--speculative-config" not in words
    monkeypatch.setenv("EXTRA_ARGS", "--kv-cache-dtype fp8_e5m2")
    assert exported_words()[0][-2:] == ["--kv-cache-dtype", "fp8_e5m2"]
    assert "--kv-cache-dtype fp8_e5m2: the nearest is --kv fp8" in read("vllm serve m --kv-cache-dtype fp8_e5m2").notes


def test_a_flag_beats_extra_args_whatever_its_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def value(flag: str, *flags: str) -> str:
        assert main(["export", "vllm", "--model", "Qwen/Qwen3-8B", *flags]) == 0
        out, notes = capsys.readouterr()
        words = shlex.split(out.replace("\\\n", " "))
        assert words.count(flag) == 1 and ("note: not handed on to vLLM: --" in notes) == bool(flags)
        return words[words.index(flag) + 1]

    monkeypatch.setenv("EXTRA_ARGS", "--dtype float16 --kv-cache-dtype fp8_e5m2 --reasoning-parser x")
    assert value("--dtype") == "float16" and value("--dtype", "--dtype", "bfloat16") == "bfloat16"
    assert value("--kv-cache-dtype") == "fp8_e5m2" and value("--kv-cache-dtype", "--kv", "fp8") == "fp8"
    assert value("--reasoning-parser") == "x"
    assert value("--reasoning-parser", "--reasoning-parser", "think") == "qwen3"
    monkeypatch.setenv("EXTRA_ARGS", "--dtype float16 --dtype bfloat16")
    assert value("--dtype") == "bfloat16"
    monkeypatch.setenv("EXTRA_ARGS", "--dtype float16")
    monkeypatch.setenv("SPARKDRAFT_DTYPE", "bfloat16")
    assert value("--dtype", "--max-seqs", "4") == "bfloat16"


def test_values_without_a_counterpart_are_handed_on_beside_those_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = '{"temperature": 0.5, "foo": 1}'
    own = ["--generation-config", "vllm", "--override-generation-config", values]
    monkeypatch.setenv("EXTRA_ARGS", shlex.join(own))
    assert main(["export", "vllm", "--model", QWEN]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    assert words[-2:] == own[-2:] and words[words.index("--generation-config") + 1] == "vllm"
    assert main(["export", "vllm", "--model", QWEN, "--sampling-defaults", "temperature=0.7"]) == 0
    out, notes = capsys.readouterr()
    assert '{"temperature": 0.7}' in out and "foo" not in out
    assert "not handed on to vLLM: --override-generation-config" in notes and "sampling_defaults is set by" in notes


def test_drafts_from_the_text_that_extra_args_ask_for_are_made_by_vllm_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}
    monkeypatch.setenv("EXTRA_ARGS", shlex.join(["--speculative-config", json.dumps(own)]))
    part = "handed on to vLLM: --speculative-config.prompt_lookup_max 5"
    assert main(["export", "vllm", "--model", "Qwen/Qwen3-8B"]) == 0
    out, notes = capsys.readouterr()
    words = shlex.split(out.replace("\\\n", " "))
    assert json.loads(words[words.index("--speculative-config") + 1]) == own and f"note: {part}\n" in notes
    for flags in (["--spec", "off"], ["--no-ngram"]):
        assert main(["export", "vllm", "--model", "Qwen/Qwen3-8B", *flags]) == 0
        out, notes = capsys.readouterr()
        assert "--speculative-config" not in out and f"note: not {part}: nothing is drafted" in notes
    assert main(["export", "vllm", "--model", "Qwen/Qwen3-8B", "--drafter", "auto"]) == 0
    out, notes = capsys.readouterr()
    assert '"method": "dflash"' in out and "prompt_lookup_max" not in out
    assert f"note: not {part}: drafter is set by a flag" in notes


def test_a_key_is_not_printed() -> None:
    command = exported(server={"api_key": "se%cret"}, model=GEMMA, drafter=REDHAT, weights="fp8")
    text = shell(command)
    assert text.startswith('VLLM_API_KEY="$VLLM_API_KEY" vllm serve') and "se%cret" not in text
    assert shlex.split(text.replace("\\\n", " "))[1:] == command.words()


def test_words_that_are_handed_on_arrive_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those with a value behind an equals sign, values that only look like JSON, and lists."""
    own = ["--tokenizer=my $(folder)", "--hf-overrides", "{broken", "--cudagraph-capture-sizes", "1", "2"]
    monkeypatch.setenv("EXTRA_ARGS", shlex.join(own))
    assert main(["export", "vllm", "--model", QWEN]) == 0
    assert shlex.split(capsys.readouterr().out.replace("\\\n", " "))[-len(own) :] == own


def test_a_template_that_is_not_here_and_a_version_that_is_not_known(tmp_path: Path) -> None:
    def says(words: str, **choices: Any) -> bool:
        return any(words in note for note in exported(Choices(**choices), model="Qwen/Qwen3-8B").notes)

    (tmp_path / "there.jinja").touch()
    missing = "--chat-template: there is no file /nowhere.jinja here"
    assert says(missing, chat_template="/nowhere.jinja")
    assert not says("--chat-template", chat_template=str(tmp_path / "there.jinja"))
    assert not says("--chat-template", chat_template="{{ messages }}")
    assert says("vLLM 0.33.1 is newer than 0.32.0", version="0.33.1") and not says("is newer", version="0.32.0")


def test_what_is_exported_can_be_imported() -> None:
    engine = {
        "model": QWEN,
        "kv": "fp8",
        "max_model_len": 65536,
        "max_seqs": 16,
        "max_step_tokens": 32768,
        "kv_tokens": 131072,
    }
    engine |= {"spec": "15", "drafter": "z-lab/Qwen3.5-27B-DFlash", "memory_fraction": 0.7, "weights": "fp8"}
    server = {"port": 9000, "sampling_defaults": "openai,temperature=0.5", "drain_seconds": 5.0}
    back = read(shell(exported(server=server, **engine))).values
    parsers = {"reasoning_parser": "think", "tool_parser": "qwen3_xml"}
    assert back == engine | server | parsers
