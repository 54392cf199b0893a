"""What a user may choose about the engine, in one frozen record. 0 and "auto" leave the choice to plan/resolve.py.

Flags of the command line and keywords of `LLM` are these fields; an unknown one is an error. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.core import UserError
from sparkdraft.kernels.turboquant.layout import check_bits

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "quantised", "float32", "bfloat16")
KV_FORMATS = ("exact", "fp8", "turboquant")
TQ_MODES = ("off", "hybrid", "full_tq", "capture_only")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = "smollm2"  # a known name, a folder, a .gguf file or a hub id
    device: str = "auto"
    dtype: str = "auto"  # quantised on a CPU, bfloat16 on a GPU
    max_model_len: int = 0  # tokens of prompt and output together; 0: the model's own, or what the cache holds
    max_seqs: int = 0  # requests that run at once
    max_rows: int = 0  # rows per step: prompt chunks and decode rows together
    max_step_ms: int = 0  # longest step while requests decode beside a prompt, which is cut to fit; 0: 200, on a GPU 50
    kv: str = "exact"  # how keys and values are kept: as they are computed, in 8 bits, or in about 4
    tq_mode: str = "hybrid"  # of turboquant: the last tokens exact; full_tq: none; capture_only and off: all
    tq_key_bits: int = 4
    tq_value_bits: int = 3
    tq_ring_capacity: int = 128  # the last tokens that stay exact
    tq_initial_layers: int = 0  # first layers that get one more key bit
    tq_centre: bool = True  # take each layer's mean key off before coding
    kv_tokens: int = 0  # size of the KV cache; 0: what fits, on a CPU into a quarter of the free memory
    memory_fraction: float = 0.85  # of the free memory, for weights and KV together
    block_size: int = 16
    prefix_cache: bool = True
    graphs: bool = True  # replay recorded decode steps
    threads: int = 0  # 0: the cores this process may use
    spec: str = "auto"  # drafts a step: auto chooses every step, off never drafts, a number is fixed
    drafter: str = "auto"  # a folder or a hub id; auto: the one known for the model; none: no model drafts
    ngram: bool = True  # also draft from the request's own text

    @property
    def num_draft(self) -> int | None:
        """Drafts a step for requests that name none: None chooses, 0 is off."""
        return {"auto": None, "off": 0}[self.spec] if self.spec in ("auto", "off") else int(self.spec)

    def __post_init__(self) -> None:
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES), ("kv", KV_FORMATS), ("tq_mode", TQ_MODES)):
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{name} is '{value}'; it must be one of {', '.join(allowed)}")
        for name in ("max_model_len", "max_seqs", "max_rows", "max_step_ms", "kv_tokens", "threads"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 (automatic) or positive")
        if not 0 < self.memory_fraction <= 1:
            raise UserError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")
        if self.spec not in ("auto", "off") and not self.spec.isdecimal():
            raise UserError(f"spec is '{self.spec}'; it must be auto, off or a number of drafts")
        check_bits(self.tq_key_bits, "tq_key_bits")
        check_bits(self.tq_value_bits, "tq_value_bits")
        if self.tq_ring_capacity < 1:
            raise UserError(f"tq_ring_capacity is {self.tq_ring_capacity}; it must be 1 or more, or the mode full_tq")
        if self.tq_initial_layers < 0:
            raise UserError(f"tq_initial_layers is {self.tq_initial_layers}; it must be 0 or more")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise UserError(f"block_size is {self.block_size}; it must be a power of two")
