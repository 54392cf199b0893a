"""Sums over a model's layers: weights, multiplications, cache and activations. Only this file has such formulas.

Counts are numbers, not bytes: weights, caches and activations have different types.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparkdraft.kernels.ops import input_ring, record_ring
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RecurrentSpec


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Counts for one layer. Norms, biases and other vectors are left out: together they are less than 0.1 %."""

    held: int  # weights of its matrices
    active: int  # weights that one token is multiplied by, so without the experts that are not chosen
    kv: int  # keys and values that one token adds to the cache
    queries: int  # numbers of one token that are multiplied with each key it sees
    projected: int  # numbers that the mixer's projections make of one token
    mixed: int  # numbers of one token that the mixer gives to its last projection
    mlp: int  # numbers of one token in the MLP: what its projections make, and their product
    state: int = 0  # numbers that a request keeps however long it is
    expert: int = 0  # of the weights held, those of one expert
    spec: ExpertsSpec | None = None  # of the experts, where the layer has them

    def read(self, rows: float) -> float:
        """Weights that a step over so many tokens reads: of the experts, those that a token is sent to."""
        return self.held - (self.spec.num_experts - self.spec.reached(rows)) * self.expert if self.spec else self.held


def layer_sizes(spec: LayerSpec, hidden_size: int) -> LayerSizes:
    mixer, mlp = _mixer(spec.mixer, hidden_size), _mlp(spec.mlp, hidden_size)
    return LayerSizes(
        held=mixer.held + mlp.held,
        active=mixer.active + mlp.active,
        kv=mixer.kv,
        queries=mixer.queries,
        projected=mixer.projected,
        mixed=mixer.mixed,
        mlp=mlp.mlp,
        state=mixer.state,
        expert=mlp.expert,
        spec=mlp.spec,
    )


def _mixer(spec: AttentionSpec | RecurrentSpec, hidden: int) -> LayerSizes:
    if isinstance(spec, RecurrentSpec):
        values = spec.num_value_heads * spec.value_dim
        made = spec.conv_channels + values + 2 * spec.num_value_heads  # q, k, v; the gate; decay and step of each head
        weights = hidden * made + values * hidden + spec.conv_channels * spec.conv_width
        state = state_count(spec) + (spec.conv_width - 1) * spec.conv_channels
        return LayerSizes(weights, weights, 0, 0, made + spec.conv_channels, 2 * values, 0, state)
    own = 2 * spec.kv_width if spec.kv_from is None else 0
    made = own // 2 if spec.values == "keys" else own  # values that are made of the keys have no projection
    made += spec.query_width * (2 if spec.gated else 1)
    weights = hidden * (made + spec.query_width)
    return LayerSizes(weights, weights, own, spec.query_width, made, spec.query_width, 0)


def _mlp(spec: DenseSpec | ExpertsSpec, hidden: int) -> LayerSizes:
    if isinstance(spec, ExpertsSpec):
        router, expert = hidden * spec.num_experts, 3 * hidden * spec.intermediate_size
        shared = 3 * hidden * spec.shared_size + (hidden if spec.shared_gate else 0)
        made = 3 * (spec.top_k * spec.intermediate_size + spec.shared_size) + spec.num_experts
        held, active = spec.num_experts * expert + shared + router, spec.top_k * expert + shared + router
        return LayerSizes(held, active, 0, 0, 0, 0, made, expert=expert, spec=spec)
    weights = 3 * hidden * spec.intermediate_size
    return LayerSizes(weights, weights, 0, 0, 0, 0, 3 * spec.intermediate_size)


Matrices = tuple[tuple[int, int], ...]  # output rows, those of all experts, and width of each


def layer_matrices(spec: LayerSpec, hidden: int) -> dict[str, Matrices]:
    """The matrices of a layer by group; weight formats differ by these. Their sum, with a convolution's, is `held`."""
    mixer, mlp = spec.mixer, spec.mlp
    groups: dict[str, Matrices] = {}
    if isinstance(mixer, RecurrentSpec):
        values = mixer.num_value_heads * mixer.value_dim
        made = mixer.conv_channels + values + 2 * mixer.num_value_heads
        groups["recurrent"] = ((made, hidden), (hidden, values))
    else:
        made = layer_sizes(spec, hidden).projected
        groups["attention"] = ((made, hidden), (hidden, mixer.query_width))
    if isinstance(mlp, ExpertsSpec):
        groups["experts"] = _gated(mlp.intermediate_size, hidden, mlp.num_experts)
        groups["mlp"] = _gated(mlp.shared_size, hidden)
        groups["router"] = ((mlp.num_experts + mlp.shared_gate, hidden),)
    else:
        groups["mlp"] = _gated(mlp.intermediate_size, hidden)
    return {group: matrices for group, matrices in groups.items() if all(map(all, matrices))}


def count(matrices: Matrices) -> int:
    return sum(rows * width for rows, width in matrices)


def _gated(inner: int, hidden: int, count: int = 1) -> Matrices:
    """Gate and up as one, and down."""
    return (2 * inner * count, hidden), (hidden * count, inner)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    layers: tuple[LayerSizes, ...]
    hidden: int
    head: int  # weights of the head, which every sampled token is multiplied by
    embedding: int  # weights of an embedding that is not the head

    @property
    def held(self) -> int:
        return sum(layer.held for layer in self.layers) + self.head + self.embedding

    @property
    def active(self) -> int:
        """Weights that one token is multiplied by, including the head."""
        return self.active_in_layers + self.head

    @property
    def active_in_layers(self) -> int:
        return sum(layer.active for layer in self.layers)

    def read(self, rows: float) -> float:
        """Weights that a step over so many tokens reads, the head included, if tokens choose experts independently, as
        those of different requests do."""
        return sum(layer.read(rows) for layer in self.layers) + self.head

    @property
    def kv(self) -> int:
        """Keys and values per token."""
        return sum(layer.kv for layer in self.layers)

    @property
    def projected(self) -> int:
        """The maximum over layers, as in the next two."""
        return max((layer.projected for layer in self.layers), default=0)

    @property
    def mixed(self) -> int:
        return max((layer.mixed for layer in self.layers), default=0)

    @property
    def mlp(self) -> int:
        return max((layer.mlp for layer in self.layers), default=0)

    def operations(self, keys: float) -> float:
        """Multiplications and additions per token in the layers, if the token sees this many keys."""
        return 2.0 * self.active_in_layers + 4 * sum(layer.queries for layer in self.layers) * keys


def model_sizes(model: ModelConfig) -> ModelSizes:
    table = model.vocab_size * model.hidden_size
    layers = tuple(layer_sizes(spec, model.hidden_size) for spec in model.layers)
    return ModelSizes(layers, model.hidden_size, table, 0 if model.tie_embeddings else table)


def kv_bytes_per_token(layers: Iterable[AttentionSpec], itemsize: int) -> int:
    """Bytes per token, over the layers that own keys and values."""
    return sum(_mixer(spec, 0).kv for spec in layers) * itemsize


def state_count(spec: RecurrentSpec) -> int:
    """Numbers of a request's state in one layer."""
    return spec.num_value_heads * spec.key_dim * spec.value_dim


def record_count(spec: RecurrentSpec, most_rows: int) -> int:
    """Numbers of a request's records in one layer: key, update and decay of each head and position."""
    each = spec.num_key_heads * spec.key_dim + spec.num_value_heads * (spec.value_dim + 1)
    return record_ring(most_rows) * each


def input_count(spec: RecurrentSpec, most_rows: int) -> int:
    """Numbers of the tokens that a request's convolution still reads in one layer."""
    return input_ring(most_rows, spec.conv_width) * spec.conv_channels
