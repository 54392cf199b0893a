"""What a user reads when the kernels cannot be compiled because a disk is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sparkdraft import LLM
from sparkdraft.core import UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.kernels.native import build
from tests.models.tiny import write_tiny

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo fake 1.0 && exit 0
echo "/tmp/cc1.s: fatal error: error writing to x.o: No space left on device" >&2
exit 1
"""


def test_a_compiler_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match=r"the disk is full.*make room, set SPARKDRAFT_CACHE") as error:
        build.library(tmp_path / "cache")
    assert str(tmp_path / "cache" / "native") in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "cache" / "native").iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_gpu_kernels_that_find_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton writes its cache in the first steps of an engine."""

    def writes(engine: Engine) -> None:
        with open("/dev/full", "w") as file:
            file.write("a kernel")

    monkeypatch.setattr(Engine, "warm_up", writes)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/some/cache")
    with pytest.raises(UserError, match=r"The disk is full.*/some/cache: make room") as error:
        LLM(str(write_tiny(tmp_path, "llama")), device="cpu", dtype="float32")
    cause = error.value.__cause__
    assert isinstance(cause, OSError) and cause.errno == errno.ENOSPC and os.strerror(errno.ENOSPC) in str(cause)
