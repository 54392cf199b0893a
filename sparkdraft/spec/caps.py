"""What a drafter says of itself before any of its weights are read: all that the plan and the engine must know.

One small record for every kind of drafter. A block drafter (DFlash) fills in all drafts of a step in one pass; a chain
drafter (an MTP head) makes one pass per draft and feeds each id back. What a kind reads from its config.json is its
own matter (spec/dflash_config.py), and the calls that the engine makes are in spec/drafter.py. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.models.layers import AttentionSpec


@dataclass(frozen=True, slots=True)
class DrafterCaps:
    name: str  # as statistics call it: "dflash"
    taps: tuple[int, ...]  # target blocks whose residual it reads, in the order of its input; FINAL (models/config.py)
    # reads what the final norm makes of the last one
    max_depth: int  # ids that it drafts per step at most
    kv: tuple[AttentionSpec, ...]  # layers whose K/V it keeps in the engine's blocks, beside the target's; always exact
    num_weights: int  # numbers in its own matrices
    chain: bool = False
    # A chain drafter begins with the hidden state of the last committed row and the id that follows it. So the engine
    # keeps that state for every request (Anchors.hidden), says which id follows each row (CommittedRows.next_ids), and
    # shows it every row.
