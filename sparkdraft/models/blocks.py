"""The blocks decoders are built of: attention over the paged cache, a gated MLP, and the stack that joins them.

All run on one ragged batch of rows (prompt chunks, decode rows and drafts alike) and share one `Step` that says where
the rows stand. The residual stream is one tensor that blocks add to in place; what it holds after chosen blocks can be
recorded (`taps`), which is all that models know of drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.kernels.view import AttentionView
from sparkdraft.models.config import ModelConfig
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
    kv: DenseKV


class Attention:
    def __init__(
        self, config: ModelConfig, layer: int, load: Loader, name: str, ops: ModuleType, qk_norm: bool
    ) -> None:
        self.layer, self.ops, self.eps = layer, ops, config.rms_eps
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.causal, self.window = True, 0
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {f"{name}.q_proj": q_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width}
        self.qkv = load.linear(rows, config.hidden_size, config.attention_bias)
        self.o = load.linear({f"{name}.o_proj": config.hidden_size}, q_width, config.attention_bias)
        self.q_norm = load.vector(f"{name}.q_norm.weight", self.head_dim) if qk_norm else None
        self.k_norm = load.vector(f"{name}.k_norm.weight", self.head_dim) if qk_norm else None

    def add_to(self, residual: Tensor, norm: Tensor, rope: Tensor, step: Step) -> None:
        """residual += attention(norm(residual)); norm: [hidden], as in all blocks."""
        counts, norms = (self.num_heads, self.num_kv_heads), (self.q_norm, self.k_norm)
        qkv = self.ops.norm_linear(residual, norm, self.eps, self.qkv)
        step.kv.rotate_and_write(self.layer, qkv, step.positions, rope, counts, norms, self.eps, step.slots)
        q = qkv.view(qkv.shape[0], -1, self.head_dim)[:, : self.num_heads]
        seen = step.kv.attend(self.layer, q, step.view, self.scale, self.causal, self.window)
        self.ops.add_linear(residual, seen, self.o)


class GatedMLP:
    def __init__(self, config: ModelConfig, load: Loader, name: str, ops: ModuleType) -> None:
        self.ops, self.eps = ops, config.rms_eps
        rows = {f"{name}.{part}": config.intermediate_size for part in ("gate_proj", "up_proj")}
        self.gate_up = load.linear(rows, config.hidden_size, config.mlp_bias)
        self.down = load.linear({f"{name}.down_proj": config.hidden_size}, config.intermediate_size, config.mlp_bias)

    def add_to(self, residual: Tensor, norm: Tensor) -> None:
        self.ops.add_linear(residual, self.ops.norm_gated(residual, norm, self.eps, self.gate_up), self.down)


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, load: Loader, name: str, attention: Attention, ops: ModuleType) -> None:
        self.input_norm = load.vector(f"{name}.input_layernorm.weight", config.hidden_size)
        self.attention = attention
        self.post_norm = load.vector(f"{name}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp = GatedMLP(config, load, f"{name}.mlp", ops)

    def add_to(self, residual: Tensor, rope: Tensor, step: Step) -> None:
        self.attention.add_to(residual, self.input_norm, rope, step)
        self.mlp.add_to(residual, self.post_norm)


class Decoder:
    """Embedding, layers, final norm, head. An architecture differs in what its layers are."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        embedding: Tensor | GroupQuant,
        head: Linear,
        norm: Tensor,
        rope: Tensor,  # float32 [context, head_dim]
        ops: ModuleType,
    ) -> None:
        self.config, self.layers, self.ops = config, layers, ops
        self.embedding, self.head, self.norm, self.rope = embedding, head, norm, rope

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one pass reads; of the embedding it reads only a few rows."""
        matrices = [m for x in self.layers for m in (x.attention.qkv, x.attention.o, x.mlp.gate_up, x.mlp.down)]
        return sum(m.nbytes for m in [*matrices, self.head])

    def forward(self, step: Step, tap_layers: Sequence[int] = (), taps: Tensor | None = None) -> Tensor:
        """Run every row through the layers: the last residual [rows, hidden], before the final norm.

        The residual after block tap_layers[i] goes to taps[:, i] (taps [rows, len(tap_layers), hidden]).
        """
        residual = self.ops.embed(step.token_ids, self.embedding)
        for i, layer in enumerate(self.layers):
            layer.add_to(residual, self.rope, step)
            if taps is not None and i in tap_layers:
                self.ops.tap(residual, taps, tap_layers.index(i))
        return residual

    def logits(self, residual: Tensor) -> Tensor:  # [rows, hidden] -> float32 [rows, vocab]
        out: Tensor = self.ops.norm_logits(residual, self.norm, self.config.rms_eps, self.head)
        return out

    def scores(self, residual: Tensor) -> Tensor:
        """The logits in the weights' own type: of thousands of rows float32 would take twice the memory."""
        out: Tensor = self.ops.norm_linear(residual, self.norm, self.config.rms_eps, self.head)
        return out

    def likeliest(self, residual: Tensor) -> Tensor:  # [rows, hidden] -> int64 [rows], the logits' argmax
        out: Tensor = self.ops.norm_argmax(residual, self.norm, self.config.rms_eps, self.head)
        return out
