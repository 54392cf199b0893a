"""What a drafter declares before any of its weights are read: all that the plan and the engine must know.

There is one small record for every kind of drafter. A block drafter (DFlash) fills in all drafts of a step in one pass;
a chain drafter (an MTP head) makes one pass per draft and feeds each id back. Each kind reads its own config.json
(drafters/dflash_config.py); the calls that the engine makes are in drafters/drafter.py. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.weights.plane_layout import StoredBytes


@dataclass(frozen=True, slots=True)
class SeenContext:
    """The rows before an anchor that a drafter is shown: the first ones, which its attention rests on where nothing
    else matters, and the last ones. Whole blocks are left out between them, so it sees up to a block more of each."""

    first: int
    last: int

    def kept(self, block_size: int) -> int:
        """Blocks at the beginning."""
        return -(-self.first // block_size)

    def left_out(self, position: int, block_size: int) -> int:
        """Blocks after these that an anchor at this position does not see."""
        return max((position - self.last) // block_size - self.kept(block_size), 0)

    def most(self, block_size: int) -> int:
        """An upper bound on the rows that are seen, the anchor's own among them."""
        return self.kept(block_size) * block_size + self.last + block_size


@dataclass(frozen=True, slots=True)
class DrafterCaps:
    name: str  # its name in statistics: "dflash"
    # Target layers whose residual it reads, in the order of its input; FINAL (models/common/config.py) is the final
    # norm.
    taps: tuple[int, ...]
    max_depth: int  # most ids that it drafts per step
    kv: tuple[AttentionSpec, ...]  # layers whose K/V it keeps in the engine's blocks, beside the target's; always exact
    num_weights: int  # numbers in its own matrices
    chain: bool = False
    # A chain drafter begins with the hidden state of the last committed row and the id that follows it. So the engine
    # keeps that state for every request (Anchors.hidden), tells which id follows each row (CommittedRows.next_ids), and
    # shows it every row.
    own_head: bool = False  # whether the head that it reads is among num_weights, else it is the target's
    # Layers of its own that read keys and values of the target, in the target's format (cache/layered.py).
    borrowed: tuple[AttentionSpec, ...] = ()
    # Positions that these read before the first that the target's next row reads: caches that keep the last positions
    # only must keep so many more.
    reads_back: int = 0
    num_read: int = 0  # of its weights, those that a pass over one row reads; 0: all. A layer with experts reads a few
    sees: SeenContext | None = None  # of the context; None: all of it
    num_in_target: int = 0  # of num_weights, those whose tensors are in the target's own file
    num_ids: int = 0  # that it drafts among; 0: all of the target's
    # Of num_weights, the matrices that drafter_weights quantises: output rows, those of all experts, and width of each.
    matrices: tuple[tuple[int, int], ...] = ()
    stored: StoredBytes | None = None  # what a GPU keeps of num_weights; None: floats

    @property
    def in_target(self) -> bool:
        return self.num_in_target > 0

    def held(self, itemsize: float, on_gpu: bool) -> int:
        """Bytes of num_weights, where floats, or all that a CPU keeps, take that size."""
        return self.stored.kept(itemsize) if self.stored and on_gpu else int(self.num_weights * itemsize)
