"""The command as people type it: what it prints, and one clear sentence with a non-zero status for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.weights.hub import cached_path
from tests.cli.said import in_process, said
from tests.patience import PATIENT


def sparkdraft(*args: str | bytes, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    command: list[str | bytes] = [sys.executable, "-m", "sparkdraft.cli.main", *args]
    return subprocess.run(command, input=stdin, capture_output=True, env={**os.environ, **env}, timeout=PATIENT)


def refused(result: subprocess.CompletedProcess[bytes], words: str) -> None:
    errors = result.stderr.decode()
    assert result.returncode != 0, errors
    assert "Traceback" not in errors
    assert words in errors, errors
    assert len(said(errors)) == 1, errors
    assert result.stdout == b""


def test_generate_streams_and_ends_in_json(tiny: Path) -> None:
    result = sparkdraft(
        "generate", "--model", str(tiny), "--prompt", "hello", "--max-tokens", "9", "--json", "--ignore-eos"
    )
    assert result.returncode == 0, result.stderr.decode()
    lines = result.stdout.decode(errors="replace").splitlines()
    report = json.loads(lines[-1])
    assert report["num_prompt"] == 5 and report["num_output"] == 9
    assert report["tok_s"] > 0 and report["start_ms"] > report["ttft_ms"] > 0 and report["peak_rss_mb"] > 50
    assert report["finish_reason"] == "length"
    assert {fact["name"] for fact in report["facts"]} >= {"decode steps", "overlapped steps"}
    assert report["fallbacks"] == [] and b"decode steps" not in result.stderr


def test_verbose_says_what_was_settled_and_how_it_runs(tiny: Path) -> None:
    args = ("generate", "--model", str(tiny), "--prompt", "hello", "--max-tokens", "2", "--verbose")
    errors = in_process(*args).stderr.decode()
    assert "KV cache 8192 tokens" in errors and "overlapped steps: off (" in errors


def test_a_prompt_from_standard_input(tiny: Path) -> None:
    args = ("generate", "--model", str(tiny), "--prompt-file", "-", "--max-tokens", "2", "--json")
    assert json.loads(sparkdraft(*args, stdin=b"abc").stdout.splitlines()[-1])["num_prompt"] == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "missing.gguf"], "missing.gguf"),
        (["--dtype", "int3"], "dtype is 'int3'"),
        (["--dtype", "bfloat16", "--device", "cpu"], "bfloat16 needs a GPU"),
        (["--kv-tokens", "10"], "kv_tokens is 10, and a request needs room for 64 tokens"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", b"caf\xe9"], "not valid UTF-8"),
        (["--prompt", "a" * 600], "600 tokens and the context holds 512"),
    ],
)
def test_bad_input(args: list[str | bytes], words: str, tiny: Path, tmp_path: Path) -> None:
    given = ["--model", str(tiny), "--prompt", "hello", "--dtype", "float32", *args]
    refused(in_process("generate", *given, SPARKDRAFT_CACHE=str(tmp_path)), words)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()], "nothing half-written"


def test_a_truncated_gguf(tmp_path: Path, smollm2_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with smollm2_path.open("rb") as whole:
        broken.write_bytes(whole.read(5_000_000))
    refused(in_process("generate", "--model", str(broken), "--prompt", "x"), "broken.gguf")


def test_a_missing_prompt_file_and_a_file_of_bytes(tmp_path: Path) -> None:
    refused(in_process("generate", "--prompt-file", str(tmp_path / "none.txt")), "none.txt cannot be read")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    refused(in_process("generate", "--prompt-file", str(tmp_path / "bytes")), "not valid UTF-8 at byte 0")


@pytest.mark.slow
def test_chat_answers_and_keeps_its_history(smollm2_path: Path) -> None:
    talk = b"My name is Ada. Say hello.\n/clear\n/quit\n"
    result = sparkdraft("chat", "--max-tokens", "8", "--temperature", "0", stdin=talk)
    assert result.returncode == 0, result.stderr.decode()
    assert len(result.stdout.decode().split()) >= 3


def test_models_lists_what_is_known_and_cached(smollm2_path: Path) -> None:
    result = in_process("models", COLUMNS="40")
    assert result.returncode == 0 and f"cached at {cached_path('smollm2')}\n" in result.stdout.decode(), "in one piece"


def test_bench_offline_ends_in_json(tiny: Path) -> None:
    args = ("--model", str(tiny), "--batch", "1,3", "--prompt-len", "16", "--output-len", "12")
    result = in_process("bench", "offline", *args)
    assert result.returncode == 0, result.stderr.decode()
    report = json.loads(result.stdout.splitlines()[-1])
    assert [row["streams"] for row in report["rows"]] == [1, 3]
    assert all(row["share"] > 0 and row["decode_tok_s"] > 0 for row in report["rows"])


def test_bench_refuses_nonsense() -> None:
    refused(in_process("bench", "offline", "--concurrency", "1,x"), "--concurrency is '1,x'")
    refused(in_process("bench", "offline", "--shape", "gpt-9"), "shape 'gpt-9' is not known")


def test_every_verb_has_help_with_examples() -> None:
    for verb in ("generate", "chat", "models", "bench"):
        text = in_process(verb, "--help").stdout.decode()
        assert "examples:" in text and f"sparkdraft {verb}" in text
