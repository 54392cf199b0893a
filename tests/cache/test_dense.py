"""Where the tensors of a dense cache lie in memory."""

import itertools

import torch

from sparkdraft.cache.formats.dense import HUGE_PAGE, DenseKV
from sparkdraft.kernels import reference
from sparkdraft.models.common.layers import AttentionSpec, RopeSpec


def test_layers_reach_a_new_page_of_memory_in_different_steps() -> None:
    """Memory is cleared page by page when it is first written. 60 layers at once made one step take twice its time."""
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, rope=RopeSpec(64), scale=0.125)
    cache = DenseKV([spec] * 30, 1000, 16, torch.float32, torch.device("cpu"), reference)
    tensors = [*cache.k, *cache.v]
    offsets = sorted(t.data_ptr() % HUGE_PAGE for t in tensors)
    gaps = [b - a for a, b in zip(offsets, [*offsets[1:], offsets[0] + HUGE_PAGE], strict=True)]
    assert min(gaps) >= HUGE_PAGE // len(tensors) // 2, gaps
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)), "tensors overlap"
    assert all(t.is_contiguous() and t.shape == (1000, 3, 16, 64) for t in tensors)
