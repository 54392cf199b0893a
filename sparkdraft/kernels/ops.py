"""The interface between models and kernels: every operator that a backend offers, and the records that operators take.

A backend is a module: `reference` (plain torch, the definition), `native` (C++ for CPUs) or `cuda` (Triton).
`sparkdraft.kernels.load` imports one as an `Ops`, and mypy checks each module against it. README.md says which file
implements which operator. This file imports no torch, so that plans can use its records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from sparkdraft.weights.keeping import KeepsWeights

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.kernels.turboquant.store import CodedLayer
    from sparkdraft.weights.linear import ExpertLinear, Linear, WeightTiles
    from sparkdraft.weights.quant.stored import Stored


# Dense layers


CLAMPED_SLOPE = 1.702  # of the sigmoid in "clamped_swiglu"


class Activation(NamedTuple):
    """The activation of a gated MLP, by 'kind':

    silu             silu(gate) * up
    gelu_tanh        gelu(gate) * up, by its tanh approximation
    clamped_swiglu   (up + 1) * gate * sigmoid(1.702 * gate), gate at most 'limit', up within +-'limit' (gpt-oss)
    """

    kind: str = "silu"
    limit: float = 0.0


SILU = Activation("silu")
GELU_TANH = Activation("gelu_tanh")


class Norm(NamedTuple):
    """An RMS norm: y = x / rms(x) * gain."""

    gain: Tensor  # [dim]
    eps: float


class Normed(NamedTuple):
    """The residual stream and the norm that its next reader applies.

    The op that writes the residual may precompute the next RMSNorm's statistics. The op that reads uses them, or
    computes the norm itself, unless it is here already, because several read it.
    """

    x: Tensor  # [rows, dim]
    norm: Norm
    scaled: Tensor | None = None  # x * gain, rounded once to the tensor's type
    squares: Tensor | None = None  # float32 [rows, parts]: parts of the sum of x * x
    whole: Tensor | None = None  # [rows, dim]: the norm

    def applied(self, rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:  # [rows, dim]
        return rms_norm(self.x, *self.norm) if self.whole is None else self.whole


class Routing(NamedTuple):
    """The experts of each row, the likeliest first; of equal ones the lower number comes first.

    Padding rows have no experts: their ids are -1, and their results are undefined.
    """

    ids: Tensor  # int32 [rows, top_k]
    weights: Tensor  # float32 [rows, top_k]


# Attention. Sequence s owns rows query_start[s] .. query_start[s+1] of a ragged batch. Its last row sees context_len[s]
# keys, so row i of its n rows stands at position context_len[s] - n + i. A prompt chunk, a single decode row and a
# drafted block differ only in n.


@dataclass(frozen=True, slots=True)
class AttentionView:
    """How a ragged batch lies over the paged cache; the same for all layers of a step."""

    query_start: Tensor  # int32 [seqs + 1], first row of each sequence
    context_len: Tensor  # int32 [seqs], keys in the cache once this step's rows are written
    block_tables: Tensor  # int32 [seqs, max_blocks], physical block of each 'block_size' positions
    max_query: int  # upper bound on rows per sequence: a host number that shapes the launch, never read per row
    max_context: int  # upper bound on context_len, likewise


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends; the same in all steps. A new way to attend is a field here, and no signature changes."""

    scale: float  # of a query's products with the keys
    causal: bool = True  # False: rows of one sequence see each other in both directions
    window: int = 0  # a row sees keys nearer than this; 0: all
    sinks: Tensor | None = None  # float32 [heads]: one more logit in each head's softmax, with no value; not scaled


class RopeArgs(NamedTuple):
    """How one layer makes queries, keys and values from the output of its projection."""

    positions: Tensor  # int32 [rows]
    table: Tensor  # float32 [max_position, rotary_dim]: cosines, then sines; allows partial rotary embedding
    num_heads: int
    num_kv_heads: int
    q_norm: Tensor | None  # [head_dim]: gain of an RMS norm of each head, before it is rotated
    k_norm: Tensor | None
    eps: float
    # "given": values are as projected. "normed": each head is divided by its RMS. "keys": values are the projected
    # keys, each head divided by its RMS, and the projection has no values.
    values: str = "given"

    @property
    def projected_heads(self) -> int:
        return self.num_heads + self.num_kv_heads * (1 if self.values == "keys" else 2)


# Recurrent layers (reference/recurrent.py explains how their state follows the text)


FOLD = 16  # positions: a state advances by multiples of this, or to the end of a prompt's chunk


def record_ring(most_rows: int) -> int:
    """Size of the ring of records: those that a step may replay, and those that it writes.

    Heads share the ring of keys, so none may overwrite what another has yet to replay. `base` lags by up to FOLD - 1
    rows and the rows of one step.
    """
    return FOLD - 1 + 2 * most_rows


def input_ring(most_rows: int, conv_width: int) -> int:
    """Positions from `base` to this step's last row, and those before `base` that a copy of the state must have."""
    return FOLD - 1 + most_rows + conv_width - 1


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """One layer's state, a slot per request."""

    state: Tensor  # float32 [slots, value_heads, key_dim, value_dim]
    base: Tensor  # int32 [slots, value_heads]: equal for all heads between steps; per head, so that none waits
    keys: Tensor  # float32 [slots, ring, key_heads, key_dim]
    updates: Tensor  # float32 [slots, ring, value_heads, value_dim]: u
    decays: Tensor  # float32 [slots, ring, value_heads]
    inputs: Tensor  # [slots, input_ring, channels]: rows as the convolution reads them
    most_rows: int  # per sequence in a step whose rows may be rejected

    @property
    def ring(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class DeltaParams:
    """How one layer's rows change its state."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    rate: Tensor  # float32 [value_heads]: -exp(A_log); decay = exp(rate * softplus(a + bias))
    bias: Tensor  # float32 [value_heads]: dt_bias
    eps: float = 1e-6  # under the root of the norm of q and k


# Decode steps that the device prepares by itself (reference/stepping.py)


WIDEST = 8.0  # gaps are compared from -8 to 8; NaN counts as the least sure
MOST_SURE = 0.999  # upper bound on a draft's estimated chance of acceptance


LEVELS = 64  # in which chances of drafts are compared: those between k / 64 and (k + 1) / 64 are alike


class DraftTerms(NamedTuple):
    """The fitted confidence of drafts and the cost of verifying them, from speculation/budget.py; all float32."""

    fits: Tensor  # [2, 2 + deepest]: slope, base and offsets by position, for greedy and for sampled text
    fair: Tensor  # [seqs]: multiplies a sequence's chances; negative: all its drafts are verified
    worth: Tensor  # [drafts of all sequences + 1]: cost of verifying so many drafts of the others, in tokens


class PackedRows(NamedTuple):
    """The rows of a step of all sequences, then padding."""

    ids: Tensor  # int32 [room], as are the next three
    positions: Tensor
    slots: Tensor  # -1: padding, or past the last block
    seq_of: Tensor  # the sequence of each row, also of padding
    context_len: Tensor  # int32 [seqs]: keys that a sequence's last row sees
    query_start: Tensor  # int32 [seqs + 1]
    places: Tensor  # int32 [seqs, width]: the row of each column of each sequence; from 'room' on there is none


IN_PROMPT = 1 << 30  # stands in EditedSlots.counts beside how often an id was written


MOST_MATCH = 32  # ids of a match in a request's own text; a longer one counts as this long


class Ends(NamedTuple):
    """Prompts that end in a step, which sample the first id of their slot."""

    slot: Tensor  # int64 [ends]
    row: Tensor  # int64 [ends]: the row of the last token of each
    positions: Tensor  # int32 [tokens]: of all tokens of prompts


class SampledRows(NamedTuple):
    """What each row that samples reads; int32 [rows] each."""

    slots: Tensor  # whose parameters it samples with; -1: padding
    positions: Tensor  # of the sampled id
    edited: Tensor  # the slot in the tables of edits; negative: the row stays as it is
    ids: Tensor  # the token of each row
    ahead: Tensor  # drafts before the sampled id


class Draws(NamedTuple):
    """How rows are sampled: each with the parameters of a slot."""

    slots: Tensor  # int32 [rows]; negative: the row takes its largest
    positions: Tensor  # int32 [rows]: of the sampled id
    floats: Tensor  # float32 [3, slots]: temperature (0: greedy), min_p, top_p
    integers: Tensor  # int64 [2, slots]: top_k (0: off), seed


class EditedSlots(NamedTuple):
    """What requests ask of their logits, a row of each table per request slot."""

    counts: Tensor  # int32 [slots, columns]: how often each id was written, and IN_PROMPT
    penalties: Tensor  # float32 [slots, 3]: repetition (1: off), presence and frequency
    biased: Tensor  # int32 [slots, most]: different ids, and negative numbers behind them
    bias: Tensor  # float32 [slots, most]: what is added to the logit
    until: Tensor  # int32 [slots, most]: below this position the id is excluded instead


class LogitEdits(NamedTuple):
    """How the logits of a step's rows are edited before anything is drawn."""

    slots: Tensor  # int32 [rows]: the slot of each row's request; negative: the row stays as it is
    positions: Tensor  # int32 [rows]: of the sampled id
    ids: Tensor  # int32 [rows]: the token of each row
    ahead: Tensor  # int32 [rows]: drafts before the sampled id: the tokens of this many rows, up to this one
    tables: EditedSlots


# What a model uses, to report which of it has tuned tiles


class ExpertShapes(NamedTuple):
    gate_up: ExpertLinear
    down: ExpertLinear
    top_k: int


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """Matrices and dimensions that a model uses."""

    matrices: Sequence[WeightTiles]
    experts: Sequence[ExpertShapes]
    head_dims: frozenset[int]  # of attention to exact keys and values
    coded_dims: frozenset[int]  # of attention to a TurboQuant cache
    recurrent: frozenset[tuple[int, int, int]]  # value heads, key and value dimensions
    itemsize: int  # bytes of an activation
    most_rows: int  # per step


def all_tiles(matrices: Iterable[Linear]) -> list[WeightTiles]:
    """The tiles of matrices, and of the parts of stacked ones."""
    found: list[WeightTiles] = []
    for matrix in matrices:
        found += [matrix.tiles] if matrix.tiles else all_tiles(matrix.parts)
    return found


# The operators


class CannotCapture(Exception):
    """A step calls an operator that a captured step would miss; the message is its name."""


class CapturedStep(Protocol):
    """A function's kernel launches, captured once and replayed by one call: a CUDA graph, or a compiled list of calls.

    Inputs must live at fixed addresses, and lengths must be read on the device.
    """

    RUN_FIRST: ClassVar[bool]  # whether 'run' must have run before it is captured, so that its kernels are loaded
    output: Any  # what 'run' returned: tensors that a replay fills anew
    nbytes: int  # that it holds alone, which are free again when it is dropped

    def __init__(self, run: Callable[[], Any], beside: CapturedStep | None = None) -> None:
        """Captures run(), which computes nothing yet. Raises CannotCapture, and torch.OutOfMemoryError.

        beside: an earlier step of the same owner, whose memory this one shares: only one replays at a time.
        """

    def replay(self) -> Any:
        """Runs the step on what its inputs hold now; returns `output`, filled anew."""


class Compiler(Protocol):
    """GPU kernels are compiled for their arguments when they are first launched; this does it ahead, on all cores."""

    compiled_late: list[str]  # why kernels could not be compiled ahead; [] if they could

    def compile_ahead(self, steps: Iterable[Callable[[], object]]) -> None:
        """Compiles the kernels that these functions will launch."""


class Ops(KeepsWeights, Protocol):
    """What every backend offers. "Rows" are the tokens of a step's ragged batch, and hidden is the model's width.

    Operators that take a `Normed` apply its norm first. Those that return one have changed the residual in place.
    """

    NAME: str

    # Offered by some backends only; None elsewhere.
    @property
    def Graph(self) -> type[CapturedStep] | None: ...  # cuda, native

    @property
    def compiler(self) -> Compiler | None: ...  # cuda

    # Embeddings, norms and elementwise

    def embed(self, ids: Tensor, table: Stored, scale: float = 1.0) -> Tensor:  # int32 [rows] -> [rows, hidden]
        """Rows of the table by id, times 'scale'."""

    def store_aux(self, residual: Tensor, aux: Tensor, index: int, positions: Tensor) -> None:
        """aux[:, index] = residual [rows, hidden]: the aux hidden states of one layer, for a drafter.

        aux: [rows, layers, hidden], or [rows, ring, layers, hidden] where each row has a ring, by position modulo size.
        """

    def concat(self, left: Tensor, right: Tensor) -> Tensor:  # [rows, a] and [rows, b] -> [rows, a + b]
        """Rows side by side."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, dim] -> [rows, dim]
        """An RMS norm with a gain."""

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> None:  # [rows, width] twice, or one gate per row: [rows, 1]
        """x *= sigmoid(gate), in place, in float32 until it is written. Both may be columns of wider tensors."""

    def add_normed(self, residual: Tensor, y: Tensor, norm: Norm, then: Norm, scale: float = 1.0) -> Normed:
        """residual [rows, hidden] = (residual + norm(y)) * scale, in place; 'then' is the next norm."""

    # Matrix products

    def linear(self, x: Tensor, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
        """x W^T."""

    def norm_linear(self, normed: Normed, matrix: Linear) -> Tensor:  # [rows, in] -> [rows, out]
        """norm(x) W^T."""

    def norm_gated(
        self, normed: Normed, gate_up: Linear, activation: Activation
    ) -> Tensor:  # [rows, in] -> [rows, inter]
        """A gated MLP up to its down projection; gate_up is [2 * inter, in]."""

    def add_linear(self, residual: Tensor, x: Tensor, matrix: Linear, then: Norm) -> Normed:
        """residual [rows, out] += x W^T, in place; 'then' is the next norm."""

    def norm_logits(self, normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # float32 [rows, vocabulary]
        """softcap: no logit is larger than this, by a tanh that keeps their order; 0: none."""

    def norm_argmax(self, normed: Normed, head: Linear, softcap: float = 0.0) -> Tensor:  # int64 [rows]
        """The column of the largest logit; the lowest wins a tie. A softcap makes ties by rounding."""

    # Experts

    def norm_route(
        self,
        normed: Normed,
        router: Linear,
        top_k: int,
        renormalise: bool,
        scale: Tensor | None = None,
        live: Tensor | None = None,
    ) -> Routing:
        """Chooses the 'top_k' experts with the largest logits, computed in float32.

        renormalise: weights are shares among the chosen, else among all. scale: float32 [experts], multiplies an
        expert's weight after that. live: int32 [1], rows before the padding; None: all.
        """

    def norm_experts(
        self,
        normed: Normed,  # [rows, hidden]
        routing: Routing,
        gate_up: ExpertLinear,  # [2 * inter, hidden] each
        down: ExpertLinear,  # [hidden, inter] each
        activation: Activation,
    ) -> Tensor:  # [rows, hidden]
        """The weighted sum of the chosen experts' results, in float32 and in the order of the row's own choice."""

    def add_experts(
        self,
        normed: Normed,
        routing: Routing,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: Activation,
        then: Norm,
    ) -> Normed:
        """x += `norm_experts`, in place; 'then' is the next norm."""

    # Attention

    def rope_write(
        self,
        qkv: Tensor,  # [rows, projected heads * head_dim]; only its queries are defined afterwards
        args: RopeArgs,
        k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim], changed in place
        v_cache: Tensor,
        slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot is not written
    ) -> None:
        """Norms and rotates queries and keys, and writes keys and values to the cache."""

    def rope_queries(
        self,
        q: Tensor,  # [rows, heads * head_dim], changed in place
        args: RopeArgs,  # with 0 key and value heads
    ) -> None:
        """Norms and rotates the queries of a layer that reads the keys and values of another."""

    def paged_attention(
        self,
        q: Tensor,  # [rows, heads, head_dim], a strided view of qkv
        k_cache: Tensor,  # [blocks, kv_heads, block_size, head_dim]
        v_cache: Tensor,
        view: AttentionView,
        params: AttentionParams,
        same_bits_up_to: int = 0,
    ) -> Tensor:  # [rows, heads * head_dim]
        """same_bits_up_to: batches of up to this many rows per sequence give a row the same bits."""

    def find_pages(
        self,
        page_of: Tensor,  # int32 [blocks]; -1: the block has none
        slots: Tensor,  # int32 [rows]: block * block_size + offset, or negative
        tables: Tensor,  # int32 [seqs, max_blocks]
        block_size: int,
        page_slots: Tensor,  # int32 [rows], written: the same places in pages, -1 where there is none
        page_tables: Tensor,  # int32 [seqs, max_blocks], written
        missing: int,  # stands in the tables for a block without a page, whose rows are masked if they are read
    ) -> None:
        """Translates slots and tables of blocks to the pages of a sliding window."""

    # Attention to a TurboQuant cache (kernels/turboquant)

    def tq_rope_write(
        self,
        layer: CodedLayer,  # changed in place
        qkv: Tensor,  # [rows, projected heads * head_dim]; only its queries are defined afterwards
        args: RopeArgs,
        slots: Tensor,  # int32 [rows]: block * block_size + offset; a negative slot is not written
    ) -> None:
        """`rope_write` for a coded layer, which also rotates the queries into its basis."""

    def tq_attention(
        self,
        layer: CodedLayer,
        q: Tensor,  # [rows, heads, dim], a strided view of qkv, as tq_rope_write leaves it
        view: AttentionView,
        params: AttentionParams,
        same_bits_up_to: int = 0,  # as in paged_attention
    ) -> Tensor:  # [rows, heads * dim]
        """Causal attention: a row reads the first and the most recent keys from pages, all others from their codes."""

    # Recurrent layers

    def find_states(
        self,
        slot_of: Tensor,  # int32 [blocks]: the state slot of the request that writes to the block; -1: none
        view: AttentionView,
        block_size: int,
        out: Tensor,  # int32 [seqs], written: each sequence's slot, -1 where it has no rows
    ) -> None:
        """The state slot of each sequence, by the block of its first row: only one request writes there."""

    def causal_conv(
        self,
        x: Tensor,  # [rows, channels]
        weight: Tensor,  # float32 [channels, width]: the last column meets the row itself
        memory: RecurrentState,  # its inputs are changed in place
        slots: Tensor,  # int32 [seqs], from find_states
        view: AttentionView,
    ) -> Tensor:  # [rows, channels]
        """silu of a causal convolution of each channel."""

    def delta_rule(
        self,
        qkv: Tensor,  # [rows, channels]: queries and keys of all key heads, values of all value heads
        decay_beta: Tensor,  # [rows, 2 * value_heads]: a, then b
        memory: RecurrentState,  # changed in place
        slots: Tensor,  # int32 [seqs]
        view: AttentionView,
        params: DeltaParams,
    ) -> Tensor:  # [rows, value_heads * value_dim]
        """The gated delta rule: replays records, updates the state and records the step's rows."""

    def gated_norm(
        self, o: Tensor, gate: Tensor, gain: Tensor, eps: float
    ) -> Tensor:  # [rows, heads * dim], gate alike
        """rms_norm of each head, times silu(gate), both in float32; gain: [dim]."""

    # Samples and decode steps that the device prepares by itself

    def edit_logits(self, logits: Tensor, edits: LogitEdits) -> None:  # float32 [rows, columns], in place
        """Applies penalties, which count the drafts before a row too, then biases and excluded ids."""

    def forbid_bits(
        self,
        logits: Tensor,  # float32 [rows, columns], changed in place
        masks: Tensor,  # uint8 [masks, bytes]: column i is bit i % 8 of byte i // 8
        which: Tensor,  # int32 [rows]: the mask of each row; negative: the row stays as it is
    ) -> None:
        """Sets -inf where the bit of a row's mask is 0."""

    def sample(
        self,
        logits: Tensor,  # float32 [rows, columns]
        draws: Draws | None,  # None: all rows are greedy
        ids: Tensor | None = None,  # int64 [columns]: the id of each column; None: its number
    ) -> Tensor:  # int64 [rows]
        """The column each row takes: its largest, or the one it draws from what its filters leave."""

    def sample_sure(
        self, logits: Tensor, draws: Draws | None, ids: Tensor | None, widest: float
    ) -> tuple[Tensor, Tensor]:  # int64 [rows], float32 [rows]
        """`sample`, and how far what a row takes stands above the rest, up to 'widest'.

        A greedy row's gap is its largest logit less the logsumexp of the others that come within 'widest' of it: the
        logit of its probability. A drawn row's gap is that between its two best scores: logits over temperature plus
        noise.
        """

    def admit_drafts(
        self,
        gaps: Tensor,  # float32 [seqs, depth]: how sure the drafter is of each draft
        most: Tensor,  # int32 [seqs]: drafts of a sequence that may be verified
        temperature: Tensor,  # float32 [seqs]; 0: greedy text
        terms: DraftTerms,
    ) -> Tensor:  # int32 [seqs]
        """Return how many drafts of each sequence are verified: of all sequences together, the likeliest to survive, as
        many as are worth their cost."""

    def make_rows(
        self,
        length: Tensor,  # int32 [seqs]: committed ids of each sequence; 0 where it is empty
        tables: Tensor,  # int32 [seqs, max_blocks]
        token: Tensor,  # int32 [seqs]: the last committed id
        width: int,
        block_size: int,
        fill: int,
        first: Tensor | None = None,  # int32 [seqs]: the position of 'token'; None: length - 1
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # int32 [seqs * width] three times, int32 [seqs]
        """Ids, positions, slots and context lengths of a drafter's rows, 'width' per sequence, from its last id on."""

    def pack_rows(
        self,
        length: Tensor,  # int32 [seqs]: committed ids of each sequence; 0 where it is empty
        tables: Tensor,  # int32 [seqs, max_blocks]
        token: Tensor,  # int32 [seqs]: the last committed id
        drafts: Tensor | None,  # integers [seqs, depth]; None: depth 0
        kept: Tensor,  # int32 [seqs]: drafts of a sequence that are verified, at most 'depth'
        block_size: int,
        stamp: Tensor,  # int64 [1], written: the time in nanoseconds
        room: int | None = None,  # rows of the step, which must hold all drafts that are kept; None: seqs * (depth + 1)
    ) -> PackedRows:
        """The target's rows of all sequences without the drafts that were cut, then padding."""

    def accept_drafts(
        self,
        drafts: Tensor | None,  # integers [seqs, depth]; None: depth 0
        samples: Tensor,  # integers [room]: the target's sample in each row
        kept: Tensor,  # int32 [seqs]: as in `pack_rows`
        length: Tensor,  # int32 [seqs], changed in place, as are the next two
        token: Tensor,
        observed: Tensor,  # positions that the drafter has seen
        rows: PackedRows,
        stamp: Tensor,  # int64 [1], from `pack_rows`
        accepted: Tensor | None = None,  # integers [seqs]: accepted drafts, where the samples do not decide
    ) -> tuple[Tensor, Tensor]:  # int32 [seqs, depth + 4], int32 [room]
        """Accepts drafts that equal the samples and advances the sequences.

        Returns per sequence the samples (0 where a column has no row), the numbers of accepted and of verified drafts,
        and nanoseconds since the stamp; per row the slot, if the row is now committed, else -1.
        """

    def sampled_rows(
        self,
        rows: PackedRows | None,  # of the slots; None: none decodes
        ends: Ends | None,  # None: no prompt ends
        length: Tensor,  # int32 [slots]: committed ids of each slot
        edit_slots: Tensor,  # int32 [slots]: the slot of each in the tables of edits; negative: none
    ) -> SampledRows:
        """What the rows that sample read: prompts that end, then the rows of the slots."""

    def count_ids(
        self,
        counts: Tensor,  # int32 [edit slots, columns], changed in place
        edit_slots: Tensor,  # int32 [seqs]; negative: nothing is counted
        samples: Tensor,  # integers [seqs, width]
        accepted: Tensor | None = None,  # integers [seqs]: accepted drafts; None: none
    ) -> None:
        """Counts what a step has committed: of each sequence its accepted drafts and the sample behind them."""

    # Drafts from a request's own text

    def match_text(
        self,
        ids: Tensor,  # int32 [seqs, room]: the known ids of each sequence
        length: Tensor,  # int32 [seqs]: how many; 0 where it is empty, and above 'room' all of the row count
        min_match: int,  # 1 to MOST_MATCH
        drafts: Tensor,  # integers [seqs, depth], written where there is a match
    ) -> Tensor:  # int32 [seqs]
        """Drafts what followed the text's last ids where they occurred before.

        Returns the length of the match, up to MOST_MATCH; 0 where fewer than 'min_match' ids match.
        """

    def append_text(
        self,
        ids: Tensor,  # int32 [seqs, room], changed in place
        length: Tensor,  # int32 [seqs]: ids of each sequence before these; 0 where it is empty, which it stays
        samples: Tensor,  # integers [seqs, width]
        count: Tensor,  # integers [seqs]: samples of a sequence that are written, its first ones
    ) -> None:
        """Writes committed ids behind those that are known; what is past 'room' is dropped."""
