"""The operators of a transformer step, in three backends with one interface (ops.py): `reference`, `native` and `cuda`.

Kernels know tensors and how weights are kept, and nothing of models, caches or the engine. README.md lists which file
implements which operator.
"""

from __future__ import annotations

from sparkdraft.kernels.ops import Ops


def load(name: str) -> Ops:
    """A backend, imported when it is first used: "reference" (torch), "native" (C++ for CPUs) or "cuda" (Triton)."""
    if name == "reference":
        from sparkdraft.kernels import reference

        return reference
    if name == "native":
        from sparkdraft.kernels import native

        return native
    assert name == "cuda", name
    from sparkdraft.kernels import cuda

    return cuda
