"""The DFlash drafter as a trainable module: the arithmetic of drafters/dflash.py over many random blocks at once.

Its parameters have the names of published checkpoints and are kept in float32; the arithmetic runs in the dtype of the
aux hidden states. The context enters only as keys and values, projected for all layers by one matmul, and every block
is a separate draft. The target's embedding and head are borrowed and frozen. The loss is in loss.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.rope import rope_table
from sparkdraft.train.batches import TrainBatch
from sparkdraft.train.memory import CPU_SCORES

WIDEST = 16  # most rows of a block that the GPU's kernel takes

Function = TypeVar("Function", bound=Callable[..., object])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype)


def norm_rope(x: Tensor, weight: Tensor, angles: Tensor, eps: float) -> Tensor:
    """Normalise and rotate heads [rows, heads, head_dim]. angles: [rows, head_dim], cosines, then sines."""
    a, b = rms_norm(x, weight, eps).float().chunk(2, -1)
    cos, sin = angles.unsqueeze(1).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


class TakeRows(torch.autograd.Function):
    """Gathers x[rows], summing the gradients of rows that are taken many times in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.taken_from = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,), (grad,) = ctx.saved_tensors, grads
        total = torch.zeros(ctx.taken_from, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, rows, grad.float()).to(grad.dtype), None


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    taken: Tensor = TakeRows.apply(x, rows)  # type: ignore[no-untyped-call]
    return taken


class Fused:
    """The operators between the matmuls: eager on a CPU, each compiled to one kernel on a GPU."""

    def __init__(self, compiled: bool) -> None:
        def made(function: Function) -> Function:
            return torch.compile(function, dynamic=False) if compiled else function  # type: ignore[return-value]

        self.rms_norm, self.norm_rope, self.silu_mul = made(rms_norm), made(norm_rope), made(silu_mul)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def matrix(out: int, width: int, scale: float = 0.02) -> nn.Linear:
    made = nn.Linear(width, out, bias=False)
    nn.init.normal_(made.weight, std=scale)
    return made


class DraftAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec, _ = config.uniform()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q_width, kv_width = spec.query_width, spec.kv_width
        self.q_proj, self.k_proj = matrix(q_width, config.hidden_size), matrix(kv_width, config.hidden_size)
        self.v_proj = matrix(kv_width, config.hidden_size)
        self.o_proj = matrix(config.hidden_size, q_width, 0.02 * (2 * config.num_layers) ** -0.5)
        self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)

    def kv_weight(self) -> Tensor:
        return torch.cat((self.k_proj.weight, self.v_proj.weight))


class DraftMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inter = config.uniform()[1].intermediate_size
        self.gate_proj, self.up_proj = matrix(inter, config.hidden_size), matrix(inter, config.hidden_size)
        self.down_proj = matrix(config.hidden_size, inter, 0.02 * (2 * config.num_layers) ** -0.5)


class DraftLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(config.hidden_size), Norm(config.hidden_size)
        self.self_attn, self.mlp = DraftAttention(config), DraftMLP(config)


class DraftModel(nn.Module):
    aux_scale: Tensor
    rope: Tensor

    def __init__(self, draft: DFlashConfig, longest: int, compiled: bool = False) -> None:
        super().__init__()
        config, width = draft.model, len(draft.aux_layers) * draft.target_hidden_size
        self.draft, self.eps, self.fused = draft, config.rms_eps, Fused(compiled)
        self.fc = matrix(config.hidden_size, width)
        self.hidden_norm, self.norm = Norm(config.hidden_size), Norm(config.hidden_size)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        # Hidden states differ tenfold in size between layers and channels; the inputs of training should not.
        self.register_buffer("aux_scale", torch.ones(width))
        self.register_buffer("rope", rope_table(config.uniform()[0].rope, longest + draft.block_size), persistent=False)

    def forward(self, batch: TrainBatch, aux_hidden: Tensor, block: Tensor) -> Tensor:
        """Return the rows [A * W, hidden] after the final norm.

        aux_hidden: aux hidden states [N, aux_hidden * hidden] of the context.
        block: the embedded block rows [A * W, hidden].
        """
        offsets = torch.arange(batch.width, dtype=torch.int32, device=aux_hidden.device)
        anchored = batch.positions[batch.anchors.long()]  # [A]: the anchor's position
        rope = self.rope.index_select(0, (anchored.unsqueeze(1) + offsets).flatten())
        context = self.context_kv(aux_hidden, self.rope.index_select(0, batch.positions))
        x = block
        for layer, (k, v) in zip(self.layers, context, strict=True):
            assert isinstance(layer, DraftLayer)
            if len(batch.seen):
                k, v = take_rows(k, batch.seen), take_rows(v, batch.seen)
            normed = self.fused.rms_norm(x, layer.input_layernorm.weight, self.eps)
            x = x + self._attend(layer.self_attn, normed, k, v, rope, batch)
            x = x + self._mlp(layer.mlp, self.fused.rms_norm(x, layer.post_attention_layernorm.weight, self.eps))
        return self.fused.rms_norm(x, self.norm.weight, self.eps)

    def context_kv(self, aux_hidden: Tensor, rope: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Project the context's keys and values [N, kv_heads, head_dim] for each layer."""
        features = _linear(aux_hidden, self.fc.weight * self.aux_scale)
        normed = self.fused.rms_norm(features, self.hidden_norm.weight, self.eps)
        attentions = [layer.self_attn for layer in self.layers if isinstance(layer, DraftLayer)]
        spec, _ = self.draft.model.uniform()
        joined = _linear(normed, torch.cat([a.kv_weight() for a in attentions]))
        pairs = joined.view(len(aux_hidden), len(attentions), 2, spec.num_kv_heads, spec.head_dim).unbind(1)
        return [
            (self.fused.norm_rope(pair[:, 0], a.k_norm.weight, rope, self.eps), pair[:, 1])
            for a, pair in zip(attentions, pairs, strict=True)
        ]

    def _attend(
        self, attention: DraftAttention, x: Tensor, context_k: Tensor, context_v: Tensor, rope: Tensor, b: TrainBatch
    ) -> Tensor:
        counts = (attention.heads, attention.kv_heads, attention.kv_heads)
        qkv = _linear(x, torch.cat((attention.q_proj.weight, attention.kv_weight())))
        q, k, v = qkv.view(len(x), -1, attention.head_dim).split(counts, 1)
        q = self.fused.norm_rope(q, attention.q_norm.weight, rope, self.eps)
        k = self.fused.norm_rope(k, attention.k_norm.weight, rope, self.eps)
        scale = attention.head_dim**-0.5
        out = block_attention(q, k, v, context_k, context_v, b.starts, b.stops, b.width, scale)
        return _linear(out.flatten(1), attention.o_proj.weight)

    def _mlp(self, mlp: DraftMLP, x: Tensor) -> Tensor:
        both = _linear(x, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        return _linear(self.fused.silu_mul(both), mlp.down_proj.weight)

    def scale_aux(self, aux_hidden: Tensor, keep: bool) -> None:
        """Set the scale that brings aux hidden states like 'aux_hidden' [rows, aux_hidden * hidden] to unit size.

        keep: rescale the matrix that reads them, so that a trained drafter computes the same as before.
        """
        self.aux_scale.copy_(aux_hidden.float().square().mean(0).clamp_min(1e-8).rsqrt())
        if keep:
            with torch.no_grad():
                self.fc.weight.div_(self.aux_scale)

    @torch.no_grad()
    def begin_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a trained drafter's weights. Layers that it lacks begin as the identity."""
        for name, parameter in self.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name])
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()


def folded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state as checkpoints hold it, with the input scale folded into the matrix that reads it."""
    weights = {name: tensor for name, tensor in state.items() if name != "aux_scale"}
    return weights | {"fc.weight": weights["fc.weight"] * state["aux_scale"]}


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def block_attention(
    q: Tensor,  # [blocks * width, heads, head_dim]
    block_k: Tensor,  # [blocks * width, kv_heads, head_dim]
    block_v: Tensor,
    context_k: Tensor,  # [tokens, kv_heads, head_dim]
    context_v: Tensor,
    starts: Tensor,  # int32 [blocks], never descending: the first token that the block sees, of its own document
    anchors: Tensor,  # int32 [blocks], never descending: the first token that the block does not see as context
    width: int,
    scale: float,
) -> Tensor:  # [blocks * width, heads, head_dim]
    """Attend from draft blocks of 'width' rows, each over the context before its anchor and over itself.

    All blocks of a batch attend at once to context rows that are laid end to end, so blocks of one document share its
    keys and values. `reference_attention` defines the operator. A CPU runs it over a few neighbouring blocks at a time,
    on the stretch of context that they see, and recomputes it in the backward pass; a GPU runs
    train/kernels/block_attention.py, which needs no mask. Differentiable in its five float inputs, which may be views
    whose last dimension is contiguous.

        context rows | document 0 .................... | document 1 .................... | ...
        block j                                          [starts[j] ... anchors[j]) + its own rows j*W .. j*W + W - 1
    """
    assert q.shape[0] == block_k.shape[0] == len(anchors) * width == len(starts) * width, (q.shape, anchors.shape)
    assert q.shape[1] % block_k.shape[1] == 0 and q.shape[2] == block_k.shape[2], (q.shape, block_k.shape)
    assert block_k.shape == block_v.shape and context_k.shape == context_v.shape, (block_k.shape, context_k.shape)
    assert block_k.shape[1:] == context_k.shape[1:], (block_k.shape, context_k.shape)
    if q.is_cuda:
        # imported here because triton is not available everywhere
        from sparkdraft.train.kernels import block_attention as kernel

        return kernel.block_attention(q, block_k, block_v, context_k, context_v, starts, anchors, width, scale)
    parts = []
    for first, last in _neighbours(starts.tolist(), anchors.tolist(), width):
        low, high = int(starts[first]), int(anchors[last - 1])
        rows = (tensor[first * width : last * width] for tensor in (q, block_k, block_v))
        context = (tensor[low:high] for tensor in (context_k, context_v))
        places = (tensor[first:last] - low for tensor in (starts, anchors))
        parts.append(checkpoint(reference_attention, *rows, *context, *places, width, scale, use_reentrant=False))
    return torch.cat(parts) if parts else q


def _neighbours(starts: list[int], anchors: list[int], width: int) -> Iterator[tuple[int, int]]:
    """Yield runs [first, last) of blocks that have few (row, key) pairs together."""
    first = 0
    for last in range(1, len(anchors) + 1):
        if last < len(anchors):
            keys = anchors[last] - starts[first] + width
            if (last + 1 - first) * width * keys <= CPU_SCORES:
                continue
        yield first, last
        first = last


def reference_attention(
    q: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    starts: Tensor,
    anchors: Tensor,
    width: int,
    scale: float,
) -> Tensor:
    """Define block_attention in the inputs' own dtype; memory grows with blocks * width * heads * tokens."""
    kv_heads, tokens = context_k.shape[1], context_k.shape[0]
    grouped = q.unflatten(0, (-1, width)).unflatten(2, (kv_heads, -1))  # [blocks, width, kv_heads, group, dim]
    own_k, own_v = block_k.unflatten(0, (-1, width)), block_v.unflatten(0, (-1, width))
    token = torch.arange(tokens, device=q.device)
    seen = (token >= starts.unsqueeze(1)) & (token < anchors.unsqueeze(1))  # [blocks, tokens]
    context = torch.einsum("bwkgd,tkd->bwkgt", grouped, context_k)
    context = context.masked_fill(~seen[:, None, None, None], float("-inf"))
    own = torch.einsum("bwkgd,bvkd->bwkgv", grouped, own_k)
    weights = (torch.cat((context, own), dim=-1) * scale).softmax(-1)
    to_context, to_own = weights.split((tokens, width), dim=-1)
    mixed = torch.einsum("bwkgt,tkd->bwkgd", to_context, context_v)
    mixed = mixed + torch.einsum("bwkgv,bvkd->bwkgd", to_own, own_v)
    return mixed.reshape(q.shape)
