"""Where the Triton kernels are tested: on a GPU, or on the CPU under TRITON_INTERPRET=1, few shapes and no bfloat16."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRET else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.bfloat16, torch.float16, torch.float32]
NO_GPU = not torch.cuda.is_available()

if INTERPRET:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    _patch, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def _patch_index(tensor: type, scope: object) -> None:
        """triton 3.6 takes int() of arrays of one element, which numpy 2.4 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _dot_by_row(self: object, a: object, b: object, d: interpreter.TensorHandle, *precision: object) -> object:
        """What a tensor core sums for a row does not depend on the rows beside it. numpy's float32 sums do on some
        processors; its float64 sums, rounded once, do not."""
        if d.data.dtype != np.float32:
            return _dot(self, a, b, d, *precision)
        zeros = interpreter.TensorHandle(np.zeros(d.data.shape), tl.float64)
        sums = _dot(self, a, b, zeros, *precision).data.astype(np.float32)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = _patch_index
    interpreter.InterpreterBuilder.create_dot = _dot_by_row


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    reason = "no GPU here: `make test-long` runs it in Triton's interpreter"
    return pytest.mark.gpu(pytest.mark.skipif(NO_GPU and not INTERPRET, reason=reason)(test))


def gpu_only(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(NO_GPU or INTERPRET, reason="needs a GPU, not the interpreter")(test))


def gluon(test: Callable[..., None]) -> Callable[..., None]:
    reason = "needs a GPU: Gluon has no interpreter, so elsewhere its kernels are only compiled (test_cuda_compile.py)"
    return pytest.mark.gpu(pytest.mark.skipif(NO_GPU or INTERPRET, reason=reason)(test))


def no_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.skipif(INTERPRET, reason="the interpreter replaces the compiler")(test)


def compiled(test: Callable[..., None]) -> Callable[..., None]:
    """Compiles ahead of time, which takes seconds for each shape."""
    return pytest.mark.slow(no_interpreter(test))


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def integers(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    worst = (got.float() - expected.float()).abs().max().item()
    scale = max(1.0, expected.float().abs().max().item())  # bf16 keeps 8 bits: the error grows with the value
    assert worst <= TOLERANCE[dtype] * scale, f"off by {worst}, largest value {scale}"  # NaN fails too
