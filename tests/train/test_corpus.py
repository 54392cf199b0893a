"""A corpus on disk: what was written is what is read, and nothing that was cut off is ever taken for a shard."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from sparkdraft.core import UserError
from sparkdraft.train import corpus as corpus_module
from sparkdraft.train.corpus import INFO, Corpus, CorpusInfo, CorpusWriter, Finish

SMALL = CorpusInfo("tiny", 320, ("code", "self"))


def documents(count: int, seed: int = 0, vocab: int = 320) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(2, 30)).tolist() for _ in range(count)]


def write(folder: Path, docs: list[list[int]], info: CorpusInfo = SMALL, shard_tokens: int = 100) -> None:
    with CorpusWriter(folder, info, shard_tokens) as writer:
        for i, ids in enumerate(docs):
            kind = info.kinds[i % len(info.kinds)]
            writer.add(ids, 1 + i % (len(ids) - 1), kind, Finish(i % 3), (i % 2) * 0.7)


def test_a_second_writer_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    """Both would write the same shard."""
    with CorpusWriter(tmp_path, SMALL) as first:
        with pytest.raises(UserError, match="Another process is writing to the corpus"):
            CorpusWriter(tmp_path, SMALL)
        first.add([1, 2], 1, "code", Finish.END, 0.0)
    write(tmp_path, documents(3))
    assert len(Corpus(tmp_path)) == 4


@pytest.mark.parametrize("vocab", [320, 1 << 16, (1 << 16) + 1, 151_936])
def test_round_trip(tmp_path: Path, vocab: int) -> None:
    docs = [*documents(40, vocab=vocab), [vocab - 1, 0]]
    write(tmp_path / "made" / "here", docs, CorpusInfo("tiny", vocab, ("code", "self")))
    corpus = Corpus(tmp_path / "made" / "here")
    assert len(corpus) == len(docs) and len(list(corpus.folder.glob("*.tokens"))) > 3
    assert [corpus.ids(i).tolist() for i in range(len(docs))] == docs
    assert corpus.length.tolist() == [len(ids) for ids in docs]
    assert corpus.num_prompt.tolist() == [1 + i % (len(ids) - 1) for i, ids in enumerate(docs)]
    assert corpus.kind.tolist() == [i % 2 for i in range(len(docs))]
    assert corpus.finish.tolist() == [i % 3 for i in range(len(docs))]
    assert corpus.temperature == pytest.approx([(i % 2) * 0.7 for i in range(len(docs))])
    assert corpus.info == CorpusInfo("tiny", vocab, ("code", "self"))
    assert corpus.ids(0).dtype.itemsize == (2 if vocab <= 1 << 16 else 4)
    for outside in (-1, len(docs)):
        with pytest.raises(IndexError):
            corpus.ids(outside)


def test_more_is_appended_and_new_kinds_follow_the_old(tmp_path: Path) -> None:
    first, second = documents(9), documents(9, seed=1)
    write(tmp_path, first)
    before = Corpus(tmp_path)
    write(tmp_path, second, CorpusInfo("tiny", 320, ("prose", "self")))
    after = Corpus(tmp_path)
    assert [after.ids(i).tolist() for i in range(18)] == first + second
    assert after.info.kinds == ("code", "self", "prose")
    assert [after.info.kinds[k] for k in after.kind[9:11]] == ["prose", "self"]
    assert before.fingerprint != after.fingerprint == Corpus(tmp_path).fingerprint


def test_another_target_is_refused(tmp_path: Path) -> None:
    write(tmp_path, documents(3))
    for other in (CorpusInfo("large", 320, ()), CorpusInfo("tiny", 321, ())):
        with pytest.raises(UserError, match="was written by tiny"):
            CorpusWriter(tmp_path, other)


def test_a_shard_without_its_table_does_not_count_and_is_written_over(tmp_path: Path) -> None:
    docs = documents(6)
    write(tmp_path, docs)
    complete = len(list(tmp_path.glob("*.tokens")))
    (tmp_path / f"{complete:05}.tokens").write_bytes(b"torn")
    (tmp_path / f"{complete:05}.documents.npy.partial").write_bytes(b"torn")
    assert len(Corpus(tmp_path)) == 6
    write(tmp_path, docs)
    assert [Corpus(tmp_path).ids(i).tolist() for i in range(12)] == docs + docs


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no corpus folder"):
        Corpus(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no corpus\.json"):
        Corpus(tmp_path)
    with CorpusWriter(tmp_path, SMALL):
        pass
    with pytest.raises(UserError, match="no complete shard"):
        Corpus(tmp_path)
    write(tmp_path, documents(4))
    tokens = tmp_path / "00000.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=f"has {len(whole) - 2} bytes, its documents need {len(whole)}"):
        Corpus(tmp_path)
    tokens.unlink()
    with pytest.raises(UserError, match="has 0 bytes"):
        Corpus(tmp_path)
    tokens.write_bytes(whole)
    (tmp_path / "00000.documents.npy").write_bytes(b"no table")
    with pytest.raises(UserError, match="cannot be read"):
        Corpus(tmp_path)


def test_info_of_another_version_and_damaged_info(tmp_path: Path) -> None:
    write(tmp_path, documents(4))
    stored = json.loads((tmp_path / INFO).read_text())
    (tmp_path / INFO).write_text(json.dumps(stored | {"version": 99}))
    with pytest.raises(UserError, match="of version 99"):
        Corpus(tmp_path)
    (tmp_path / INFO).write_text("[]")
    with pytest.raises(UserError, match="cannot be read"):
        Corpus(tmp_path)


def test_a_full_disk_keeps_the_complete_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs, synced = documents(30), os.fsync

    def full(file: int) -> None:
        if len(list(tmp_path.glob("*.documents.npy"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"disk is full: \d+ documents of .* are kept; make room, and run the same"):
        write(tmp_path, docs)
    kept = Corpus(tmp_path)
    assert len(list(tmp_path.glob("*.documents.npy"))) == 2
    assert 0 < len(kept) < 30 and [kept.ids(i).tolist() for i in range(len(kept))] == docs[: len(kept)]
    assert not list(tmp_path.glob("*.partial"))
    monkeypatch.undo()
    write(tmp_path, docs[len(kept) :])
    assert [Corpus(tmp_path).ids(i).tolist() for i in range(30)] == docs


@pytest.mark.parametrize("limit", ["FLUSH_TOKENS", "FLUSH_SECONDS"])
def test_documents_reach_the_disk_while_the_shard_still_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(corpus_module, limit, 0)
    docs = documents(20)
    with CorpusWriter(tmp_path, SMALL, 200) as writer:
        for i, ids in enumerate(docs):
            writer.add(ids, 1, "code", Finish.END, 0.0)
            assert len(Corpus(tmp_path)) == writer.num_documents == i + 1
    kept = Corpus(tmp_path)
    assert [kept.ids(i).tolist() for i in range(20)] == docs
    assert 1 < len(list(tmp_path.glob("*.tokens"))) < 5, "no shard a flush"


def test_a_disk_that_fills_in_the_middle_of_a_shard_keeps_what_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "FLUSH_TOKENS", 50)
    docs, synced, calls = documents(40), os.fsync, list[int]()

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"The disk is full: (\d+) documents") as refused:
        write(tmp_path, docs, shard_tokens=1 << 20)
    kept = Corpus(tmp_path)
    assert f"{len(kept)} documents" in str(refused.value) and 0 < len(kept) < 40
    assert [kept.ids(i).tolist() for i in range(len(kept))] == docs[: len(kept)]
    monkeypatch.undo()
    fingerprint = kept.fingerprint
    os.truncate(tmp_path / "00000.tokens", kept.ids(0).itemsize * int(kept.length.sum()))
    assert Corpus(tmp_path).fingerprint == fingerprint, "what the table does not name is as if it had never been"
    write(tmp_path, docs[len(kept) :])
    assert [Corpus(tmp_path).ids(i).tolist() for i in range(40)] == docs
