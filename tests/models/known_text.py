"""Drafts that are a known text with mistakes, in the place of those that a recorded step would make."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.engine.slots import Slots, StepKind

LONGEST = 200  # ids of a prompt and what is written after it


class KnownText:
    """Every seventh id or so is wrong, at places that differ from step to step, and gaps are of all sizes.

    'known' has a text per lane, the prompt included; what a lane drafts past its text, and without one, is wrong too.
    """

    def __init__(self, slots: Slots, known: list[list[int]], vocab: int) -> None:
        rows = [*known, *[[]] * (slots.plan.max_seqs - len(known))]
        padded = [[*row, *[0] * LONGEST][:LONGEST] for row in rows]
        self.known = torch.tensor(padded, dtype=torch.int32, device=slots.device)
        self.slots, self.vocab, self._draft = slots, vocab, slots._draft

    def __call__(self, kind: StepKind) -> Tensor:
        self._draft(kind)  # the drafter's own are made, and its keys and values written
        length = self.slots.length[: kind.seqs].unsqueeze(1)
        places = length + torch.arange(kind.depth, device=length.device)
        drafts = self.known[: kind.seqs].gather(1, places.clamp(max=LONGEST - 1))
        rng = (places * 1103515245 + 12345) // 65536 % 1000
        self.slots._gaps = [(rng % 17 - 6).float()]
        return torch.where(rng % 7 == 0, (drafts + 1) % self.vocab, drafts).int()
