"""Gumbel-max coupling: a row draws the id with the largest logit / temperature + Gumbel noise.

Noise is a function of (seed, position, id) alone, so a seeded request writes the same text in any batch, after a
preemption, and with or without drafts. A drafter adds the target's noise to its own logits: where the distributions are
near each other, both draw the same id. The caller sets ids that may not be drawn to -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SEED, POSITION, ID = -7046029254386353131, -4417276706812531889, -2643881736870682267  # odd, and unlike each other
BITS = 23  # of a uniform number: as many as leave the largest below 1 in float32
LARGEST = -math.log(-math.log1p(-(2.0 ** -(BITS + 1))))  # noise is never above this


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """float32 noise for int64 (seed, position, id), broadcast: a 64-bit mixer of int64, the same anywhere."""
    x = seeds * SEED + positions * POSITION + ids * ID
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shift_right(x, shift)) * factor
    x = x ^ _shift_right(x, 31)
    uniform = (_shift_right(x, 64 - BITS).float() + 0.5) / 2**BITS
    return -torch.log(-torch.log(uniform))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts carry the sign in: mask it off
