"""The blocks decoders are built of: attention over the paged cache, a gated MLP, and the stack that joins them.

All run on one ragged batch of rows (prompt chunks, decode rows and drafts alike) and share one `Step` that says where
the rows stand. The residual stream is one tensor that blocks add to in place; what it holds after chosen blocks can be
recorded (`taps`), which is all that models know of drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from sparkdraft.cache.formats import LayerKV, Turn
from sparkdraft.kernels.norm import Norm, Normed
from sparkdraft.kernels.view import AttentionView
from sparkdraft.models.config import FINAL, ModelConfig
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
    def __init__(self, config: ModelConfig, load: Loader, name: str, ops: ModuleType, qk_norm: bool) -> None:
        self.ops, self.eps = ops, config.rms_eps
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.causal, self.window = True, 0
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {f"{name}.q_proj": q_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width}
        self.qkv = load.linear(rows, config.hidden_size, config.attention_bias)
        self.o = load.linear({f"{name}.o_proj": config.hidden_size}, q_width, config.attention_bias)
        self.q_norm = load.vector(f"{name}.q_norm.weight", self.head_dim) if qk_norm else None
        self.k_norm = load.vector(f"{name}.k_norm.weight", self.head_dim) if qk_norm else None

    def add_to(self, normed: Normed, rope: Tensor, step: Step, kv: LayerKV, then: Norm) -> Normed:
        """x += attention(norm(x)), in place; 'then' is the norm that reads it next, as in all blocks."""
        qkv = self.ops.norm_linear(normed, self.qkv)
        norms = (self.q_norm, self.k_norm)
        turn = Turn(step.positions, rope, self.num_heads, self.num_kv_heads, *norms, self.eps)
        kv.write(qkv, turn, step.slots)
        q = qkv.view(qkv.shape[0], -1, self.head_dim)[:, : self.num_heads]
        seen = kv.attend(q, step.view, self.scale, self.causal, self.window)
        added: Normed = self.ops.add_linear(normed.x, seen, self.o, then)
        return added


class GatedMLP:
    def __init__(self, config: ModelConfig, load: Loader, name: str, ops: ModuleType) -> None:
        self.ops = ops
        rows = {f"{name}.{part}": config.intermediate_size for part in ("gate_proj", "up_proj")}
        self.gate_up = load.linear(rows, config.hidden_size, config.mlp_bias)
        self.down = load.linear({f"{name}.down_proj": config.hidden_size}, config.intermediate_size, config.mlp_bias)

    def add_to(self, normed: Normed, then: Norm) -> Normed:
        added: Normed = self.ops.add_linear(normed.x, self.ops.norm_gated(normed, self.gate_up), self.down, then)
        return added


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, load: Loader, name: str, attention: Attention, ops: ModuleType) -> None:
        self.input_norm = load_norm(config, load, f"{name}.input_layernorm")
        self.attention = attention
        self.post_norm = load_norm(config, load, f"{name}.post_attention_layernorm")
        self.mlp = GatedMLP(config, load, f"{name}.mlp", ops)

    def add_to(self, normed: Normed, rope: Tensor, step: Step, kv: LayerKV, then: Norm) -> Normed:
        return self.mlp.add_to(self.attention.add_to(normed, rope, step, kv, self.post_norm), then)


class Decoder:
    """Embedding, layers, final norm, head. An architecture differs in what its layers are."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        embedding: Tensor | GroupQuant,
        head: Linear,
        norm: Norm,
        rope: Tensor,  # float32 [context, head_dim]
        ops: ModuleType,
    ) -> None:
        self.config, self.layers, self.ops = config, layers, ops
        self.embedding, self.head, self.norm, self.rope = embedding, head, norm, rope

    @property
    def matrices(self) -> list[Linear]:
        """All that a pass multiplies with, in order."""
        layers = [m for x in self.layers for m in (x.attention.qkv, x.attention.o, x.mlp.gate_up, x.mlp.down)]
        return [*layers, self.head]

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
            normed = layer.add_to(normed, self.rope, step, step.kv[i], then)
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


def following(layers: Sequence[DecoderLayer], last: Norm) -> Iterator[tuple[DecoderLayer, Norm]]:
    """Each layer with the norm that reads its result."""
    return zip(layers, [*(layer.input_norm for layer in layers[1:]), last], strict=True)
