"""Recurrent layers (a gated delta rule after a short causal convolution): what a layer keeps, and its definition.

Each value head has a state S [key_dim, value_dim], which every token changes:

    S = decay * S;    u = beta * (v - k^T S);    S = S + k u^T;    o = q^T S

A state cannot be rolled back, so it lags behind. `state` is S before the token at position `base`; each token from
there on left a record (k, u and decay). A step first replays the records up to its own first token, by the same
operations in the same order, which gives S the same bits; then it runs its tokens and records them. Records and
convolution inputs are in rings, by position modulo their size. So a rejected draft needs no undoing: the next step
writes over its record.

    positions   ... base ............ first row ....... last row
    state            |  replay records  |  run and record  |

A step that starts at `first` leaves `state` at the last multiple of FOLD up to `first`, or where it was if that is
further on; there another request may continue from a copy. A step of more than `most_rows` tokens of one sequence is
part of a prompt, of which nothing is rejected: it leaves `state` after its last token, and no records. A sequence that
starts at position 0 starts from zeros, whatever its slot held.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.kernels.ops import FOLD, AttentionView, DeltaParams, RecurrentState


def find_states(slot_of: Tensor, view: AttentionView, block_size: int, out: Tensor) -> None:
    rows = view.query_start[1:] - view.query_start[:-1]
    first = view.context_len - rows
    block = view.block_tables.gather(1, (first.clamp(min=0) // block_size).long().unsqueeze(1)).squeeze(1)
    out.copy_(slot_of[block.clamp(min=0).long()].where((rows > 0) & (first >= 0), -1))


def causal_conv(x: Tensor, weight: Tensor, memory: RecurrentState, slots: Tensor, view: AttentionView) -> Tensor:
    """Positions before 0 are zeros."""
    out = torch.zeros_like(x)
    width, ring = weight.shape[1], memory.inputs.shape[1]
    starts, contexts, places = view.query_start.tolist(), view.context_len.tolist(), slots.tolist()
    for s, slot in enumerate(places):
        begin, end = starts[s], starts[s + 1]
        count, first = end - begin, contexts[s] - (end - begin)
        if slot < 0 or count == 0:
            continue
        behind = torch.arange(first - width + 1, first, device=x.device)
        before = memory.inputs[slot, behind % ring].where((behind >= 0).unsqueeze(1), 0)
        rows = torch.cat((before, x[begin:end]))  # row i of the step is rows[width - 1 + i]
        for i in range(count):
            taken = rows[i : i + width].float()
            total = torch.zeros_like(taken[0])
            for j in range(width):
                total = total + weight[:, j] * taken[j]
            out[begin + i] = F.silu(total).to(x.dtype)
        kept = torch.arange(max(0, count - ring), count, device=x.device)
        memory.inputs[slot, (first + kept) % ring] = x[begin + kept]
    return out


def delta_rule(
    qkv: Tensor,
    decay_beta: Tensor,
    memory: RecurrentState,
    slots: Tensor,
    view: AttentionView,
    params: DeltaParams,
) -> Tensor:
    """All in float32 until it is written. Value head h reads key head h // (value heads per key head)."""
    heads, ring = params.num_value_heads, memory.ring
    share = heads // params.num_key_heads
    out = qkv.new_zeros(qkv.shape[0], heads, params.value_dim)
    queries, keys, values = _split(qkv, params)
    decays, betas = _gates(decay_beta.float(), params)
    starts, contexts, places = view.query_start.tolist(), view.context_len.tolist(), slots.tolist()
    for s, slot in enumerate(places):
        begin, end = starts[s], starts[s + 1]
        count, first = end - begin, contexts[s] - (end - begin)
        if slot < 0 or count == 0:
            continue
        if first == 0:
            memory.state[slot].zero_()
            memory.base[slot] = 0
        base = int(memory.base[slot, 0])
        behind = first + (count if count <= memory.most_rows else 0) - base
        assert base <= first and behind <= ring, f"slot {slot}: state at {base}, rows from {first}"
        state, fold = memory.state[slot].clone(), max(base, first // FOLD * FOLD)
        for position in range(base, first):
            if position == fold:
                memory.state[slot] = state
            place = position % ring
            key = memory.keys[slot, place].repeat_interleave(share, 0)
            _update(state, memory.decays[slot, place], key, memory.updates[slot, place])
        if fold == first:
            memory.state[slot] = state
        memory.base[slot] = fold
        here = state.clone()
        for i in range(count):
            row = begin + i
            key, query = (part[row].repeat_interleave(share, 0) for part in (keys, queries))
            here *= decays[row].view(-1, 1, 1)
            update = betas[row].unsqueeze(1) * (values[row] - torch.einsum("hk,hkv->hv", key, here))
            here += key.unsqueeze(2) * update.unsqueeze(1)
            out[row] = torch.einsum("hk,hkv->hv", query, here).to(out.dtype)
            if count <= memory.most_rows:
                place = (first + i) % ring
                memory.keys[slot, place], memory.updates[slot, place] = keys[row], update
                memory.decays[slot, place] = decays[row]
        if count > memory.most_rows:
            memory.state[slot], memory.base[slot] = here, first + count
    return out.flatten(1)


def gated_norm(o: Tensor, gate: Tensor, gain: Tensor, eps: float) -> Tensor:  # [rows, heads * dim], gate alike
    heads = o.float().unflatten(-1, (-1, gain.shape[0]))
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * gain.float()
    return (normed.flatten(-2) * F.silu(gate.float())).to(o.dtype)


def _update(state: Tensor, decay: Tensor, key: Tensor, update: Tensor) -> None:
    state *= decay.view(-1, 1, 1)
    state += key.unsqueeze(2) * update.unsqueeze(1)


def _gates(decay_beta: Tensor, params: DeltaParams) -> tuple[Tensor, Tensor]:  # both [rows, value_heads]
    """Decays and betas, by exp: torch's softplus and sigmoid give a row other bits in other batches."""
    a, b = decay_beta.split(params.num_value_heads, dim=-1)
    x = a + params.bias
    softplus = torch.log1p(torch.exp(x.clamp(max=20))).where(x <= 20, x)
    return torch.exp(params.rate * softplus), 1 / (1 + torch.exp(-b))


def _split(qkv: Tensor, params: DeltaParams) -> tuple[Tensor, Tensor, Tensor]:
    """Unit queries, scaled, and unit keys [rows, key_heads, key_dim]; values [rows, value_heads, value_dim]."""
    width = params.num_key_heads * params.key_dim
    q, k, v = qkv.float().split([width, width, qkv.shape[1] - 2 * width], dim=-1)
    q, k = (part.unflatten(1, (params.num_key_heads, params.key_dim)) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + params.eps) for part in (q, k))
    return q * params.key_dim**-0.5, k, v.unflatten(1, (params.num_value_heads, params.value_dim))
