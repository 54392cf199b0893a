"""Measures an all-reduce between the machines, as one rank.

Each measurement is a batch of all-reduces in a row, as in a decode step, with one wait for the GPU at its end. Rank 0
prints a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

BATCH = 20  # reductions per measurement
NO_TORCH = 3  # exit status


def allreduce(spec: dict[str, Any]) -> int:
    """spec: rank, ranks, ip, port, sizes (bytes), repeats, seconds."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        print(error, file=sys.stderr)
        return NO_TORCH
    on_gpu = torch.cuda.is_available()
    backend, device = ("nccl", "cuda") if on_gpu else ("gloo", "cpu")
    where, limit = f"tcp://{spec['ip']}:{spec['port']}", timedelta(seconds=spec["seconds"])
    dist.init_process_group(backend, init_method=where, rank=spec["rank"], world_size=spec["ranks"], timeout=limit)
    found = {}
    for size in spec["sizes"]:
        values = torch.zeros(max(size // 2, 1), dtype=torch.bfloat16 if on_gpu else torch.float16, device=device)
        times = []
        for _ in range(3 + spec["repeats"]):
            begin = time.perf_counter()
            for _ in range(BATCH):
                dist.all_reduce(values)
            if on_gpu:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / BATCH)
        times = sorted(times[3:])  # the first three connect and warm up
        found[size] = {"median": statistics.median(times), "worst": times[-1]}
    dist.barrier()
    dist.destroy_process_group()
    if not spec["rank"]:
        print(json.dumps({"backend": backend, "seconds": found}), flush=True)
    return 0
