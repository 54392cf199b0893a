"""The compiled kernels as Python functions, `c.sd_linear(...)` and so on, loaded when they are first needed. Arguments
are addresses and numbers, which nothing checks."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from types import SimpleNamespace

from sparkdraft.kernels.native import build
from sparkdraft.util.this_machine import usable_cores

_SIGNATURES = {
    "sd_set_threads": (c_int,),
    "sd_lanes": (),
    "sd_pack": (c_void_p, *(c_int64,) * 2, *(c_void_p, c_int64, c_int64) * 3),
    "sd_pack_leveled": (c_void_p, *(c_int64,) * 2, *(c_void_p,) * 2),
    "sd_embed": (c_void_p, c_int64, c_int64, *(c_void_p, c_int64, c_int64) * 3, c_int64, c_void_p, c_float),
    "sd_copy_rows": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float),
    "sd_linear": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int),
    "sd_rms_norm": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_float),
    "sd_qk_norm_rope": (
        *(c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        *(c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float),
    ),
    "sd_gated": (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_float),
    "sd_kv_write": (
        *(c_void_p, c_int64, c_int64) * 2,
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64),
    ),
    "sd_find_pages": (*(c_void_p,) * 5, *(c_int64,) * 4),
    "sd_sample": (c_void_p, *(c_int64,) * 4, *(c_void_p,) * 7, c_float),
    "sd_edit_logits": (c_void_p, *(c_int64,) * 3, *(c_void_p,) * 9, c_int64),
    "sd_make_rows": (*(c_void_p,) * 4, *(c_int64,) * 5, c_void_p),
    "sd_unit_rms": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64, c_float),
    "sd_paged_attention": (c_void_p,),
    "sd_tq_write": (c_void_p,),
    "sd_replay": (c_void_p, c_int64),
    "sd_add_normed": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float, c_float),
    "sd_softcap": (c_void_p, c_int64, c_float),
    "sd_route": (c_void_p, *(c_int64,) * 4, *(c_void_p,) * 3),
    "sd_experts": (c_void_p,),
    "sd_find_states": (*(c_void_p,) * 5, *(c_int64,) * 3),
    "sd_causal_conv": (c_void_p,),
    "sd_delta_rule": (c_void_p,),
    "sd_gated_norm": (*(c_void_p, c_int64) * 2, *(c_void_p,) * 2, *(c_int64,) * 3, c_float),
    "sd_sigmoid_gate": (*(c_void_p, c_int64) * 2, *(c_int64,) * 3),
}

c = SimpleNamespace()  # the C functions by name, once loaded; during a capture, their recorders
_reason: str | None = None


def load(cache: Path | None = None) -> None:
    """Compiles if need be, and loads the C functions; raises build.BuildError."""
    # PyDLL keeps the interpreter lock: calls last microseconds, and giving the lock away hundreds of times a token
    # would let any busy thread hold up the step for its whole switch interval.
    library = ctypes.PyDLL(str(build.library(cache)))
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int if name == "sd_lanes" else None
        setattr(c, name, function)
    set_threads(usable_cores())


def unavailable_reason() -> str | None:
    """None once the kernels are loaded (this loads them); else one sentence for the user."""
    global _reason
    if not vars(c) and _reason is None:
        try:
            load()
        except build.BuildError as error:
            _reason = str(error)
        except (OSError, AttributeError) as error:
            _reason = f"the compiled CPU kernels could not be loaded ({error}): run with --dtype float32"
    return _reason


def set_threads(threads: int) -> None:
    """Threads that share a call, including the caller. Results do not depend on it."""
    c.sd_set_threads(threads)
