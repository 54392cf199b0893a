"""The contract of a drafter: what its file declares, what the plan asks of its config, what the engine calls.

A drafter is one file of this folder (or of another package, see `register`). The file declares `KIND`, which says which
config.json it reads. Its config answers everything that the plan needs without torch, and builds the drafter.

The engine calls two functions. `observe` writes the drafter's K/V of committed tokens, into the same blocks as the
target's. `propose` drafts the tokens that follow. A token's K/V depend on the committed text up to the next token, so
the prefix cache, preemption and abort need no special cases.

    committed ids         ... | p | p + 1 | anchor |
    hidden states         ... | p | p + 1 |                    the anchor's own is not computed yet
    a draft of depth 3                    | anchor | d1 | d2 | d3 |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from sparkdraft.core import UserError
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec
from sparkdraft.util.discover import found_in
from sparkdraft.weights.plane_layout import StoredBytes

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.cache.formats import KVCache
    from sparkdraft.cache.formats.dense import DenseKV
    from sparkdraft.kernels.ops import Ops
    from sparkdraft.models.common.blocks import Decoder
    from sparkdraft.weights.linear import Linear
    from sparkdraft.weights.loader import Loader

Shapes = dict[str, tuple[int, ...]]  # of tensors, by name


# ---- what a drafter declares


@dataclass(frozen=True, slots=True)
class SeenContext:
    """The part of a long context that a drafter reads: the first tokens (attention sinks) and the last ones, each
    rounded up to whole blocks."""

    first: int
    last: int

    def kept(self, block_size: int) -> int:
        return -(-self.first // block_size)

    def left_out(self, position: int, block_size: int) -> int:
        """Blocks after those that an anchor at this position does not read."""
        return max((position - self.last) // block_size - self.kept(block_size), 0)

    def most(self, block_size: int) -> int:
        """An upper bound on the tokens that are read, including the anchor."""
        return self.kept(block_size) * block_size + self.last + block_size


@dataclass(frozen=True, slots=True)
class DrafterCaps:
    """A drafter's needs, for the plan and the engine, before any of its weights are read."""

    name: str  # its name in statistics: "dflash"
    aux_layers: tuple[int, ...]  # target layers whose residual it reads, in this order; FINAL: the final norm's output
    max_depth: int  # most tokens that it drafts per step
    kv: tuple[AttentionSpec, ...]  # layers whose K/V it keeps in the engine's blocks, beside the target's; always exact
    num_weights: int  # numbers in its own matrices
    # A chain drafter makes one pass per draft. The engine keeps the hidden state of each request's last committed
    # token (Anchors.hidden) for it, passes the id after each token (CommittedRows.next_ids), and skips no token.
    chain: bool = False
    own_head: bool = False  # whether the head that it reads is among num_weights; otherwise it is the target's
    borrowed: tuple[AttentionSpec, ...] = ()  # layers that read the target's keys and values (cache/layered.py)
    reads_back: int = 0  # how much further back they look than the target's next token; windows keep as much more
    num_read: int = 0  # weights that a pass over one token reads, fewer than all with experts; 0: all
    sees: SeenContext | None = None  # the part of the context that it reads; None: all of it
    num_in_target: int = 0  # of num_weights, those whose tensors are in the target's own file
    num_ids: int = 0  # number of ids that it drafts among; 0: all of the target's
    # Of num_weights, the matrices that drafter_weights quantises: output rows (of all experts) and width of each.
    matrices: tuple[tuple[int, int], ...] = ()
    stored: StoredBytes | None = None  # what a GPU keeps of num_weights; None: floats

    @property
    def in_target(self) -> bool:
        return self.num_in_target > 0

    def held(self, itemsize: float, on_gpu: bool) -> int:
        """Bytes of num_weights. itemsize: of a float, or of any weight on a CPU."""
        return self.stored.kept(itemsize) if self.stored and on_gpu else int(self.num_weights * itemsize)


class DraftBuild(NamedTuple):
    """The surroundings of a drafter that is loaded."""

    load: Loader
    ops: Ops
    target: Decoder
    kv: DenseKV  # shaped as the caps say
    context: int  # an upper limit, as is the next
    max_seqs: int
    ids: Tensor | None = None  # int64, ascending: the only ids to be drafted, in place of the file's; None: the file's


class DraftConfig(Protocol):
    """A drafter's config as its file reads it."""

    @property
    def block_size(self) -> int:
        """Most tokens that a step commits: the drafts and one token of the target."""

    @property
    def draft_vocab_size(self) -> int: ...

    def check_fits(self, target: ModelConfig) -> None:
        """Raises UserError if the drafter was not made for a target of this shape."""

    def caps(self, names: Collection[str] = ()) -> DrafterCaps:
        """names: of the tensors in its file, where they are known."""

    def among(self, number: int, names: Collection[str] = ()) -> DraftConfig:
        """The same drafter, drafting among so many ids only. Raises UserError if its head cannot be cut."""

    def tensor_shapes(self) -> Shapes:
        """The tensors of a file that matches this config; benchmarks fill them with random numbers."""

    def build(self, given: DraftBuild) -> Drafter: ...


@dataclass(frozen=True, slots=True)
class InTarget:
    """For a drafter whose tensors may be in the target's own file."""

    label: str  # in messages: "MTP head"
    model_types: tuple[str, ...]  # of targets that may hold it
    holds: Callable[[Collection[str]], bool]  # whether a file with tensors of these names holds it
    read: Callable[[ModelConfig, Collection[str], Path], DraftConfig]  # the names and the path of the file


def _refused(*_: object) -> DraftConfig:
    raise AssertionError("this drafter has no config.json of its own")


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """The KIND that a drafter's file declares."""

    name: str
    recognises: Callable[[Mapping[str, Any]], bool] = lambda config: False  # whether it reads this config.json
    # Reads a config.json. Gets the names of the tensors beside it, () if they are not known, and the folder. Raises
    # UserError.
    read: Callable[[Mapping[str, Any], Collection[str], Path], DraftConfig] = _refused
    asked_last: bool = False  # its `read` refuses by name what no kind recognises
    in_target: InTarget | None = None
    # Named shapes for benchmarks and plans: a config for a target of this shape.
    shapes: Mapping[str, Callable[[ModelConfig], DraftConfig]] = field(default_factory=dict)


REGISTERED: dict[str, DrafterKind] = {}


def register(kind: DrafterKind) -> None:
    """Add a drafter from outside the package. It is asked before the package's own."""
    REGISTERED[kind.name] = kind


def kinds() -> dict[str, DrafterKind]:
    """All drafters by name, in the order in which they are asked whether they recognise a config.json."""
    return REGISTERED | _own_kinds()


@cache
def _own_kinds() -> dict[str, DrafterKind]:
    found = [kind for _, kind in found_in("sparkdraft.drafters", "KIND")]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.asked_last)}


def must_fit(ok: bool, reason: str) -> None:
    """Raises UserError."""
    if not ok:
        raise UserError(
            f"The drafter does not fit the model: {reason}; use the drafter that was trained for this model."
        )


# ---- what the engine calls

# One pass of a drafter. score(False) returns float32 logits [seqs * each, columns], the rows of a sequence together.
# score(True) returns int64 [seqs * each], the column of each row's largest logit, which a kernel may find without
# logits. The engine captures a pass once and replays it, so a pass reads only memory whose address is fixed (the
# anchors', the drafter's own), and passes with the same numbers of sequences and rows make the same launches.
Score = Callable[[bool], "Tensor"]


class Pick(Protocol):
    """Picks ids from a pass, with each request's own parameters and noise."""

    def __call__(self, score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
        """integers [seqs, each]: ids of the target that follow the first 'drafted' ids of each sequence's draft.

        each: rows of logits per sequence. ids: int64 [columns], the id of each column of the logits; None if a column's
        number is its id.
        """


@dataclass(frozen=True, slots=True)
class CommittedRows:
    hidden: Tensor  # [tokens, len(caps.aux_layers), hidden]
    positions: Tensor  # int32 [tokens]
    slots: Tensor  # int32 [tokens]: where each K/V goes; negative: nowhere, the token is padding
    next_ids: Tensor | None = None  # int32 [tokens]: the id that follows each token; for a chain drafter


@dataclass(frozen=True, slots=True)
class Anchors:
    """The last committed id of each sequence, whose own hidden state is not computed yet."""

    ids: Tensor  # int32 [seqs]
    length: Tensor  # int32 [seqs]: ids in the tables' blocks, including the anchor; 0: an empty sequence
    tables: Tensor  # int32 [seqs, max_blocks]
    block_size: int
    max_context: int  # upper bound on 'length' plus the drafts
    positions: Tensor | None = None  # int32 [seqs]: of the anchors, where tables leave out blocks; None: length - 1
    # [seqs, len(caps.aux_layers), hidden]: of the token before the anchor, for a chain drafter
    hidden: Tensor | None = None


class DraftBytes(NamedTuple):
    """The least that one step of a drafter reads, in bytes."""

    propose: int  # of weights
    observe: int
    kv_per_token: int  # of its K/V, per token of context


class Drafter(Protocol):
    caps: DrafterCaps

    def observe(self, rows: CommittedRows) -> None:
        """Write the drafter's K/V of committed tokens. Not called for a drafter without K/V."""

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        """integers [seqs, depth]: the ids expected after each anchor. K/V may be written past the committed tokens
        only, where they are overwritten later."""

    def reach(self, depth: int) -> int:
        """Positions from the anchor on that `propose` writes K/V to; at most 1 + caps.max_depth."""

    def reads(self, depth: int) -> DraftBytes: ...

    @property
    def matrices(self) -> Sequence[Linear]:
        """All that it multiplies with."""


@runtime_checkable
class ReadsTarget(Protocol):
    """A drafter that also reads the target's keys and values (DrafterCaps.borrowed)."""

    def read_from(self, kv: KVCache) -> None:
        """Called once, before the first draft. kv: the target's cache, which is built after the drafter."""
