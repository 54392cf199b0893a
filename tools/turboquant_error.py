"""What TurboQuant loses and what it costs, by head dimension and bits: theory beside what random vectors show.

    python tools/turboquant_error.py                    about 15 seconds on two small cores
    python tools/turboquant_error.py --dims 64 96 --vectors 5000

Errors are |x - x'|^2 / |x|^2, averaged over vectors of normal coordinates. "theory" is the codebook's distortion D,
which codes times the vector's own length ("plain") must meet. "unbiased" is the scale that is used: its error is a
little below D / (1 - D), since the error along the vector is gone. "slope" is what q . k keeps of itself with each
scale. Bytes are per vector, scales included. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from sparkdraft.kernels.turboquant.codebook import codebook
from sparkdraft.kernels.turboquant.layout import PLANES, block_width, token_bytes, vector_bytes
from sparkdraft.kernels.turboquant.vectors import Encoded, VectorFormat


def measure(dim: int, bits: int, vectors: int) -> dict[str, Any]:
    x = torch.randn(vectors, dim, generator=torch.Generator().manual_seed(bits))
    energy = x.square().sum(-1)
    row: dict[str, Any] = {"dim": dim, "bits": bits, "bytes": vector_bytes(dim, bits)}
    row["theory"] = codebook(block_width(dim), bits).distortion
    fmt = VectorFormat(dim, bits)
    unbiased = fmt.encode(x)
    lengths = fmt.rotate(x).unflatten(-1, (fmt.num_blocks, fmt.width)).norm(dim=-1).half()
    for name, encoded in (("plain", Encoded(unbiased.planes, lengths)), ("unbiased", unbiased)):
        decoded = fmt.decode(encoded)
        row[name] = float(((decoded - x).square().sum(-1) / energy).mean())
        row[f"slope_{name}"] = float(((decoded * x).sum(-1) / energy).mean())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="errors and bytes of TurboQuant's vectors")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 96, 128, 256, 512])
    parser.add_argument("--bits", type=int, nargs="+", default=sorted(PLANES))
    parser.add_argument("--vectors", type=int, default=10_000)
    args = parser.parse_args()
    print("  dim  bits  bytes  bits/coordinate    theory     plain  unbiased   slopes plain, unbiased")
    rows = []
    for dim in args.dims:
        for bits in args.bits:
            r = measure(dim, bits, args.vectors)
            rows.append(r)
            print(
                f"{dim:5d} {bits:5d} {r['bytes']:6d} {8 * r['bytes'] / dim:16.3f}  "
                f"{r['theory']:8.6f}  {r['plain']:8.6f}  {r['unbiased']:8.6f}"
                f"   {r['slope_plain']:.4f} {r['slope_unbiased']:.4f}"
            )
    tokens = {}
    for dim in args.dims:
        tokens[dim] = token_bytes(dim, 4, 3)
        ratio = 4 * dim / tokens[dim]
        print(f"K4/V3, dim {dim}: {tokens[dim]} bytes per token and head, {ratio:.2f} times less than bf16")
    worst = max(abs(r["plain"] / r["theory"] - 1) for r in rows)
    print(f"the plain scale is within {worst:.2%} of theory everywhere")
    print(json.dumps({"errors": rows, "k4v3_bytes": tokens, "furthest_from_theory": worst}))


if __name__ == "__main__":
    main()
