"""A decoder layer as numbers: a mixer (attention or a recurrence) and an MLP (dense or experts).

Layers of one model may differ in everything. Each architecture's file writes one `LayerSpec` per layer from its
config.json; blocks are built from the specs, caches are shaped by them, and models/common/sizes.py sums over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sparkdraft.kernels.ops import SILU, Activation

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdraft.kernels.ops import AttentionParams, AttentionView, RecurrentState, RopeArgs


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Layers with equal specs share one table (models/common/rope.py)."""

    head_dim: int
    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None  # config.json's rope_scaling, if it asks for a kind other than "default"
    trained_context: int = 0  # max_position_embeddings, which some kinds of scaling start from
    rotary_dim: int = 0  # only so many of a head's first numbers are rotated; 0: all

    @property
    def width(self) -> int:
        """The width of the table, over which frequencies are spread."""
        return self.rotary_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float  # of a query's products with the keys
    window: int = 0  # keys that a token sees, itself included; 0: all
    causal: bool = True  # False: tokens of one step see each other in both directions, as in a DFlash block
    qk_norm: bool = False  # an RMS norm per head of q and of k, before rope
    bias: bool = False  # of the projections to queries, keys and values
    output_bias: bool = False  # of the projection after attention
    kv_from: int | None = None  # the layer whose keys and values it reads; None: its own
    values: str = "given"  # how values are made: kernels/ops.py, RopeArgs
    sinks: bool = False  # a learnt logit per head that takes part in the softmax and has no value
    gated: bool = False  # the result is multiplied by the sigmoid of a gate as wide as the queries, projected with them

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def geometry(self) -> tuple[int, int, int]:
        """Layers that agree in it can share a pool of blocks."""
        return self.num_kv_heads, self.head_dim, self.window


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A gated delta rule: one state of key_dim x value_dim per value head, and no keys and values per token."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # per head
    value_dim: int
    conv_width: int  # tokens that the causal convolution before it reads, the token itself included

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """down(activation(gate(x), up(x)))."""

    intermediate_size: int
    activation: Activation = SILU
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A router picks 'top_k' of 'num_experts' gated MLPs for each token, and all tokens pass through the shared one."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of each expert
    shared_size: int = 0  # of the expert that every token passes through; 0: there is none
    shared_gate: bool = False  # its result is multiplied by the sigmoid of a number that each token makes
    activation: Activation = SILU
    bias: bool = False  # of the router and of all experts
    renormalise: bool = True  # the weights of a token's chosen experts sum to 1; False: each is its share among all

    def reached(self, rows: float) -> float:
        """The mean number of experts that so many tokens reach, if each chooses independently."""
        missed: float = (1 - self.top_k / self.num_experts) ** rows
        return self.num_experts * (1 - missed)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: AttentionSpec | RecurrentSpec
    mlp: DenseSpec | ExpertsSpec


# ---- a layer's part of the cache: formats, pages and slots are in cache/


class LayerKV(Protocol):
    """The keys and values of one attention layer. Layers of one model may have different formats."""

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        """Rotate the queries of qkv [tokens, projected heads * head_dim] in place, and store its keys and values.

        slots: int32 [tokens]; a token with a negative slot is not stored. Afterwards only the queries are defined.
        """

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        """q [tokens, heads, head_dim] -> [tokens, heads * head_dim]."""


class LayerState(Protocol):
    """The states of one recurrent layer, for all requests."""

    @property
    def memory(self) -> RecurrentState: ...

    @property
    def slots(self) -> Tensor:
        """int32 [sequences]: the slot of each sequence of the running step."""
