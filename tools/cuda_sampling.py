"""Times what a step does behind the logits of a GPU: argmax, sampling with several filters, edits and counts.

Logits are like those of a model of 151,936 ids: normal, with a few peaks in every other row. They are in the L2 cache
where they fit, as they are behind the matmul that writes them. Every figure is a replayed CUDA graph of 16 launches at
different positions. It checks nothing (tests/kernels/test_cuda_sampling.py does) and ends in one line of JSON.

    python tools/cuda_sampling.py              a minute on an H200
    python tools/cuda_sampling.py --std 2      flatter logits, of which top_p leaves thousands
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparkdraft.core import Request, SamplingParams
from sparkdraft.engine.sampler import EditTables, draws_of
from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.runtime.timing import seconds
from sparkdraft.kernels.cuda.sampling.argmax import argmax
from sparkdraft.kernels.ops import LogitEdits

COLUMNS, LAUNCHES, GPU = 151936, 16, torch.device("cuda")
FILTERED = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
SAMPLED = {
    "temperature 0.6, top_k 20, top_p 0.95": [FILTERED],
    "temperature 0.6, top_p 0.95": [SamplingParams(temperature=0.6, top_p=0.95)],
    "temperature 0.6": [SamplingParams(temperature=0.6)],
    "temperature 1, top_k 1000, top_p 0.9": [SamplingParams(temperature=1.0, top_k=1000, top_p=0.9)],
    "mixed, a quarter of it greedy": [
        SamplingParams(),
        FILTERED,
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
    ],
}


def logits_of(rows: int, std: float) -> Tensor:
    logits = torch.randn(rows, COLUMNS, device=GPU) * std
    peaks = torch.randint(COLUMNS, (rows, 6), device=GPU)
    height = torch.linspace(7 * std, 5 * std, 6, device=GPU).expand(rows, -1)
    logits[::2] = logits[::2].scatter(1, peaks[::2], height[::2])
    return logits


def sampled(logits: Tensor, params: list[SamplingParams]) -> list[Callable[[], object]]:
    rows = len(logits)
    requests = [Request(str(i), 0, [1], params[i % len(params)], 1000 + i, 8) for i in range(rows)]
    draws = [draws_of(requests, [64 * n + i for i in range(rows)], GPU) for n in range(LAUNCHES)]
    return [partial(cuda.sample, logits, each) for each in draws]


def edited(logits: Tensor, share: int) -> list[Callable[[], object]]:
    """Every share-th row has a presence penalty on 500 ids; 0: none."""
    rows = len(logits)
    tables = EditTables(rows, COLUMNS, frozenset([1]), GPU)
    params = SamplingParams(presence_penalty=1.5)
    prompts = torch.randint(COLUMNS, (rows, 500)).tolist()
    asking = [Request(str(i), 0, prompt, params, 0, 8) for i, prompt in enumerate(prompts)]
    slots = tables.slots(asking)
    assert slots is not None
    of_rows = [slot if share and i % share == 0 else -1 for i, slot in enumerate(slots)]
    none = torch.zeros(rows, dtype=torch.int32, device=GPU)
    edits = LogitEdits(torch.tensor(of_rows, dtype=torch.int32, device=GPU), none, none, none, tables.tables)
    return [partial(cuda.edit_logits, logits, edits)] * LAUNCHES


def counted(rows: int) -> list[Callable[[], object]]:
    counts = torch.zeros(rows, COLUMNS, dtype=torch.int32, device=GPU)
    slots = torch.arange(rows, dtype=torch.int32, device=GPU)
    return [partial(cuda.count_ids, counts, slots, slots.unsqueeze(1))] * LAUNCHES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--std", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--rows", default="1,16,64,256")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for rows in map(int, arguments.rows.split(",")):
        logits = logits_of(rows, arguments.std)
        cases = {"argmax": [partial(argmax, logits)] * LAUNCHES}
        cases |= {name: sampled(logits, params) for name, params in SAMPLED.items()}
        cases |= {"no edits": edited(logits, 0), "a penalty in every row": edited(logits, 1), "counts": counted(rows)}
        for name, launches in cases.items():
            time = seconds(launches) * 1e6
            print(f"{rows:4d} rows  {name:40s} {time:8.1f} us", flush=True)
            results.setdefault(name, {})[str(rows)] = round(time, 1)
    print(json.dumps({"device": torch.cuda.get_device_name(), "std": arguments.std, "us": results}))


if __name__ == "__main__":
    main()
