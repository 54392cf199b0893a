"""`train data` that is ended in the middle: what was written stays, and the same command goes on to what was asked."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.operate.bench.prompts import Question
from sparkdraft.train import corpus as corpus_module
from sparkdraft.train import data as data_module
from sparkdraft.train.corpus import Corpus
from sparkdraft.train.data import LEAST_ROUND, OWN_PROMPTS, make_corpus
from sparkdraft.train.prompts import PromptFile, Sieve
from sparkdraft.train.target import Target, load_target
from tests.models.tiny import write_tiny
from tests.patience import PATIENT, wait_for

CHAT = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
GIVEN, OWN = 60, 40
WAITING = """
import signal, sys
from sparkdraft.cli.main import main
from sparkdraft.train import corpus, prompts
corpus.FLUSH_TOKENS, prompts.MESSAGE_TOKENS, add, added = 200, 12, corpus.CorpusWriter.add, []
def add_and_wait(*given):
    added.append(given)
    if len(added) == 40:
        signal.pause()  # for the signal that the test sends
    return add(*given)
corpus.CorpusWriter.add = add_and_wait
sys.exit(main(sys.argv[1:]))
"""
Document = tuple[int, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=1)
    (path / "chat_template.jinja").write_text(CHAT)
    (path / "asked.txt").write_text("".join(f"Name {i} rivers.\n" for i in range(GIVEN)))
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), device="cpu")


@pytest.fixture(autouse=True)
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkdraft.train.prompts.MESSAGE_TOKENS", 12)


def command(folder: Path, out: Path) -> list[str]:
    line = ["train", "data", "--model", str(folder), "--out", str(out), "--device", "cpu", "--max-new", "12"]
    return [*line, "--prompts", str(folder / "asked.txt"), "--synthesise", str(OWN), "--seats", "4"]


def read(out: Path) -> tuple[list[Document], list[Document], list[str]]:
    """Documents, their prompts, their kinds."""
    corpus = Corpus(out)
    whole = [tuple(corpus.ids(i).tolist()) for i in range(len(corpus))]
    prompts = [ids[:n] for ids, n in zip(whole, corpus.num_prompt, strict=True)]
    return whole, prompts, [corpus.info.kinds[k] for k in corpus.kind]


def is_complete(out: Path, before: list[Document]) -> None:
    whole, prompts, kinds = read(out)
    assert whole[: len(before)] == before, "nothing that was there is lost"
    assert len(set(prompts)) == len(prompts), "no prompt is answered twice"
    assert Counter(kinds) == {"given": GIVEN, "self": OWN}


@pytest.mark.parametrize("kind", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT, signal.SIGKILL])
def test_killed_in_the_middle_and_run_again(
    folder: Path, tmp_path: Path, kind: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    out, pipe = tmp_path / "corpus", subprocess.PIPE
    line = [sys.executable, "-c", WAITING, *command(folder, out)]
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True)
    written = lambda: list(out.glob("*.documents.npy")) and len(Corpus(out)) >= 10  # noqa: E731
    wait_for(lambda: process.poll() is not None or written())
    assert process.poll() is None, process.communicate()
    seen = read(out)[0]
    process.send_signal(kind)
    output, errors = process.communicate(timeout=PATIENT)
    kept = read(out)[0]
    assert kept[: len(seen)] == seen and len(kept) < GIVEN + OWN
    if kind != signal.SIGKILL:
        summary = json.loads(output.splitlines()[-1])
        assert process.returncode == 130 and f"stopped: {len(kept)} documents" in errors
        assert summary["all_documents"] == summary["documents"] == len(kept) and summary["stopped"]
        assert summary["left"] == GIVEN + OWN - len(kept)
    assert main(command(folder, out)) == 0
    is_complete(out, kept)
    capsys.readouterr()
    fingerprint = Corpus(out).fingerprint
    assert main(command(folder, out)) == 0
    assert "already has the answers to all of these prompts" in capsys.readouterr().err
    assert Corpus(out).fingerprint == fingerprint


def test_stopped_while_the_target_writes_its_prompts(
    target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, taken = Sieve.take, list[Question | None]()

    def asked_to_stop(self: Sieve, written: object) -> Question | None:
        taken.append(take(self, written))  # type: ignore[arg-type]
        if sum(map(bool, taken)) == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken[-1]

    monkeypatch.setattr(data_module.Sieve, "take", asked_to_stop)
    asked = (target, tmp_path, str(folder / "asked.txt"), OWN, 12)
    summary = make_corpus(*asked, seats=4)
    assert summary["stopped"] and summary["documents"] == 0 and summary["fingerprint"] is None
    monkeypatch.undo()
    monkeypatch.setattr("sparkdraft.train.prompts.MESSAGE_TOKENS", 12)
    first = PromptFile(tmp_path / OWN_PROMPTS).questions
    assert 10 <= len(first) < OWN
    with (tmp_path / OWN_PROMPTS).open("a") as file:
        file.write('{"messages": [{"ro')  # cut off
    summary = make_corpus(*asked, seats=4)
    assert summary["self_written"]["asked"] < OWN - len(first) + 2 * LEAST_ROUND, "what was missing, and few to spare"
    is_complete(tmp_path, [])
    prompts = read(tmp_path)[1]
    assert all(tuple(target.chat_ids(question.messages)) in prompts for question in first)
    assert PromptFile(tmp_path / OWN_PROMPTS).questions[: len(first)] == first


def test_more_is_asked_for_later(target: Target, folder: Path, tmp_path: Path) -> None:
    make_corpus(target, tmp_path, synthesise=5, max_new=12)
    before = read(tmp_path)[0]
    summary = make_corpus(target, tmp_path, str(folder / "asked.txt"), OWN, 12)
    assert (len(before), summary["held"], summary["documents"]) == (5, 5, GIVEN + OWN - 5)
    is_complete(tmp_path, before)
    (tmp_path / OWN_PROMPTS).unlink()  # as in a folder of an older version: the documents themselves count
    summary = make_corpus(target, tmp_path, synthesise=OWN + 2, max_new=12)
    assert (summary["held"], summary["documents"]) == (OWN, 2)


def test_a_target_that_writes_nothing_worth_asking(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdraft.train.prompts.LEAST_TOKENS", 1000)
    with pytest.raises(UserError, match="no prompt is left to ask"):
        make_corpus(target, tmp_path, synthesise=5, max_new=12)


def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus_module, "FLUSH_TOKENS", 200)
    synced = os.fsync

    def full(file: int) -> None:
        if list(tmp_path.glob("*.documents.npy")) and len(Corpus(tmp_path)) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(file)

    monkeypatch.setattr(os, "fsync", full)
    assert main(command(folder, tmp_path)) == 1
    kept = read(tmp_path)[0]
    said = capsys.readouterr().err
    assert 20 < len(kept) < GIVEN + OWN and f"The disk is full: {len(kept)} documents" in said and "the same" in said
    monkeypatch.setattr(os, "fsync", synced)
    assert main(command(folder, tmp_path)) == 0
    is_complete(tmp_path, kept)
