"""The blocks decoders are built of: attention over the paged cache, a gated MLP, and the stack that joins them.

All run on one ragged batch of rows (prompt chunks, decode rows and drafts alike) and share one `Step` that says where
the rows stand. The residual stream is one tensor that blocks add to in place; what it holds after chosen blocks can be
recorded (`taps`), which is all that models know of drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from torch import Tensor

from sparkdraft.cache.formats import LayerKV, RopeArgs
from sparkdraft.kernels.norm import Norm, Normed
from sparkdraft.kernels.view import AttentionParams, AttentionView
from sparkdraft.models.config import FINAL, ModelConfig
from sparkdraft.models.layers import AttentionSpec, DenseSpec, ExpertsSpec, RecurrentSpec
from sparkdraft.models.rope import RopeTables
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.group import GroupQuant


@dataclass(frozen=True, slots=True)
class Step:
    """Where a batch's rows stand: the same for every layer."""

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]
    slots: Tensor  # int32 [rows], where each row's K/V goes; negative: nowhere
    view: AttentionView
    kv: Sequence[LayerKV]  # by layer


class Attention:
    """x += o(attention over the paged cache); q and k are normed per head where the spec says so, and rotated."""

    def __init__(
        self,
        spec: AttentionSpec | RecurrentSpec,
        config: ModelConfig,
        load: Loader,
        name: str,
        ops: ModuleType,
        ropes: RopeTables,
    ) -> None:
        assert isinstance(spec, AttentionSpec), f"{name} is {spec}"
        self.spec, self.ops, self.eps, self.rope = spec, ops, config.rms_eps, ropes.of(spec.rope)
        self.params = AttentionParams(spec.scale, spec.causal, spec.window)
        rows = {f"{name}.q_proj": spec.query_width}
        if spec.kv_from is None:
            rows |= {f"{name}.k_proj": spec.kv_width, f"{name}.v_proj": spec.kv_width}
        self.num_kv_heads = spec.num_kv_heads if spec.kv_from is None else 0  # of its own projection
        self.qkv = load.linear(rows, config.hidden_size, spec.bias)
        self.o = load.linear({f"{name}.o_proj": config.hidden_size}, spec.query_width, spec.bias)
        self.q_norm = load.vector(f"{name}.q_norm.weight", spec.head_dim) if spec.qk_norm else None
        has_k_norm = spec.qk_norm and spec.kv_from is None
        self.k_norm = load.vector(f"{name}.k_norm.weight", spec.head_dim) if has_k_norm else None

    @property
    def matrices(self) -> list[Linear]:
        return [self.qkv, self.o]

    def add_to(self, normed: Normed, step: Step, kv: LayerKV, then: Norm) -> Normed:
        """x += attention(norm(x)), in place; 'then' is the norm that reads it next, as in all blocks."""
        qkv = self.ops.norm_linear(normed, self.qkv)
        heads = (self.spec.num_heads, self.num_kv_heads)
        kv.write(qkv, RopeArgs(step.positions, self.rope, *heads, self.q_norm, self.k_norm, self.eps), step.slots)
        q = qkv.view(qkv.shape[0], -1, self.spec.head_dim)[:, : self.spec.num_heads]
        seen = kv.attend(q, step.view, self.params)
        added: Normed = self.ops.add_linear(normed.x, seen, self.o, then)
        return added


class GatedMLP:
    """x += down(silu(gate(x)) * up(x))."""

    def __init__(
        self, spec: DenseSpec | ExpertsSpec, config: ModelConfig, load: Loader, name: str, ops: ModuleType
    ) -> None:
        assert isinstance(spec, DenseSpec) and spec.activation == "silu", f"{name} is {spec}"
        self.ops = ops
        rows = {f"{name}.{part}": spec.intermediate_size for part in ("gate_proj", "up_proj")}
        self.gate_up = load.linear(rows, config.hidden_size, spec.bias)
        self.down = load.linear({f"{name}.down_proj": config.hidden_size}, spec.intermediate_size, spec.bias)

    @property
    def matrices(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def add_to(self, normed: Normed, then: Norm) -> Normed:
        added: Normed = self.ops.add_linear(normed.x, self.ops.norm_gated(normed, self.gate_up), self.down, then)
        return added


class Mixer(Protocol):
    """What lets rows see each other: attention, or a recurrence."""

    @property
    def matrices(self) -> list[Linear]: ...

    def add_to(self, normed: Normed, step: Step, kv: LayerKV, then: Norm) -> Normed: ...


class MLP(Protocol):
    """What treats each row by itself: dense, or experts."""

    @property
    def matrices(self) -> list[Linear]: ...

    def add_to(self, normed: Normed, then: Norm) -> Normed: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    input_norm: Norm
    mixer: Mixer
    post_norm: Norm
    mlp: MLP

    @property
    def matrices(self) -> list[Linear]:
        return [*self.mixer.matrices, *self.mlp.matrices]

    def add_to(self, normed: Normed, step: Step, kv: LayerKV, then: Norm) -> Normed:
        return self.mlp.add_to(self.mixer.add_to(normed, step, kv, self.post_norm), then)


class Decoder:
    """Embedding, layers, final norm, head. An architecture differs in what its layers are."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        embedding: Tensor | GroupQuant,
        head: Linear,
        norm: Norm,
        context: int,  # positions that its rope tables have
        ops: ModuleType,
    ) -> None:
        self.config, self.layers, self.context, self.ops = config, layers, context, ops
        self.embedding, self.head, self.norm = embedding, head, norm

    @property
    def matrices(self) -> list[Linear]:
        """All that a pass multiplies with, in order."""
        return [*(matrix for layer in self.layers for matrix in layer.matrices), self.head]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one pass reads; of the embedding it reads only a few rows."""
        return sum(m.nbytes for m in self.matrices)

    def forward(self, step: Step, tap_layers: Sequence[int] = (), taps: Tensor | None = None) -> Tensor:
        """Run every row through the layers: the last residual [rows, hidden], before the final norm.

        The residual after block tap_layers[i] goes to taps[:, i] (taps [rows, len(tap_layers), hidden], or each row's
        ring of such, by position); of FINAL, what the final norm makes of the last residual.
        """
        normed = Normed(self.ops.embed(step.token_ids, self.embedding), self.layers[0].input_norm)
        for i, (layer, then) in enumerate(following(self.layers, self.norm)):
            normed = layer.add_to(normed, step, step.kv[i], then)
            if taps is not None and i in tap_layers:
                self.ops.tap(normed.x, taps, tap_layers.index(i), step.positions)
        if taps is not None and FINAL in tap_layers:
            self.ops.tap(self.ops.rms_norm(normed.x, *self.norm), taps, tap_layers.index(FINAL), step.positions)
        return normed.x  # what is prepared is left: a row's logits shall not hang on the rows it came with

    def logits(self, residual: Tensor) -> Tensor:  # [rows, hidden] -> float32 [rows, vocab]
        out: Tensor = self.ops.norm_logits(Normed(residual, self.norm), self.head)
        return out

    def scores(self, residual: Tensor) -> Tensor:
        """The logits in the weights' own type: of thousands of rows float32 would take twice the memory."""
        out: Tensor = self.ops.norm_linear(Normed(residual, self.norm), self.head)
        return out

    def likeliest(self, residual: Tensor) -> Tensor:  # [rows, hidden] -> int64 [rows], the logits' argmax
        out: Tensor = self.ops.norm_argmax(Normed(residual, self.norm), self.head)
        return out


def load_norm(config: ModelConfig, load: Loader, name: str) -> Norm:
    return Norm(load.vector(f"{name}.weight", config.hidden_size), config.rms_eps)


def load_head(config: ModelConfig, load: Loader, embedding: Tensor | GroupQuant) -> Linear:
    if config.tie_embeddings:
        return load.tied_head(embedding)
    return load.linear({"lm_head": config.vocab_size}, config.hidden_size)


def following(layers: Sequence[DecoderLayer], last: Norm) -> Iterator[tuple[DecoderLayer, Norm]]:
    """Each layer with the norm that reads its result."""
    return zip(layers, [*(layer.input_norm for layer in layers[1:]), last], strict=True)
