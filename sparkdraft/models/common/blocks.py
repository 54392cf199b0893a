"""The blocks decoders are built of: attention over the paged cache, a gated MLP, and the stack that joins them.

All run on one ragged batch of tokens (prompt chunks, decode tokens and drafts alike) and share one `Step`. The residual
stream is one tensor that blocks add to in place; its values after chosen blocks can be stored (`aux_hidden`), which is
all that models know of drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkdraft.kernels.ops import AttentionParams, AttentionView, Norm, Normed, Ops, RopeArgs
from sparkdraft.models.common.config import FINAL, ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerKV, LayerState, RecurrentSpec
from sparkdraft.models.common.rope import RopeTables
from sparkdraft.weights.linear import ExpertLinear, Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.stored import Stored

HEADS = ("lm_head", "language_model.lm_head")  # the second in older files that see as well


@dataclass(frozen=True, slots=True)
class Step:
    """A batch's tokens: the same for every layer."""

    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    slots: Tensor  # int32 [tokens], where each token's K/V goes; negative: nowhere
    view: AttentionView
    kv: Sequence[LayerKV | LayerState]  # by layer, each of the kind that its mixer uses
    live: Tensor | None = None  # int32 [1]: tokens from here on are padding, and no expert is read for them; None: none


class Attention:
    """x += o(attention over the paged cache); q and k are normed per head where the spec says so, and rotated."""

    def __init__(
        self,
        spec: AttentionSpec | RecurrentSpec,
        config: ModelConfig,
        load: Loader,
        name: str,
        ops: Ops,
        ropes: RopeTables,
    ) -> None:
        assert isinstance(spec, AttentionSpec), f"{name} is {spec}"
        self.spec, self.ops, self.eps, self.rope = spec, ops, config.rms_eps, ropes.of(spec.rope)
        sinks = load.vector(f"{name}.sinks", spec.num_heads, torch.float32) if spec.sinks else None
        self.params = AttentionParams(spec.scale, spec.causal, spec.window, sinks)
        parts = {"q": spec.query_width, "k": spec.kv_width, "v": spec.kv_width}
        if spec.values == "keys":
            del parts["v"]
        if spec.kv_from is not None:
            parts = {"q": spec.query_width}
        self.num_kv_heads = spec.num_kv_heads if "k" in parts else 0  # of its own projection
        self.width = sum(parts.values())  # of what the cache is handed
        rows = {f"{name}.{p}_proj": n for p, n in parts.items()}
        if spec.gated:
            self.qkv = load_gated_qkv(spec, load, name, config.hidden_size)
        else:
            self.qkv = load.linear(rows, config.hidden_size, spec.bias, fused=f"{name}.qkv_proj")
        self.o = load.linear({f"{name}.o_proj": config.hidden_size}, spec.query_width, spec.output_bias)
        norms = [p for p in "qk" if p in parts] if spec.qk_norm else []
        gains = {p: load_gain(load, f"{name}.{p}_norm", spec.head_dim, config.norm_plus_one) for p in norms}
        self.q_norm, self.k_norm = gains.get("q"), gains.get("k")

    @property
    def matrices(self) -> list[Linear]:
        return [self.qkv, self.o]

    def rope_args(self, positions: Tensor, num_heads: int) -> RopeArgs:
        q_norm = self.q_norm if num_heads else None
        values = self.spec.values
        return RopeArgs(positions, self.rope, num_heads, self.num_kv_heads, q_norm, self.k_norm, self.eps, values)

    def result(self, normed: Normed, step: Step, kv: LayerKV) -> tuple[Tensor, Linear]:
        """Attention's result, and the matrix that leads it back to the stream."""
        made = self.ops.norm_linear(normed, self.qkv)
        qkv = made[:, : self.width]
        kv.write(qkv, self.rope_args(step.positions, self.spec.num_heads), step.slots)
        q = qkv.view(qkv.shape[0], -1, self.spec.head_dim)[:, : self.spec.num_heads]
        seen = kv.attend(q, step.view, self.params)
        if self.spec.gated:
            self.ops.sigmoid_gate(seen, made[:, self.width :])
        return seen, self.o

    def add_to(self, normed: Normed, step: Step, kv: LayerKV, then: Norm) -> Normed:
        """x += attention(norm(x)), in place; 'then' is the norm that reads it next, as in all blocks."""
        return self.ops.add_linear(normed.x, *self.result(normed, step, kv), then)


class GatedMLP:
    """x += down(activation(gate(norm(x)), up(norm(x))))."""

    def __init__(self, spec: DenseSpec | ExpertsSpec, config: ModelConfig, load: Loader, name: str, ops: Ops) -> None:
        assert isinstance(spec, DenseSpec), f"{name} is {spec}"
        self.ops, self.activation = ops, spec.activation
        rows = {f"{name}.{part}": spec.intermediate_size for part in ("gate_proj", "up_proj")}
        self.gate_up = load.linear(rows, config.hidden_size, spec.bias, fused=f"{name}.gate_up_proj")
        self.down = load.linear({f"{name}.down_proj": config.hidden_size}, spec.intermediate_size, spec.bias)

    @property
    def matrices(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def result(self, normed: Normed) -> tuple[Tensor, Linear]:
        """The gated tokens, and the matrix that leads them back to the stream."""
        return self.ops.norm_gated(normed, self.gate_up, self.activation), self.down

    def add_to(self, normed: Normed, step: Step, then: Norm) -> Normed:
        return self.ops.add_linear(normed.x, *self.result(normed), then)


class Mixer(Protocol):
    """Lets tokens see each other: attention, which is handed a LayerKV, or a recurrence, with a LayerState."""

    @property
    def matrices(self) -> list[Linear]: ...

    def add_to(self, normed: Normed, step: Step, kv: Any, then: Norm) -> Normed: ...


class MLP(Protocol):
    """Treats each token by itself: dense, or experts."""

    @property
    def matrices(self) -> Sequence[Linear | ExpertLinear]: ...

    def add_to(self, normed: Normed, step: Step, then: Norm) -> Normed: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    input_norm: Norm
    mixer: Mixer
    post_norm: Norm
    mlp: MLP

    @property
    def matrices(self) -> list[Linear | ExpertLinear]:
        return [*self.mixer.matrices, *self.mlp.matrices]

    def add_to(self, normed: Normed, step: Step, kv: Any, then: Norm) -> Normed:
        return self.mlp.add_to(self.mixer.add_to(normed, step, kv, self.post_norm), step, then)


class Layer(Protocol):
    """One layer of a decoder; another order of norms and sums is another class."""

    @property
    def input_norm(self) -> Norm: ...

    @property
    def matrices(self) -> Sequence[Linear | ExpertLinear]: ...

    def add_to(self, normed: Normed, step: Step, kv: Any, then: Norm) -> Normed: ...


class Decoder:
    """Embedding, layers, final norm, head."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        embedding: Stored,
        head: Linear,
        norm: Norm,
        context: int,  # positions that its rope tables have
        ops: Ops,
        dtype: torch.dtype,  # of the residual stream
    ) -> None:
        self.config, self.layers, self.context, self.ops, self.dtype = config, layers, context, ops, dtype
        self.embedding, self.head, self.norm = embedding, head, norm

    @property
    def matrices(self) -> list[Linear | ExpertLinear]:
        """All that a pass multiplies with, in order."""
        return [*(matrix for layer in self.layers for matrix in layer.matrices), self.head]

    def nbytes(self, rows: float) -> float:
        """Bytes of weights that one pass over so many tokens reads, without the embedding: of a layer's experts those
        that the tokens reach."""
        total: float = self.head.nbytes
        for spec, layer in zip(self.config.layers, self.layers, strict=True):
            share = spec.mlp.reached(rows) / spec.mlp.num_experts if isinstance(spec.mlp, ExpertsSpec) else 1
            total += sum(m.nbytes * share if isinstance(m, ExpertLinear) else m.nbytes for m in layer.matrices)
        return total

    def forward(self, step: Step, aux_layers: Sequence[int] = (), aux_hidden: Tensor | None = None) -> Tensor:
        """Run every token through the layers: the last residual [tokens, hidden], before the final norm.

        The residual after block aux_layers[i] goes to aux_hidden[:, i] (aux_hidden [tokens, len(aux_layers), hidden],
        or each token's ring of such, by position); of FINAL, the final norm of the last residual.
        """
        normed = Normed(self.embed(step.token_ids), self.layers[0].input_norm)
        for i, (layer, then) in enumerate(following(self.layers, self.norm)):
            normed = layer.add_to(normed, step, step.kv[i], then)
            if aux_hidden is not None and i in aux_layers:
                self.ops.store_aux(normed.x, aux_hidden, aux_layers.index(i), step.positions)
        if aux_hidden is not None and FINAL in aux_layers:
            final = self.ops.rms_norm(normed.x, *self.norm)
            self.ops.store_aux(final, aux_hidden, aux_layers.index(FINAL), step.positions)
        return normed.x  # the prepared norm is dropped: a token's logits must not depend on the tokens beside it

    def embed(self, ids: Tensor) -> Tensor:  # int32 [tokens] -> [tokens, hidden]
        return self.ops.embed(ids, self.embedding, self.config.embedding_scale)

    def logits(self, residual: Tensor) -> Tensor:  # [tokens, hidden] -> float32 [tokens, vocab]
        return self.ops.norm_logits(Normed(residual, self.norm), self.head, self.config.softcap)

    def scores(self, residual: Tensor) -> Tensor:
        """The logits in the weights' own type, which takes half the memory."""
        out = self.ops.norm_linear(Normed(residual, self.norm), self.head)
        return torch.tanh(out / self.config.softcap) * self.config.softcap if self.config.softcap else out

    def likeliest(self, residual: Tensor) -> Tensor:  # [tokens, hidden] -> int64 [tokens], the logits' argmax
        return self.ops.norm_argmax(Normed(residual, self.norm), self.head, self.config.softcap)


def load_gated_qkv(spec: AttentionSpec, load: Loader, name: str, hidden: int) -> Linear:
    """Queries, keys, values, gates. Files have the gate of each head right after its query, in one matrix."""
    assert not spec.bias and spec.kv_from is None and spec.values == "given", spec
    each = torch.arange(2 * spec.query_width).view(spec.num_heads, 2, spec.head_dim)
    queries, gates = (each[:, i].flatten() for i in range(2))
    q, k, v = (f"{name}.{part}_proj" for part in "qkv")
    keys, both = spec.kv_width, 2 * spec.query_width
    return load.picked_linear([(q, both, queries), (k, keys, None), (v, keys, None), (q, both, gates)], hidden)


def load_norm(config: ModelConfig, load: Loader, name: str) -> Norm:
    return Norm(load_gain(load, name, config.hidden_size, config.norm_plus_one), config.rms_eps)


def load_gain(load: Loader, name: str, size: int, plus_one: bool) -> Tensor:
    """plus_one: the file holds the gain less 1, which is too near 0 for a sum of 16 bits: it is kept in float32."""
    return load.vector(f"{name}.weight", size, torch.float32) + 1 if plus_one else load.vector(f"{name}.weight", size)


def load_head(config: ModelConfig, load: Loader, embedding: Stored) -> Linear:
    name = next((name for name in HEADS if load.has(f"{name}.weight")), HEADS[0])
    if config.tie_embeddings:
        return load.tied_head(embedding, name)
    return load.linear({name: config.vocab_size}, config.hidden_size, as_stored=True)


def following(layers: Sequence[Layer], last: Norm) -> Iterator[tuple[Layer, Norm]]:
    """Each layer with the norm that reads its result."""
    return zip(layers, [*(layer.input_norm for layer in layers[1:]), last], strict=True)
