"""The settings of one training run, as data: a run's folder keeps them, and a resumed run must agree with them.

Defaults suit a small target on one large GPU. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sparkdraft.core import UserError

MUON_LR = 0.02  # the learning rate of matrices if none is given
NOT_NEGATIVE = ("intermediate", "window", "sinks", "vocab", "warmup", "seed", "lr", "vector_lr")
MAY_CHANGE = ("steps",)  # settings that may change when a run is resumed: it may be made longer


def setting(default: Any, text: str) -> Any:
    """A field with the help text of its flag."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class FitSettings:
    target: str
    data: str
    init: str = setting(
        "", "a drafter to start from, a folder or hub id in z-lab's layout; further --layers are added to it"
    )
    layers: int = setting(3, "layers of the drafter")
    intermediate: int = setting(0, "width of its MLP (0: the target's)")
    block: int = setting(16, "tokens of a draft block, including the anchor: it drafts one less")
    widths: tuple[int, ...] = setting((), "block widths to mix in training, a list (default: the block and half of it)")
    aux_layers: tuple[int, ...] = setting(
        (), "target layers it reads, a list counted from 0 (default: five, spread evenly)"
    )
    window: int = setting(0, "it sees the last N tokens of the context (0: all, or as the drafter of --init)")
    sinks: int = setting(16, "with --window: it also sees this many tokens at the beginning of the context")
    vocab: int = setting(0, "draft only the N most frequent ids of the corpus: a cheaper head (0: all)")
    mask_id: int = setting(-1, "the mask token (-1: one the target never learnt)")
    steps: int = setting(10000, "training steps; a finished run continues when this is raised")
    context: int = setting(16384, "tokens of text per step")
    block_rows: int = setting(49152, "tokens of all draft blocks of a step")
    longest: int = setting(8192, "longest document, in tokens; the rest of a longer one is left out")
    lr: float = setting(0.0, f"learning rate of the matrices (0: {MUON_LR})")
    vector_lr: float = setting(2e-3, "learning rate of the norms")
    warmup: int = setting(100, "steps over which the rates rise")
    flat: float = setting(0.3, "share of the steps before the rates fall")
    alpha: float = setting(0.5, "smoothing of the weights of positions in the loss")
    soft: float = setting(
        0.0, "share of the target's own distribution in the labels of sampled text (0: the text alone)"
    )
    seed: int = setting(0, "seed of order, anchors and first weights")

    def __post_init__(self) -> None:
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
        if len(set(self.aux_layers)) < len(self.aux_layers):
            raise UserError(
                f"--aux-layers names a layer twice ({', '.join(map(str, self.aux_layers))}); name each once"
            )
        for name in ("soft", "alpha", "flat"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be from 0 to 1")

    @property
    def all_widths(self) -> tuple[int, ...]:
        return self.widths or ((self.block, self.block // 2) if self.block >= 4 else (self.block,))

    def rate(self, step: int) -> float:
        """Share of the peak learning rates at a step: rising in the warm-up, flat, then falling linearly to zero."""
        up = (step + 1) / (self.warmup + 1)
        down = (self.steps - step) / max(self.steps * (1 - self.flat), 1)
        return max(0.0, min(1.0, up, down))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"widths": list(self.widths), "aux_layers": list(self.aux_layers)}

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
