"""Checks and times MTP heads (drafters/mtp.py) on a GPU: logits against plain torch, and replayed passes by depth.

A head of each published shape, with random weights and tables of its own, observes sequences and drafts. First every
pass's logits are compared with those of the reference kernels on the same device, for the same ids. Then all passes of
a proposal are recorded as one CUDA graph, as in an overlapped step, and replayed; bytes are what a proposal reads at
least, shown as a share of a measured copy. It ends in a line of JSON, and in an error if logits differ.

    python tools/cuda_mtp.py                 about two minutes on an H200
    python tools/cuda_mtp.py --only 27b --limit 60
    python tools/cuda_mtp.py --dry           a small shape in Triton's interpreter: whether the script itself works

Whole steps with a target, whose acceptance is given: one depth, and all of them against the engine's own choice.

    sparkdraft bench offline --shape qwen3.5-27b --drafter-shape mtp --synthetic-acceptance 3.9 --spec 4
    sparkdraft bench depth --shape qwen3.5-27b --drafter-shape mtp --synthetic-acceptance 4.9 --concurrency 1,4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.drafters.base import Anchors, CommittedRows, DraftBuild, Score
from sparkdraft.drafters.mtp import MAX_DEPTH, MtpConfig, MtpHead
from sparkdraft.kernels import cuda, reference
from sparkdraft.kernels.ops import Ops
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec
from sparkdraft.operate.bench.random_model import RandomCheckpoint
from sparkdraft.operate.bench.shapes import TARGET_FILES, shape
from sparkdraft.operate.forecast.rates import memory_bandwidth
from sparkdraft.weights.loader import Loader

if DRY:
    import tests.kernels.triton_device  # noqa: F401  # mends the interpreter

DEVICE, DTYPE = (torch.device("cpu"), torch.float32) if DRY else (torch.device("cuda"), torch.bfloat16)
SHAPES = ("qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-coder-next")
BLOCK = 16
CONTEXT = 24 if DRY else 2048
STREAMS = (2,) if DRY else (1, 4, 16)
# Of the largest logit. The reference multiplies by cuBLAS in another order, and rounds each result to bfloat16.
MOST_ERROR = 1e-4 if DRY else 0.03


@dataclass(frozen=True)
class Case:
    """A head, and sequences that it has observed."""

    head: MtpHead
    anchors: Anchors

    @staticmethod
    def of(config: MtpConfig, ops: Ops, streams: int) -> Case:
        source = RandomCheckpoint(config.tensor_shapes(), str(DEVICE))
        blocks = -(-(CONTEXT + MAX_DEPTH) // BLOCK)
        kv = DenseKV(config.model.attention, streams * blocks, BLOCK, DTYPE, DEVICE, ops)
        nobody = SimpleNamespace(embedding=None, head=None)  # the head's tables are its own
        load = Loader(source, DEVICE, DTYPE, ops)
        given = DraftBuild(load, ops, nobody, kv, blocks * BLOCK, streams)  # type: ignore[arg-type]
        head = config.build(given)
        rng = torch.Generator().manual_seed(1)
        vocab, hidden = config.model.vocab_size, config.model.hidden_size
        order = torch.randperm(streams * blocks, generator=rng).int().view(streams, blocks)
        positions = torch.arange(CONTEXT - 1, dtype=torch.int32)
        slots = order[:, (positions // BLOCK).long()] * BLOCK + positions % BLOCK
        rows = streams * len(positions)
        states = torch.randn(rows, 1, hidden, generator=rng).to(DEVICE, DTYPE)
        ids = torch.randint(vocab, (rows,), generator=rng, dtype=torch.int32).to(DEVICE)  # that follow the rows
        seen = (positions.repeat(streams).to(DEVICE), slots.flatten().to(DEVICE))
        head.observe(CommittedRows(states, *seen, ids))
        length = torch.full((streams,), CONTEXT, dtype=torch.int32, device=DEVICE)
        last = [each.view(streams, len(positions), -1)[:, -1] for each in (ids, states)]
        tokens, hidden_states = last[0].flatten().contiguous(), last[1].unsqueeze(1).contiguous()
        anchors = Anchors(tokens, length, order.to(DEVICE), BLOCK, blocks * BLOCK, hidden=hidden_states)
        return Case(head, anchors)

    def logits(self, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of all passes, [passes, streams, vocab], and the likeliest ids [streams, passes]. ids: picked instead."""
        found: list[Tensor] = []

        def pick(score: Score, each: int, drafted: int = 0, columns: Tensor | None = None) -> Tensor:
            found.append(score(False).clone())
            return found[-1].argmax(-1, keepdim=True) if ids is None else ids[:, drafted : drafted + 1]

        drafts = self.head.propose(self.anchors, MAX_DEPTH, pick)
        return torch.stack(found), drafts

    def seconds(self, depth: int, repeats: int = 20) -> float:
        """Of a recorded proposal, greedy."""

        def pick(score: Score, each: int, drafted: int = 0, columns: Tensor | None = None) -> Tensor:
            return score(True).view(-1, each)

        def run() -> Tensor:
            return self.head.propose(self.anchors, depth, pick)

        if DRY:
            repeats, replay = 1, run
        else:
            run()
            replay = cuda.Graph(run).replay
        times = []
        for _ in range(1 if DRY else 3):
            _wait()
            begin = time.perf_counter()
            for _ in range(repeats):
                replay()
            _wait()
            times.append((time.perf_counter() - begin) / repeats)
        return min(times)


def _wait() -> None:
    if not DRY:
        torch.cuda.synchronize()


def config_of(name: str) -> MtpConfig:
    config = MtpConfig.of(_small(shape(name)) if DRY else shape(name))
    return replace(config, own_embedding=True, own_head=True)


def _small(model: ModelConfig) -> ModelConfig:
    attention = model.attention[0]
    assert isinstance(attention, AttentionSpec)
    rope = replace(attention.rope, head_dim=32, rotary_dim=8)
    attention = replace(attention, num_heads=4, num_kv_heads=2, head_dim=32, rope=rope)
    mlp = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, ExpertsSpec)), model.layers[0].mlp)
    small = (
        replace(mlp, intermediate_size=96)
        if isinstance(mlp, DenseSpec)
        else replace(mlp, num_experts=8, top_k=3, intermediate_size=32, shared_size=48)
    )
    return replace(model, hidden_size=64, vocab_size=320, layers=(LayerSpec(attention, small),))


def check(config: MtpConfig, streams: int) -> float:
    """The largest difference from the reference's logits, as a share of the largest of them."""
    expected, ids = Case.of(config, reference, streams).logits(None)
    found, _ = Case.of(config, cuda, streams).logits(ids)
    return float((found - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
def measure(name: str, bandwidth: float, streams: int) -> list[dict[str, object]]:
    case, rows = Case.of(config_of(name), cuda, streams), []
    for depth in (2,) if DRY else range(1, MAX_DEPTH + 1):
        took, reads = case.seconds(depth), case.head.reads(depth)
        nbytes = reads.propose + streams * CONTEXT * reads.kv_per_token
        share = nbytes / took / bandwidth
        said = f"{took * 1e6:9.1f} us  {nbytes / 1e9:6.2f} GB  {share:4.0%}"
        print(f"{name:<18} {streams:3} streams  {depth} drafts  {said}")
        rows.append({"shape": name, "streams": streams, "depth": depth, "us": round(took * 1e6, 1), "share": share})
    return rows


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of shapes' names, with commas between them")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which nothing new begins")
    parser.add_argument("--dry", action="store_true", help="a small shape in Triton's interpreter")
    args = parser.parse_args()
    names = [name for name in SHAPES if name in TARGET_FILES and any(part in name for part in args.only.split(","))]
    begin, rows, wrong = time.monotonic(), list[dict[str, object]](), list[str]()
    bandwidth = 1e9 if DRY else memory_bandwidth("cuda")
    for name in names:
        for streams in STREAMS:
            if time.monotonic() - begin > args.limit:
                print(f"stopped at {name}, {streams} streams: {args.limit:g} s are over")
                break
            error = check(config_of(name), streams)
            print(f"{name:<18} {streams:3} streams  logits differ by {error:.2%} of the largest")
            wrong += [f"{name}, {streams} streams: {error:.2%}"] if not error < MOST_ERROR else []
            rows += measure(name, bandwidth, streams)
    print(json.dumps({"tool": "cuda_mtp", "bandwidth_gb_s": round(bandwidth / 1e9), "wrong": wrong, "rows": rows}))
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
