"""The drafters that are in the package, by the model they were made for. No torch."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"
EMBEDDED = {"smollm2": "smollm2-dflash"}  # model, as a user names it -> folder in ASSETS


def default_drafter(model_name: str) -> str | None:
    """The folder of the drafter that was made for this model, or None."""
    folder = EMBEDDED.get(model_name)
    if folder is None or not (ASSETS / folder / "config.json").is_file():
        return None
    return str(ASSETS / folder)
