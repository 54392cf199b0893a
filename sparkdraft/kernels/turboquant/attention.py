"""Attention over encoded keys and values, none of which is decoded, in plain torch: the definition kernels must meet.

The query is rotated once instead of every key; a key's scale multiplies its finished dot product, a value's scale its
probability; what has been summed in rotated space is rotated back once. Parts of a context that are kept in different
forms (codes, uncoded rows) are attended to apart and joined by their log-sum-exp, as if they had been one.

    positions      0 .. first | ........ coded ........ | recent .. p        of a row at position p:
                   uncoded                                uncoded            each row has its own border

Which keys a row takes from which part depends on its own position alone, never on the rows it is run with: so drafts,
chunks and batches change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdraft.kernels.turboquant.vectors import Encoded, VectorFormat


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some of the keys."""

    out: Tensor  # [..., rows, dim], normalised over these keys; 0 in a row that sees none of them
    lse: Tensor  # [..., rows], the logarithm of the sum of exponentials of its scores; -inf in such a row


def is_uncoded(position: Tensor, key: Tensor, first: int, recent: int) -> Tensor:
    """Whether a row reads a key uncoded: one of the first positions, or of the most recent, itself included.

    position [rows, 1] and key [keys] -> bool [rows, keys]. Says nothing of what a row may see at all.
    """
    return (key < first) | (position - key < recent)


def attend_codes(
    q: Tensor,  # [..., rows, dim]
    keys: Encoded,  # of [..., keys, dim], centred or not: a centre is the same for all keys, and cancels
    values: Encoded,
    key_format: VectorFormat,
    value_format: VectorFormat,
    scale: float,
    seen: Tensor,  # bool [rows, keys]
) -> Part:
    weights, lse = _softmax(code_scores(q, keys, key_format) * scale, seen)
    return Part(code_values(weights, values, value_format), lse)


def attend_uncoded(
    q: Tensor,  # [..., rows, dim]
    k: Tensor,  # [..., keys, dim], less the centre where the codes beside them are centred: all scores share one zero
    v: Tensor,
    scale: float,
    seen: Tensor,  # bool [rows, keys]
) -> Part:
    q, k, v = (x if q.dtype == torch.float64 else x.float() for x in (q, k, v))
    weights, lse = _softmax(q @ k.transpose(-1, -2) * scale, seen)
    return Part(weights @ v, lse)


def merge(parts: list[Part]) -> Part:
    """Attention over all the keys of all the parts."""
    lse = torch.stack([p.lse for p in parts])
    total = lse.logsumexp(0)  # -inf where a row sees nothing in any of them
    share = (lse - total.where(total > -torch.inf, 0)).exp()
    out = sum(p.out * w.unsqueeze(-1) for p, w in zip(parts, share, strict=True))
    assert isinstance(out, Tensor)
    return Part(out, total)


def code_scores(q: Tensor, keys: Encoded, fmt: VectorFormat) -> Tensor:  # -> [..., rows, keys]
    """q . k for every key, up to the constant that a centre leaves out. Scales come after the dot products."""
    turned = fmt.rotation.forward(q).unflatten(-1, (fmt.num_blocks, fmt.width))
    dots = torch.einsum("...rbw,...kbw->...rkb", turned, fmt.unit(keys, turned.dtype))
    return (dots * keys.scale.to(dots.dtype).unsqueeze(-3)).sum(-1)


def code_values(weights: Tensor, values: Encoded, fmt: VectorFormat) -> Tensor:  # [..., rows, keys] -> [..., rows, dim]
    """The weighted sum of values. Scales go into the weights, and the sum is rotated back."""
    scaled = weights.unsqueeze(-1) * values.scale.to(weights.dtype).unsqueeze(-3)  # [..., rows, keys, blocks]
    mixed = torch.einsum("...rkb,...kbw->...rbw", scaled, fmt.unit(values, weights.dtype))
    return fmt.rotation.inverse(mixed.flatten(-2))


def _softmax(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the seen keys, and their log-sum-exp; a row that sees nothing weighs nothing."""
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.where(lse > -torch.inf, 0).unsqueeze(-1)).exp(), lse
