"""How the engine process is started: its command and its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

COMMAND = (sys.executable, "-P", "-m", "sparkdraft.server.engine_process")  # -P: import nothing from the current folder


def environment() -> dict[str, str]:
    """The child's environment: with -P it must still find this package where it runs from a checkout that is not
    installed."""
    root = Path(__file__).parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return dict(os.environ)
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(root)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
