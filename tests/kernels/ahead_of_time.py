"""Kernels compiled for GPUs that are not here: what a step would launch is captured, and compiled as launched.

A step runs on tensors without memory (device "meta"), and each launch of a kernel is noted instead of made. Compiling
needs Triton and the assembler in its wheel, no GPU; it cannot be done under TRITON_INTERPRET=1, where kernels are
not compiled at all.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from sparkdraft.kernels.cuda.attention import paged, turboquant
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.recurrent import delta_chunks, delta_steps
from sparkdraft.kernels.cuda.runtime import pdl
from sparkdraft.kernels.cuda.runtime.gpu import Gpu
from sparkdraft.train.kernels import block_attention

LIMIT = {90: 227 << 10, 121: 99 << 10}  # bytes of shared memory that a program may take: H200, DGX Spark
SMS = {90: 132, 121: 48}
GPUS = {capability: Gpu(*divmod(capability, 10), sms) for capability, sms in SMS.items()}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, object]  # and constants


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.zeros(shape, dtype=dtype, device="meta")


def captured_launches(monkeypatch: pytest.MonkeyPatch, capability: int, step: Callable[[], object]) -> list[Launch]:
    """What a function would launch on that GPU."""
    found: list[Launch] = []

    def note(self: Any, *arguments: object, grid: tuple[int, ...], warmup: bool, **options: object) -> None:
        found.append(Launch(self, grid, arguments, options))

    monkeypatch.undo()  # tensors without memory want the real torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        patch.setattr(pdl, "active", lambda device: True)
        for module in (paged, block_attention, delta_chunks, delta_steps, experts, few_tokens, turboquant):
            patch.setattr(module, "gpu_of", lambda device: GPUS[capability])
        step()
    return found


def compile_launch(capability: int, launch: Launch) -> tuple[Any, dict[str, str]]:
    """Compiled as the launch would be, and the arguments' types; what is divisible by 16 counts as such."""
    kernel, options = launch.kernel, launch.options
    names = kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False)) | {n: v for n, v in options.items() if n in names}
    fixed = {p.name for p in kernel.params if p.is_constexpr or values[p.name] is None}
    signature, hints = {}, {}
    for place, (name, param) in enumerate(zip(names, kernel.params, strict=True)):
        value = values[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "constexpr" if name in fixed else "fp32" if isinstance(value, float) else "i32"
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and name not in fixed and not param.do_not_specialize:
            hints[(place,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, {name: values[name] for name in fixed}, hints)
    rest = {n: v for n, v in options.items() if n not in names}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=rest), signature


def spilled_bytes(made: Any) -> int:
    """Bytes of registers that the assembler had no room for, as it says itself."""
    target = re.search(r"\.target (sm_\w+)", made.asm["ptx"])
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        tool = get_ptxas(int(re.sub(r"\D", "", target[1]))).path
        command = [tool, "-v", f"--gpu-name={target[1]}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.findall(r"(\d+) bytes spill stores", said)
    assert found, said
    return sum(map(int, found))


# The order of kernels that overlap (kernels/cuda/runtime/pdl.py)

WEIGHTS = {  # what may be read before the wait
    "_rms_norm": {"weight"},
    "_rope_write": {"q_norm", "k_norm"},
    "_add_normed": {"weight", "gain"},
    "_gated_norm": {"gain"},
}
WEIGHTS |= {name: {"signs"} for name in ("write", "join", "turn_back")}


def read_early(ptx: str, names: list[str]) -> set[str]:
    """Arguments whose memory is read before the wait; traces which of them each register is made of."""
    origin: dict[str, set[str]] = {}
    found: set[str] = set()
    for line in ptx[ptx.index("{") : ptx.index("griddepcontrol.wait")].splitlines():
        operands = re.findall(r"%[a-z]+\d+|_param_\d+", line)
        sources = [{names[int(o[7:])]} if o.startswith("_param") else origin.get(o, set()) for o in operands]
        if "ld.global" in line:
            found |= sources[-1]
        elif operands:
            origin[operands[0]] = set().union(*sources[1:])
    return found


def check_order(kernel: object, signature: dict[str, str], ptx: str) -> None:
    """All paths wait, and nothing that another kernel writes is read before, nor anything written."""
    name = kernel.__name__
    assert ptx.count("griddepcontrol.wait") == 1 and "griddepcontrol.launch_dependents" not in ptx, name
    early = ptx[: ptx.index("griddepcontrol.wait")]
    assert not re.search(r"cp\.async|st\.global|\bbra\b|\bret;", early), f"{name}: {early}"
    passed = [n for n, kind in signature.items() if kind != "constexpr"] + ["scratch", "profile"]  # Triton's own
    assert read_early(ptx, passed) <= WEIGHTS.get(name, set()), name
