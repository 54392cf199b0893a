"""The process of an engine with random weights, for `sparkdraft serve --shape`: without a download it shows how fast a
server of a model of that size is. The text is noise.
"""

from __future__ import annotations

import sys
from typing import Any

from sparkdraft.backend import Backend, Report
from sparkdraft.server.engine_process import main

COMMAND = (sys.executable, "-P", "-m", "sparkdraft.cli.random_engine")
DRAFTER = "drafter_shape"  # an option beside those of EngineConfig


def load_random(options: dict[str, Any], report: Report) -> Backend:
    """Draw the weights of the shape that is named as the model, and of its drafter if one is named."""
    from sparkdraft.config import EngineConfig
    from sparkdraft.engine.backend import prepare
    from sparkdraft.operate.bench.random_model import drafter_shape, open_random, shape

    drafter = options.pop(DRAFTER, "")
    config = EngineConfig.of(**options)
    draft = drafter_shape(drafter, shape(config.model)) if drafter else None
    return prepare(open_random(config, draft), report)


if __name__ == "__main__":
    main(load=load_random)
