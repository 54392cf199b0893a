"""Runs the real engine process with faults planted in it: those that the file 'faults' in the model's folder names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sparkdraft.backend import Report
from sparkdraft.server.engine_process import main


def plant(faults: str) -> None:
    if "drafts" in faults:  # they are all accepted
        from sparkdraft.engine import host_steps

        host_steps.committed = lambda drafts, samples: [*drafts, samples[-1]]
    if "grammar" in faults:  # it masks nothing
        from sparkdraft.engine.host_steps import HostSteps

        honest = HostSteps._sample_rows
        unmasked = lambda steps, batch: [row._replace(grammar=None) for row in honest(steps, batch)]  # noqa: E731
        HostSteps._sample_rows = unmasked  # type: ignore[method-assign]


def load(options: dict[str, Any], report: Report) -> Any:
    from sparkdraft.engine.backend import load_backend

    plant((Path(options["model"]) / "faults").read_text())
    return load_backend(options, report)


if __name__ == "__main__":
    main(sys.argv[1:], load)
