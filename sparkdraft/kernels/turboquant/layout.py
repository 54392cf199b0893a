"""The size of a TurboQuant format: planes, blocks and bytes. Integers only, no torch.

A plane holds a power of two of bits, so that no code straddles a byte; a block is what one rotation and one scale span.
The shapes that a device's kernels can run are here too, for the plan.
"""

from __future__ import annotations

from typing import NamedTuple

from sparkdraft.core import UserError

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1)}  # bits of each plane, that of the lowest bits first
SMALLEST, LARGEST = 16, 512  # of a block; below, its scale would cost more than a bit a coordinate
SCALE_BYTES = 2  # float16


class KernelLimits(NamedTuple):
    """The shapes of a coded cache that one set of kernels can run."""

    dims: tuple[int, ...]  # head dimensions
    block_size: int  # positions of a block: what is unpacked at once, and a record beside the next


# By the kernels' name; those not named run any shape. A GPU's end at 256: four warps hold 64 lanes' sums of values in
# registers, and at 512 these alone would be 256 of each thread, one more than there are.
KERNEL_LIMITS = {"cuda": KernelLimits((64, 128, 256), 16)}


def check_bits(bits: int, what: str = "bits") -> None:
    if bits not in PLANES:
        raise UserError(f"{what} is {bits}; TurboQuant takes {min(PLANES)} to {max(PLANES)} bits per coordinate")


def block_width(dim: int) -> int:
    """The largest power of two that divides the dimension: the width of a rotation."""
    width = min(dim & -dim, LARGEST)
    if width < SMALLEST:
        raise UserError(
            f"head dimension {dim} cannot be rotated: TurboQuant needs a multiple of {SMALLEST}; "
            "keep this model's KV cache exact"
        )
    return width


def plane_bytes(dim: int, bits: int) -> tuple[int, ...]:
    """Bytes of one vector in each plane."""
    check_bits(bits)
    assert dim % 8 == 0, f"{dim} bits do not fill whole bytes"
    return tuple(dim * width // 8 for width in PLANES[bits])


def vector_bytes(dim: int, bits: int) -> int:
    """Bytes of one vector with its scales."""
    return sum(plane_bytes(dim, bits)) + SCALE_BYTES * (dim // block_width(dim))


def token_bytes(dim: int, key_bits: int, value_bits: int) -> int:
    """Bytes of a key and a value in one layer and one head."""
    return vector_bytes(dim, key_bits) + vector_bytes(dim, value_bits)
