"""Kernels compiled ahead, on all cores: nothing runs meanwhile, and afterwards nothing is left to compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from sparkdraft.tune.compiling import only_compiling  # noqa: E402
from tests.kernels.triton_device import DEVICE, gpu, gpu_only  # noqa: E402


@triton.jit
def _add(x, out, value, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + value)


@triton.jit
def _broken(x, out, value, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0, "no size will do")


def launch(x: Tensor, kernel: object = _add, value: int = 7) -> Tensor:
    out = torch.full_like(x, -1)
    kernel[(1,)](x, out, value, SIZE=x.shape[0])  # type: ignore[index]
    return out


@gpu
def test_what_is_launched_meanwhile_does_not_run() -> None:
    x = torch.arange(16, device=DEVICE, dtype=torch.int32)
    with only_compiling():
        first = launch(x)
    assert bool((first == -1).all())
    assert torch.equal(launch(x), x + 7)


@gpu_only
def test_nothing_is_left_to_compile() -> None:
    hook, compiled = triton.knobs.runtime.jit_post_compile_hook, []
    x = torch.arange(64, device="cuda")
    triton.knobs.runtime.jit_post_compile_hook = lambda **_: compiled.append(1)
    try:
        with only_compiling():
            for value in (3, 3, 16):  # Triton compiles another kernel for what 16 divides
                launch(x, value=value)
        assert len(compiled) == 2
        compiled.clear()
        assert torch.equal(launch(x, value=3) + launch(x, value=16), 2 * x + 19) and not compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook


@gpu_only
def test_a_kernel_that_does_not_compile_fails_where_it_is_launched() -> None:
    x = torch.arange(32, device="cuda")
    with only_compiling():
        launch(x, _broken)
    with pytest.raises(triton.CompilationError, match="no size will do"):
        launch(x, _broken)
