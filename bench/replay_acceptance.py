"""Acceptance of the embedded drafter on fixed texts: the target's own greedy responses to the 152 evaluation prompts.

    python bench/replay_acceptance.py            about three minutes on two cores

Texts of different machines part ways at near-ties, and with them acceptance; here the texts are given (responses.npz,
written once by the target in bfloat16, at most 384 tokens, loops kept), so that figures compare. The target runs once
over each text, the drafter observes it, and the walk that speculation would take is replayed at block 16. Ends in one
line of JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparkdraft import LLM
from sparkdraft.engine.sampler import argmax
from sparkdraft.kernels.view import AttentionView
from sparkdraft.models.blocks import Step
from sparkdraft.spec.drafter import DraftBlock, Drafter

CLASSES = ("code", "maths", "json", "qa", "dialogue", "prose", "summary")
BLOCKS = 64  # of the cache: room for the longest text and a block after it


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def view(first: int, rows: int) -> AttentionView:
    """'rows' rows from position 'first' on, of the one sequence whose slots are its positions."""
    tables = torch.arange(BLOCKS, dtype=torch.int32).unsqueeze(0)
    return AttentionView(int32([0, rows]), int32([first + rows]), tables, rows, first + rows)


def observe_text(llm: LLM, ids: list[int]) -> Tensor:
    """Run the target over a whole text and show it to the drafter; returns what it was shown."""
    runner, everywhere = llm.engine.runner, int32(list(range(len(ids))))
    taps = torch.empty(len(ids), len(runner.tap_layers), llm.model_config.hidden_size)
    step = Step(int32(ids), everywhere, everywhere, view(0, len(ids)), runner.kv)
    runner.model.forward(step, runner.tap_layers, taps)
    drafter_of(llm).observe(taps, everywhere, everywhere)
    return taps


def drafter_of(llm: LLM) -> Drafter:
    assert llm.engine.drafting.block is not None
    return llm.engine.drafting.block.drafter


def loop_start(ids: list[int], longest: int = 64) -> int:
    """Where a text begins to repeat itself to its end, an exact cycle having been seen once; else its length."""
    for period in range(1, longest + 1):
        start = len(ids)
        while start > period and ids[start - 1] == ids[start - 1 - period]:
            start -= 1
        if len(ids) - start >= max(longest, 2 * period):
            return start
    return len(ids)


def walk(drafter: Drafter, taps: Tensor, ids: list[int], start: int) -> list[tuple[int, int]]:
    """(anchor, accepted drafts) of each step, from the anchor at 'start' to the end of the text."""
    width, accepted, p = drafter.caps.block_size, [], start
    while p < len(ids) - 1:
        rows = int32(list(range(p, p + width)))
        block = [ids[p]] + [drafter.caps.mask_id] * (width - 1)
        drafts = argmax(
            drafter.propose(DraftBlock(int32(block), rows, rows, view(p, width), int32([*range(1, width)])))
        )
        truth = ids[p + 1 : p + width]
        count = next((i for i, (a, b) in enumerate(zip(drafts.tolist(), truth, strict=False)) if a != b), len(truth))
        drafter.observe(taps[p : p + width], rows[: len(taps) - p], rows[: len(taps) - p])  # what the block overwrote
        accepted.append((p, count))
        p += count + 1
    return accepted


@torch.inference_mode()
def main() -> None:
    data = np.load(Path(__file__).with_name("responses.npz"))
    llm = LLM("smollm2", device="cpu")
    ends = np.cumsum(data["len"])
    steps: dict[str, list[int]] = defaultdict(list)
    cut: list[int] = []
    for i, (end, prompt, kind) in enumerate(zip(ends, data["plen"], data["cls"], strict=True)):
        ids = data["tok"][end - data["len"][i] : end].astype(int).tolist()
        taken = walk(drafter_of(llm), observe_text(llm, ids), ids, int(prompt))
        loop = int(prompt) + loop_start(ids[int(prompt) :])
        steps[CLASSES[kind]] += [count for _, count in taken]
        cut += [count for anchor, count in taken if anchor < loop]
    steps["all"] = [a for counts in steps.values() for a in counts]
    steps["loops cut"] = cut
    lengths = {name: round(1 + sum(counts) / len(counts), 3) for name, counts in steps.items()}
    for name, length in lengths.items():
        print(f"{name:<10}{len(steps[name]):6} steps  {length:5.2f} tokens a step")
    reached = [sum(a >= k for a in steps["all"]) for k in range(drafter_of(llm).caps.block_size)]
    positions = [round(b / a, 3) for a, b in pairwise(reached) if a]
    print(json.dumps({"bench": "replay_acceptance", "length": lengths, "per_position": positions}))


if __name__ == "__main__":
    main()
