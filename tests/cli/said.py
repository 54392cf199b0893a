"""What a command said on standard error, without the lines that show progress: those come when a machine is slow; and
commands that run in the test's own process, which spares each of them three seconds of imports."""

from __future__ import annotations

import io
import os
import re
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest

from sparkdraft.cli.main import main

PROGRESS = re.compile(r".+: (\d+ of \d+( \w+)?, )?\d+ s")


def said(errors: str) -> list[str]:
    return [line for line in errors.strip().splitlines() if not PROGRESS.fullmatch(line)]


def in_process(*args: str | bytes, **env: str) -> subprocess.CompletedProcess[bytes]:
    """What the command would say in a process of its own."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            status = main([os.fsdecode(each) for each in args])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    texts = [each.buffer.getvalue() for each in (output, errors) if isinstance(each.buffer, io.BytesIO)]
    return subprocess.CompletedProcess([], status, *texts)
