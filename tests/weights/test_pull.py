"""Fetching repositories from a hub that runs beside the test: whole, interrupted, damaged, unknown, and cached."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hf
import pytest

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.weights import hub
from sparkdraft.weights.hub import cached_snapshot, missing, pull, verify
from tests.fakes.hub import COMMIT, FakeHub
from tests.fakes.web import serving
from tests.patience import PATIENT

REPO = "someone/small"
WEIGHTS = random.Random(0).randbytes(300_000)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": WEIGHTS[:2000],
        "pytorch_model.bin": b"x" * 5000,
        "onnx/model.safetensors": b"y" * 5000,
    }
    web = FakeHub({REPO: files})
    monkeypatch.setattr(hf, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "CHUNK", 1 << 12)
    with serving(web.app()) as url:
        monkeypatch.setattr(hf, "ENDPOINT", url)
        monkeypatch.setattr(hf, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield web


def test_what_is_read_is_fetched_and_found_again_without_a_network(
    web: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_snapshot(REPO) is None
    folder = pull(REPO)
    assert (
        sorted(p.name for p in folder.iterdir()) == sorted(n for n in web.repos[REPO] if n.endswith(("json", "s")))[:4]
    )
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS and folder.name == COMMIT
    assert "pytorch_model.bin" not in web.asked and "onnx/model.safetensors" not in web.asked
    before = web.asked.copy()
    assert pull(REPO) == folder and web.asked == before
    monkeypatch.setattr(hf, "ENDPOINT", "http://127.0.0.1:9")
    assert cached_snapshot(REPO) == folder and verify(folder) == []
    assert not list(folder.parent.parent.glob("blobs/*.*")), "neither locks nor parts are left"


def test_a_broken_connection_is_taken_up_where_it_broke(web: FakeHub) -> None:
    web.break_after = 70_000
    folder = pull(REPO)
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    assert len(web.ranges) >= 4 and web.sent < len(WEIGHTS) + 2000 + 70_000, (web.ranges, web.sent)


def test_an_interrupted_fetch_is_continued_by_the_next(web: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies after 120 kB; the next one asks for the rest alone."""
    written = 0

    def die(response: object, part: Path, mode: str, stop: object) -> None:
        nonlocal written
        with part.open(mode) as file:
            for chunk in response.iter_bytes(1 << 12):  # type: ignore[attr-defined]
                file.write(chunk)
                written += len(chunk)
                if written > 120_000:
                    raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_write", die)
        with pytest.raises(KeyboardInterrupt):
            pull(REPO)
    assert cached_snapshot(REPO) is None
    before = web.sent
    folder = pull(REPO)
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    assert web.ranges and web.sent - before < len(WEIGHTS) - 100_000


def test_who_stops_the_command_waits_for_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One file has failed, the others would take for ever."""
    fetched: list[str] = []

    def fetch(url: str, blob: Path, size: int, stop: threading.Event) -> None:
        if url == "bad":
            raise UserError("it is bad")
        assert stop.wait(PATIENT), "it was not told to stop"
        fetched.append(url)

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "fetch_blob", fetch)
    monkeypatch.setattr(hub, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub._fetch_all([(url, tmp_path / url, 1) for url in ("bad", "slow", "slower", *"abcdefgh")])
    assert len(fetched) < 8


def test_a_hub_that_sends_other_bytes_is_not_believed(web: FakeHub) -> None:
    web.corrupt = True
    with pytest.raises(UserError, match="another content than the hub names"):
        pull(REPO)
    assert cached_snapshot(REPO) is None
    web.corrupt = False
    assert cached_snapshot(REPO) is None and pull(REPO) and cached_snapshot(REPO)


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json"])
def test_a_file_that_was_damaged_on_the_disk_is_named_and_fetched_anew(web: FakeHub, name: str) -> None:
    folder = pull(REPO)
    blob = (folder / name).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=f"{name} of {REPO} is damaged"):
        pull(REPO)
    assert (pull(REPO) / name).read_bytes() == web.repos[REPO][name]


def test_a_snapshot_that_lacks_a_shard_does_not_count(web: FakeHub) -> None:
    folder = pull(REPO)
    (folder / "model-2.safetensors").unlink()
    assert cached_snapshot(REPO) is None and missing(folder) == ["model-2.safetensors"]
    (folder / "model.safetensors.index.json").resolve().write_text("[]")
    assert missing(folder) == ["model.safetensors.index.json"]


def test_a_repository_without_safetensors_is_refused(web: FakeHub) -> None:
    web.repos["someone/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x" * 4000}
    with pytest.raises(UserError, match=r"has no model.safetensors: only safetensors are read"):
        pull("someone/old")


def test_one_file_of_a_repository(web: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    web.repos["someone/ggufs"] = {"a.gguf": WEIGHTS[:9000], "b.gguf": WEIGHTS[:8000], "config.json": b"{}"}
    assert main(["pull", "someone/ggufs:b.gguf"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.read_bytes() == WEIGHTS[:8000] and set(web.asked) == {"b.gguf"}
    assert main(["pull", "someone/ggufs:c.gguf"]) == 1 and "has no file c.gguf" in capsys.readouterr().err
    assert main(["pull", "someone/ggufs:b.gguf", "--with-drafter"]) == 1 and "lacks" in capsys.readouterr().err


def test_unknown_names_and_no_network(web: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="The hub has no model someone/else"):
        pull("someone/else")
    monkeypatch.setattr(hf, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="Fetching someone/small from the hub failed"):
        pull(REPO)


def test_too_little_room_is_said_first(web: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs 0 MB more .* set HF_HOME"):
        pull(REPO)
    assert not web.asked


def test_the_command(web: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["pull", REPO]) == 0
    assert capsys.readouterr().out.strip().endswith(COMMIT)
    assert main(["pull", "no-hub-id"]) == 1 and "is not a hub id" in capsys.readouterr().err
    monkeypatch.setattr(hub, "fetch", lambda name: Path("/somewhere") / name)
    assert main(["pull", "smollm2", "--with-drafter"]) == 0 and "/somewhere/smollm2" in capsys.readouterr().out
