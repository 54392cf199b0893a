"""Which drafter goes with which model when the user names none, and how a named one is opened.

A drafter is a checkpoint like any other, without a tokenizer: a folder or a hub id. The one for the embedded model
travels inside the package; whether a drafter fits its target is asked of spec/config.py.
"""

from __future__ import annotations

from pathlib import Path

from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import Checkpoint, open_checkpoint

ASSETS = Path(__file__).parent.parent / "assets"
EMBEDDED = {"smollm2": "smollm2-dflash"}  # model, as a user names it -> folder of ASSETS


def default_drafter(model_name: str) -> str | None:
    """The folder of the drafter that was made for this model, if we have one."""
    folder = EMBEDDED.get(model_name)
    if folder is None or not (ASSETS / folder / "config.json").is_file():
        return None
    return str(ASSETS / folder)


def open_drafter(name: str) -> Checkpoint:
    """A folder, a hub id, or the name of a drafter inside the package. Raises UserError."""
    if name in EMBEDDED.values() and not Path(name).is_dir():
        return open_checkpoint(str(ASSETS / name))
    if name.endswith(".gguf"):
        raise UserError(f"The drafter {name} is a GGUF file, which is not built yet: pass a folder with safetensors.")
    return open_checkpoint(name)
