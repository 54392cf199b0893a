"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """With ~ and ~user replaced. A user whom nobody knows stays as written, so that it is a file that does not exist:
    `Path.expanduser` would raise RuntimeError."""
    return Path(os.path.expanduser(text))
