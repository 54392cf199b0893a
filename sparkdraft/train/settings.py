"""The settings of one training run, as data: a run's folder keeps them, and a resumed run must agree with them.

Defaults suit a small target on one large GPU. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparkdraft.core import UserError

OPTIMIZERS = {"muon": 0.02, "adamw": 1.5e-3}  # the learning rate of matrices if none is given
WEIGHTS = ("dpace", "decay")
NOT_NEGATIVE = ("intermediate", "window", "sinks", "vocab", "warmup", "seed", "lr", "vector_lr")
MAY_CHANGE = ("steps",)  # settings that may change when a run is resumed: it may be made longer


@dataclass(frozen=True, slots=True)
class FitSettings:
    target: str
    data: str
    init: str = ""  # a drafter to start from, with more layers if more are asked for; empty: from nothing
    layers: int = 3
    intermediate: int = 0  # width of the drafter's MLP; 0: the target's
    block: int = 16  # rows of the drafter's block, including the anchor
    widths: tuple[int, ...] = ()  # blocks are trained in these widths, mixed; empty: the block and half of it
    taps: tuple[int, ...] = ()  # target layers it reads; empty: five, spread evenly
    window: int = 0  # rows of the context that it is shown, the last so many; 0: all, or as the drafter to start from
    sinks: int = 16  # with a window: rows at the beginning of the context that it is shown too
    vocab: int = 0  # the number of ids that can be drafted, the most common in the corpus; 0: all
    mask_id: int = -1  # the mask's id; -1: an id the target never learnt
    steps: int = 10000
    context: int = 16384  # tokens of text per step
    block_rows: int = 49152  # rows of all blocks of a step
    longest: int = 8192  # tokens per document at most
    optimizer: str = "muon"
    lr: float = 0.0  # of matrices; 0: the optimizer's default
    vector_lr: float = 2e-3  # of norms
    warmup: int = 100  # steps
    flat: float = 0.3  # share of the steps before the rate begins to fall, to zero at the end
    weights: str = "dpace"  # of positions in the loss: dpace, or decay
    decay: float = 7.0
    alpha: float = 0.5
    soft: float = 0.0  # share of the target's own distribution in the labels of sampled text
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"--optimizer is {self.optimizer}; it must be one of {', '.join(OPTIMIZERS)}")
        if self.weights not in WEIGHTS:
            raise UserError(f"--weights is {self.weights}; it must be one of {', '.join(WEIGHTS)}")
        if not 2 <= self.block <= 64:
            raise UserError(f"--block is {self.block}; it must be 2 to 64 rows, including the anchor")
        for least, names in ((1, ("layers", "steps", "context", "longest")), (0, NOT_NEGATIVE)):
            for name in names:
                if getattr(self, name) < least:
                    flag = "--" + name.replace("_", "-")
                    raise UserError(f"{flag} is {getattr(self, name)}; it must be at least {least}")
        if any(not 2 <= w <= self.block for w in self.widths):
            raise UserError(f"--widths are {self.widths}; each must be 2 to {self.block}, the block")
        if self.block_rows < max(self.all_widths):
            raise UserError(f"--block-rows is {self.block_rows}; one block alone has {max(self.all_widths)} rows")
        if len(set(self.taps)) < len(self.taps):
            raise UserError(f"--taps names a layer twice ({', '.join(map(str, self.taps))}); name each once")
        for name in ("soft", "alpha", "flat"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be from 0 to 1")
        if self.decay <= 0:
            raise UserError(f"--decay is {self.decay}; it must be above 0")

    @property
    def all_widths(self) -> tuple[int, ...]:
        return self.widths or ((self.block, self.block // 2) if self.block >= 4 else (self.block,))

    @property
    def matrix_lr(self) -> float:
        return self.lr or OPTIMIZERS[self.optimizer]

    def rate(self, step: int) -> float:
        """Share of the peak learning rates at a step: rising in the warm-up, flat, then falling linearly to zero."""
        up = (step + 1) / (self.warmup + 1)
        down = (self.steps - step) / max(self.steps * (1 - self.flat), 1)
        return max(0.0, min(1.0, up, down))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"widths": list(self.widths), "taps": list(self.taps)}

    @staticmethod
    def read(values: Mapping[str, Any]) -> FitSettings:
        stored = {f.name: values[f.name] for f in fields(FitSettings) if f.name in values}
        known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}
        return FitSettings(**known)

    def difference(self, other: FitSettings) -> str | None:
        """The first setting in which two runs differ and may not, in words."""
        for name in (f.name for f in fields(FitSettings) if f.name not in MAY_CHANGE):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs} there and {mine} here"
        return None
