"""Times whole recorded decode steps of a model's shape on a GPU, and searches tiles by them.

A tile that is the fastest by itself may be slower in a step, where launches wait for each other and share the L2. Here
a model of some layers, with random weights, runs one step of one new row per sequence, as the engine records it, and a
tile is judged by that step's time. A row alone and the first of a block of 16 must agree to the bit, or the tile is
refused. Routers and heads keep their tiles: they are a small share of a step's time, or at their floor.

    PYTHONPATH=. python tools/cuda_step.py qwen3-30b-a3b                            microseconds per step
    PYTHONPATH=. python tools/cuda_step.py qwen3-30b-a3b --form int4 --tune --out tiles.json
    PYTHONPATH=. python tools/cuda_step.py gpt-oss-20b --rows 1,64 --tune --only experts --limit 90
    PYTHONPATH=. python tools/cuda_step.py qwen3-30b-a3b --layers 1 --tune --most 2 --dry      does it work? A tiny
                                                                     model of the same kind in Triton's interpreter
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.ops import AttentionView
from sparkdraft.models.common.blocks import Decoder, Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.registry import architecture, read_config
from sparkdraft.operate.bench.random_model import RandomCheckpoint
from sparkdraft.operate.bench.shapes import TARGET_FILES, shape
from sparkdraft.operate.tune import tiles
from sparkdraft.operate.tune.tiles import expert_groups, families
from sparkdraft.weights.loader import Loader

if DRY:
    import tests.kernels.triton_device  # noqa: F401  # mends the interpreter

DEVICE, DTYPE = (torch.device("cpu"), torch.float16) if DRY else (torch.device("cuda"), torch.bfloat16)
BLOCK, CONTEXT = 16, 384  # positions: of a block of the cache, and those that each row sees
GOAL = 0.03  # seconds of replays per figure
SMALLEST = 1 << 20  # numbers of a matrix whose tiles are searched
TINY = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320,
}  # fmt: skip


def build(name: str, layers: int, form: str) -> Decoder:
    """The first layers of a shape, with its embedding and head."""
    model: ModelConfig | dict[str, object]
    if name in TARGET_FILES:
        file = TARGET_FILES[name] | (TINY if DRY else {})
        text = file | file.get("text_config", {})
        cut = {"num_hidden_layers": layers}
        if "layer_types" in text:
            cut["layer_types"] = text["layer_types"][:layers]
        model = file | ({"text_config": file["text_config"] | cut} if "text_config" in file else cut)
        config = read_config(model)
    else:
        config = model = replace(shape(name), layers=shape(name).layers[:layers])
    load = Loader(RandomCheckpoint(model, str(DEVICE), form), DEVICE, DTYPE, cuda)
    return architecture(config.model_type).build(config, load, cuda, 4096)


class Steps:
    """One new row of each of some sequences; and blocks of 1 and of 16 rows of one sequence, which begin alike."""

    def __init__(self, decoder: Decoder, rows: list[int]) -> None:
        assert len(decoder.config.attention) == len(decoder.layers), "recurrent layers have no step here"
        self.decoder, self.rows, block = decoder, rows, few_tokens.MOST_TOKENS
        blocks, most = CONTEXT // BLOCK + 1, max(rows)
        kv = DenseKV(decoder.config.attention, most * blocks, BLOCK, DTYPE, DEVICE, cuda, block)
        for each in (*kv.k, *kv.v):
            each.normal_()
        tables = torch.randperm(most * blocks).int().view(most, blocks).to(DEVICE)
        ids = (_range(max(most, block)) * 7 + 5) % decoder.config.vocab_size
        last = tables[:, -1] * BLOCK  # where the block of each sequence lies that new rows go to

        def step(count: int, seqs: int) -> Step:
            each = count // seqs
            positions, slots = _range(each).repeat(seqs) + CONTEXT, (last[:seqs, None] + _range(each)).flatten()
            lengths = torch.full((seqs,), CONTEXT + each, dtype=torch.int32, device=DEVICE)
            view = AttentionView(_range(seqs + 1) * each, lengths, tables[:seqs], each, 4096)
            return Step(ids[:count], positions, slots, view, kv.layers)

        self.steps = {count: step(count, count) for count in rows}
        self.alone, self.block = step(1, 1), step(block, 1)

    def run(self, rows: int) -> Tensor:
        return self.decoder.likeliest(self.decoder.forward(self.steps[rows]))

    def measure(self, rows: list[int] | None = None) -> list[float]:
        """Seconds of each step. Raises RuntimeError where rows depend on their neighbours."""
        alone, block = self.decoder.forward(self.alone), self.decoder.forward(self.block)
        if not torch.equal(alone[0], block[0]):
            raise RuntimeError("rows depend on their neighbours")
        return [tiles.seconds([partial(self.run, count)], GOAL) for count in rows or self.rows]


def _range(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class Job:
    key: tuned.Key
    tried: list[list[int]]
    rows: list[int]  # of the steps that run it


def jobs(decoder: Decoder, rows: list[int]) -> Iterator[Job]:
    """Tiles of all kernels that these steps run, but for small matrices and the head."""
    gpu = gpu_of(DEVICE)
    few, many = ([count for count in rows if (count <= few_tokens.MOST_TOKENS) == small] for small in (True, False))
    for family in families(decoder):
        (out, in_), layout, may_split = family.shape, family.members[0].layout, family.kind == "linear"
        if (out * in_ < SMALLEST and not DRY) or family.kind == "norm_argmax":
            continue
        if few:
            tried = tiles.float_tiles(out, in_, gpu, may_split)
            if layout:
                tried = tiles.coded_tiles(out, in_, layout.tile, family.form, gpu, may_split)
            yield Job(tuned.Key(few_tokens.KERNEL, family.form, family.shape), tried, few)
        for size in {few_tokens.block_tokens(count) for count in many} if layout else ():
            key = tuned.Key(few_tokens.WIDE, family.form, (out, in_, size))
            yield Job(key, tiles.wide_tiles(layout.tile, size), many)
    for group in expert_groups(decoder):
        gate_up, down, top_k = group[0].gate_up, group[0].down, group[0].spec.top_k
        assert gate_up.tiles and down.tiles
        coded = gate_up.tiles.layout is not None
        sizes = {experts.block_size(count, top_k, gate_up.count, coded) for count in many}
        for key in experts.tile_keys(gate_up, down, top_k, max(rows)):
            ran_by = few if key.kernel in experts.FEW else many if key.shape[-1] in sizes else []
            matrix = gate_up.tiles if key.kernel in (experts.GATE_UP, experts.FEW_GATE_UP) else down.tiles
            if ran_by:
                tried = tiles.expert_tiles(key.kernel, key.shape, key.form, gpu, few_tokens.step_of(matrix))
                yield Job(key, tried, ran_by)


def search(steps: Steps, only: list[str], has_time: Callable[[], bool], most: int | None) -> tiles.TileSearch:
    """Greedy: one kernel after the other, each beside the best of those before. only: parts of what jobs are called."""
    found = tiles.TileSearch(gpu_of(DEVICE), has_time, most=most)
    for job in jobs(steps.decoder, steps.rows):
        name = f"{job.key.kernel} {job.key.form} {'x'.join(map(str, job.key.shape))}"
        if not any(part in name for part in only):
            continue
        print(name, flush=True)

        def once(job: Job = job) -> None:
            """All that `Steps.measure` runs."""
            for step in (*(steps.steps[count] for count in job.rows), steps.alone, steps.block):
                steps.decoder.forward(step)

        found.best(*job.key, job.tried, partial(steps.measure, job.rows), once)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape")
    parser.add_argument("--form", default="", help="of the layers' matrices: int4, nvfp4, fp8, mxfp4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", default="1,16", help="numbers of rows, with commas between them")
    parser.add_argument("--tune", action="store_true", help="search tiles")
    parser.add_argument("--only", default="", help="parts of names, such as experts,2048x4096")
    parser.add_argument("--most", type=int, default=None, help="tiles that are tried per kernel and shape")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for the search")
    parser.add_argument("--out", type=Path, help="file of tiles that the best ones are laid over")
    parser.add_argument("--dry", action="store_true", help="in the interpreter, to try the script")
    args, begin = parser.parse_args(), time.perf_counter()
    torch.manual_seed(0)
    with torch.inference_mode():
        decoder = build(args.shape, args.layers, args.form)
        steps = Steps(decoder, [int(count) for count in args.rows.split(",")])
        before = after = steps.measure()
        print(f"{args.shape} {args.form} {args.layers} layers: {tiles.micros(before)} per step", flush=True)
        if args.tune:
            has_time = lambda: time.perf_counter() - begin < args.limit  # noqa: E731
            found = search(steps, args.only.split(","), has_time, args.most)
            after = steps.measure()
            print(f"after the search: {tiles.micros(after)}, {time.perf_counter() - begin:.0f} s")
            if args.out:
                found.save(args.out)
    names = ("shape", "form", "layers", "rows")
    print(json.dumps({name: getattr(args, name) for name in names} | {"before": before, "after": after}))


if __name__ == "__main__":
    main()
