"""What a command said on standard error, without the lines that show progress: those come when a machine is slow."""

from __future__ import annotations

import re

PROGRESS = re.compile(r".+: (\d+ of \d+( \w+)?, )?\d+ s")


def said(errors: str) -> list[str]:
    return [line for line in errors.strip().splitlines() if not PROGRESS.fullmatch(line)]
