"""Every kernel of kernels/cuda compiles for sm_90 and sm_121, and none is left out.

STEPS launches them, each in one shape; the other files beside this one compile every tile and read what came of it.
The kernels are found by walking the package, so that a new one without a step here fails.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.jit import JITFunction

from sparkdraft.kernels import cuda
from sparkdraft.kernels.ops import GELU_TANH, AttentionParams, AttentionView, Norm
from sparkdraft.train.kernels import block_attention, draft_loss
from tests.kernels.ahead_of_time import LIMIT, captured_launches, compile_launch, empty
from tests.kernels.test_cuda_delta_rule import recurrent_step
from tests.kernels.test_cuda_experts import experts_step
from tests.kernels.test_cuda_few_tokens import few_tokens_step
from tests.kernels.test_cuda_planes import coded_experts_step, floats_step, planes_step
from tests.kernels.test_cuda_stepping import decode_step
from tests.kernels.test_cuda_text import text_step
from tests.kernels.test_cuda_turboquant import layer_step
from tests.kernels.triton_device import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="the interpreter replaces the compiler")


def training_step() -> None:
    """Attention of drafted blocks and their loss, forward and backward."""
    blocks, width, heads, kv_heads, dim, tokens, vocab = 6, 16, 9, 3, 64, 200, 5000
    shapes = [(blocks * width, heads, dim)] + [(blocks * width, kv_heads, dim)] * 2 + [(tokens, kv_heads, dim)] * 2
    inputs = [empty(*shape).requires_grad_() for shape in shapes]
    edges = [empty(blocks, dtype=torch.int32) for _ in range(2)]
    out = block_attention.block_attention(*inputs, *edges, width, 0.125)
    torch.autograd.grad(out, inputs, empty(*out.shape))
    rows = blocks * (width - 1)
    logits, ids = empty(rows, vocab), empty(rows, dtype=torch.int64)
    stats = draft_loss.RowStats.empty((rows,), logits.device)
    teacher = empty(tokens, vocab), ids, empty(rows, dtype=torch.float32)
    for targets in (draft_loss.Targets(ids, 0.0), draft_loss.Targets(ids, 0.5, *teacher)):
        draft_loss.row_stats(logits, targets, stats)
        draft_loss.to_gradient(logits, targets, stats, empty(rows, dtype=torch.float32))


def normed_step() -> None:
    """What blocks with a norm after each sublayer add: a norm before the sum, and their gate by itself."""
    rows, norm = empty(16, 2816), Norm(empty(2816, dtype=torch.float32), 1e-6)
    cuda.add_normed(rows, empty(16, 2816), norm, norm, 0.7)
    cuda.gated(empty(16, 4224), GELU_TANH)
    cuda.sigmoid_gate(empty(16, 2816), empty(16, 2816))


def block_step() -> None:
    """A drafted block over a long context: its parts are too large for one program to join."""
    q, caches = empty(16, 32, 128), [empty(64, 8, 16, 128) for _ in range(2)]
    starts, context, tables = (empty(*shape, dtype=torch.int32) for shape in ((2,), (1,), (1, 2048)))
    view = AttentionView(starts, context, tables, 16, 32768)
    cuda.paged_attention(q, *caches, view, AttentionParams(0.1, sinks=empty(32, dtype=torch.float32)), 16)


SHAPE = (4096, 4096, torch.bfloat16, 16)
STEPS: dict[str, Callable[[], None]] = {
    "decode": lambda: decode_step(16, 32, 8, 128, 16),
    "block": block_step,
    "linear": lambda: few_tokens_step("linear", *SHAPE, False),
    "codes": lambda: planes_step("mxfp4", "linear", *SHAPE[:2]),
    "codes of experts": lambda: coded_experts_step("gpt-oss-20b", 16),
    "codes to floats": floats_step,
    "norm_gated": lambda: few_tokens_step("norm_gated", *SHAPE, False),
    "norm_argmax": lambda: few_tokens_step("norm_argmax", *SHAPE, False),
    "add_linear": lambda: few_tokens_step("add_linear", *SHAPE, False),
    "experts of a row": lambda: experts_step("qwen3-30b-a3b", 1),
    "experts of rows": lambda: experts_step("gpt-oss-20b", 16),
    "experts of many rows": lambda: experts_step("gpt-oss-20b", 64),
    "norms after": normed_step,
    "recurrent rows": lambda: recurrent_step(16, 48, torch.bfloat16, 16),
    "recurrent prompts": lambda: recurrent_step(16, 48, torch.bfloat16, 2000),
    "coded row": lambda: layer_step(1, 32, 8, 128),
    "coded prompts": lambda: layer_step(100, 32, 8, 128, seqs=64),
    "drafts from text": lambda: text_step(64, 262144, 15),
    "training": training_step,
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", LIMIT)
@pytest.mark.parametrize("step", STEPS)
def test_every_kernel_compiles(step: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = captured_launches(monkeypatch, capability, STEPS[step])
    once = {launch.kernel: launch for launch in launches}  # the last launch of each
    for launch in once.values():
        made, _ = compile_launch(capability, launch)
        assert made.asm["cubin"] and made.metadata.shared <= LIMIT[capability], launch.kernel


# What there is to compile


def package() -> Iterator[ModuleType]:
    yield cuda
    for found in pkgutil.walk_packages(cuda.__path__, cuda.__name__ + "."):
        yield importlib.import_module(found.name)


def kernels(module: ModuleType) -> dict[str, JITFunction]:
    """What a module itself compiles: entries, and functions that they call."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name: value for name, value in own.items() if value.__module__ == module.__name__}


def named(tree: ast.AST, scope: dict[str, Any]) -> set[JITFunction]:
    """Kernels that a piece of code names, by themselves or as an attribute of a module."""
    found: set[JITFunction] = set()
    for node in ast.walk(tree):
        value = scope.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = getattr(scope.get(node.value.id), node.attr, None)
        found |= {value} if isinstance(value, JITFunction) else set()
    return found


def launched(module: ModuleType) -> set[JITFunction]:
    """Kernels that a module's plain Python names: whatever is not inside a kernel."""
    tree = ast.parse(inspect.getsource(module))
    inside = kernels(module)
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in inside]
    return named(tree, vars(module))


def called(kernel: JITFunction) -> set[JITFunction]:
    """What a kernel calls, and what that calls."""
    found, todo = set[JITFunction](), [kernel]
    while todo:
        fn = todo.pop().fn
        new = named(ast.parse(textwrap.dedent(inspect.getsource(fn))), fn.__globals__) - found
        found |= new
        todo += new
    return found


def launched_by_steps(monkeypatch: pytest.MonkeyPatch, capability: int) -> tuple[set[JITFunction], set[JITFunction]]:
    """The kernels that all steps launch, and the functions that these launches hand to them as constants."""
    launches = [launch for step in STEPS.values() for launch in captured_launches(monkeypatch, capability, step)]
    handed = {value for launch in launches for value in launch.options.values() if isinstance(value, JITFunction)}
    return {launch.kernel for launch in launches}, handed


def test_no_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = list(package())
    entries = set[JITFunction]().union(*map(launched, modules))
    everything = {kernel for module in modules for kernel in kernels(module).values()}
    assert len(entries) >= 20 and entries <= everything
    compiled, handed = launched_by_steps(monkeypatch, 90)
    compiled &= launched_by_steps(monkeypatch, 121)[0]
    entries -= handed
    missing = {f"{kernel.__module__}.{kernel.__name__}" for kernel in entries - compiled}
    assert not missing, f"no step of STEPS launches {sorted(missing)}"
    unused = everything - compiled - handed - set[JITFunction]().union(*map(called, compiled | handed))
    assert not unused, f"no kernel calls {sorted(kernel.__name__ for kernel in unused)}"
