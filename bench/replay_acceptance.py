"""Acceptance of the embedded drafter on fixed texts: the target's own greedy responses to the 152 evaluation prompts.

    python bench/replay_acceptance.py            about three minutes on two cores

Texts of different machines part ways at near-ties, and with them acceptance; here the texts are given (responses.npz,
written once by the target in bfloat16, at most 384 tokens, loops kept), so that figures compare. The target runs once
over each text, the drafter observes it, and the walk that speculation would take is replayed at block 16. "Loops cut"
leaves out the steps whose anchor lies where the response only repeats itself. Ends in one line of JSON.
"""

from __future__ import annotations

import json
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
from sparkdraft.text.loops import loop_start

CLASSES = ("code", "maths", "json", "qa", "dialogue", "prose", "summary")
Steps = dict[str, list[int]]  # class -> accepted drafts of each step
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


def lengths(steps: Steps) -> dict[str, float]:
    return {name: 1 + sum(counts) / len(counts) for name, counts in steps.items()}


def per_position(counts: list[int], width: int) -> list[float]:
    """How often each draft was accepted where the ones before it were."""
    reached = [sum(a >= k for a in counts) for k in range(width)]
    return [b / a for a, b in pairwise(reached) if a]


@torch.inference_mode()
def main() -> None:
    data = np.load(Path(__file__).with_name("responses.npz"))
    llm = LLM("smollm2", device="cpu")
    ends, drafter = np.cumsum(data["len"]), drafter_of(llm)
    steps: Steps = {name: [] for name in (*CLASSES, "all")}
    cut: Steps = {name: [] for name in steps}  # only steps whose anchor lies before the response's loop
    for i, (end, prompt, kind) in enumerate(zip(ends, data["plen"].tolist(), data["cls"], strict=True)):
        ids = data["tok"][end - data["len"][i] : end].astype(int).tolist()
        taken = walk(drafter, observe_text(llm, ids), ids, prompt)
        loop = prompt + loop_start(ids[prompt:])
        for name in (CLASSES[kind], "all"):
            steps[name] += [count for _, count in taken]
            cut[name] += [count for anchor, count in taken if anchor < loop]
    kept, no_loops, width = lengths(steps), lengths(cut), drafter.caps.block_size
    print("class      steps  tokens a step  loops cut: steps  tokens a step")
    for name in steps:
        print(f"{name:<9} {len(steps[name]):6}  {kept[name]:13.2f}  {len(cut[name]):16}  {no_loops[name]:13.2f}")
    positions, cut_positions = (per_position(each["all"], width) for each in (steps, cut))
    print("position  accepted where reached  loops cut")
    for k, (share, cut_share) in enumerate(zip(positions, cut_positions, strict=True), 1):
        print(f"{k:8}  {share:22.3f}  {cut_share:9.3f}")
    found = {"length": kept, "length_loops_cut": no_loops}
    summary: dict[str, object] = {k: {name: round(x, 3) for name, x in each.items()} for k, each in found.items()}
    summary["per_position"] = [round(x, 3) for x in positions]
    summary["per_position_loops_cut"] = [round(x, 3) for x in cut_positions]
    print(json.dumps({"bench": "replay_acceptance", **summary}))


if __name__ == "__main__":
    main()
