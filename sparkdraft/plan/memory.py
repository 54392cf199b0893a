"""Sums of memory, made before anything is loaded: weights, KV cache, and what a step needs besides.

Integers in, integers and a table out; what does not fit is refused here, with the sums. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdraft.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights: int  # bytes
    kv: int
    scratch: int
    free: int

    def table(self) -> str:
        rows = (("weights", self.weights), ("KV cache", self.kv), ("a step's scratch", self.scratch))
        lines = [f"  {name:<18}{size / 2**30:8.2f} GiB" for name, size in rows]
        total = sum(size for _, size in rows)
        return "\n".join([*lines, f"  {'together':<18}{total / 2**30:8.2f} GiB of {self.free / 2**30:.2f} free"])


def weight_bytes(model: ModelConfig, itemsize: float) -> int:
    """The matrices, in the format they are kept in; an embedding that is not the head counts by itself."""
    count = model.num_parameters
    if not model.tie_embeddings:
        count += model.vocab_size * model.hidden_size
    return int(count * itemsize)


def kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize


def scratch_bytes(model: ModelConfig, max_rows: int, max_seqs: int, itemsize: int) -> int:
    """Activations of the widest layer, a few copies alive at once, and the logits of the rows that are sampled."""
    width = 4 * model.hidden_size + 3 * model.intermediate_size
    width += (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return 2 * max_rows * width * itemsize + 4 * max_seqs * model.vocab_size * 4
