"""The operators of `ops.Ops` as Triton kernels for NVIDIA GPUs.

Launches are shaped by host integers alone and lengths are read on the device, so a captured CUDA graph stays right
while they change. A shape must have run once before its capture, because Triton loads a kernel on first use.
"""

from typing import TYPE_CHECKING, Any

from sparkdraft.kernels.cuda.attention.paged import paged_attention
from sparkdraft.kernels.cuda.elementwise import (
    add_normed,
    gated,
    rms_norm,
    rope_queries,
    rope_write,
    sigmoid_gate,
    store_aux,
)
from sparkdraft.kernels.cuda.linear.matmul import add_linear, linear, norm_argmax, norm_gated, norm_linear, norm_logits
from sparkdraft.kernels.cuda.linear.planes import keep_experts, keep_matrix, keep_table
from sparkdraft.kernels.cuda.moe.experts import add_experts, norm_experts
from sparkdraft.kernels.cuda.moe.routing import norm_route
from sparkdraft.kernels.cuda.recurrent.delta_steps import delta_rule
from sparkdraft.kernels.cuda.recurrent.layer import causal_conv, find_states, gated_norm
from sparkdraft.kernels.cuda.runtime import compiling as compiler
from sparkdraft.kernels.cuda.runtime.graph import Graph
from sparkdraft.kernels.cuda.sampling.edit import count_ids, edit_logits
from sparkdraft.kernels.cuda.sampling.forbid import forbid_bits
from sparkdraft.kernels.cuda.sampling.sample import sample, sample_sure
from sparkdraft.kernels.cuda.sampling.stepping import accept_drafts, admit_drafts, make_rows, pack_rows, sampled_rows
from sparkdraft.kernels.cuda.sampling.text import append_text, match_text
from sparkdraft.kernels.reference import concat, embed, find_pages, keep_float_experts, keep_float_matrix

if TYPE_CHECKING:
    from sparkdraft.kernels.cuda.attention.turboquant import tq_attention as tq_attention
    from sparkdraft.kernels.cuda.attention.turboquant import tq_rope_write as tq_rope_write

NAME = "cuda"


def __getattr__(name: str) -> Any:
    """TurboQuant kernels are written in Gluon, which not every Triton has, so they are imported when first used."""
    if name in ("tq_attention", "tq_rope_write", "tq_write"):
        from sparkdraft.kernels.cuda.attention import turboquant

        return getattr(turboquant, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
