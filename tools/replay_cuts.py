"""Policies of drafting replayed on recorded blocks: what a cut by confidence saves, without running a model again.

    python tools/replay_cuts.py --record greedy.npz                        26 texts, three minutes on two idle cores
    python tools/replay_cuts.py --record sampled.npz --temperature 0.7     as many sampled ones, of 96 tokens
    python tools/replay_cuts.py greedy.npz                                 seconds

A recording holds the embedded drafter's block at every place of given texts (responses.npz; sampled texts are written
first): how sure it is of each draft, and whether the target agrees. So any policy can walk the texts. Policies: fixed
depths; blocks of 15 that are cut at a price per row, by the engine's own fit, which learns as it walks; and the real
budget, with and without the cut, on machines whose step costs are given. Loops at the end of texts are left out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from replay_acceptance import drafter_of, int32, observe_text, seen

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import Request
from sparkdraft.drafters.base import CommittedRows
from sparkdraft.drafters.dflash import DraftBlock
from sparkdraft.engine.sampler import draws_of, pick_sure
from sparkdraft.operate.bench.accept import LOOP
from sparkdraft.speculation.budget import Budget
from sparkdraft.speculation.survival import Confidence, Kind
from sparkdraft.text.repetition import loop_start

DEPTHS = [0, 1, 3, 7, 15]
START = 0.69  # as engine/drafting.py has it
OUTPUT = 96  # tokens of a sampled text
PRICES = (0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)  # of a row, in tokens
Milliseconds = Callable[[int], float]
# (drafting to a depth, verifying so many drafts), in milliseconds
MACHINES: dict[str, tuple[Milliseconds, Milliseconds]] = {
    "two Arm cores": (
        lambda depth: float(np.interp(depth, DEPTHS, [0.05, 2.2, 2.45, 4.2, 8.5])),
        lambda drafts: float(np.interp(drafts, DEPTHS, [4.85, 5.8, 8.75, 15.2, 28.6])),
    ),
    "experts on a GPU": (lambda depth: 0.5 if depth else 0.05, lambda drafts: 5.0 * (1 + drafts) ** 0.45),
    "a dense GPU": (lambda depth: 0.6 if depth else 0.05, lambda drafts: 5.0 + 0.02 * drafts),
}


@dataclass(frozen=True)
class Blocks:
    """A block of drafts at every place of every text."""

    text: NDArray[np.int32]  # [places]: number of the text; places of a text are consecutive
    gaps: NDArray[np.float32]  # [places, 15]
    right: NDArray[np.bool_]  # [places, 15]: equal to the text's own id
    drawn: bool

    def texts(self) -> list[tuple[int, int]]:
        """(first place, number of places) of each text."""
        first = [0, *(np.flatnonzero(np.diff(self.text)) + 1).tolist(), len(self.text)]
        return [(a, b - a) for a, b in pairwise(first)]

    def accepted(self, place: int, drafts: int) -> int:
        wrong = np.flatnonzero(~self.right[place, :drafts])
        return int(wrong[0]) if len(wrong) else drafts


# ---- recording


def texts_of(llm: LLM, every: int, temperature: float) -> list[tuple[list[int], int]]:
    """(ids, how many of them are the prompt's)"""
    data = np.load(Path(__file__).with_name("responses.npz"))
    ends, spans = np.cumsum(data["len"]), zip(data["len"].tolist(), data["plen"].tolist(), strict=True)
    given = [(data["tok"][e - n : e].astype(int).tolist(), p) for e, (n, p) in zip(ends.tolist(), spans, strict=True)]
    if not temperature:
        return given[::every]
    prompts = [ids[:prompt] for ids, prompt in given[1::every]]
    params = [SamplingParams(OUTPUT, temperature=temperature, seed=i) for i in range(len(prompts))]
    results = llm.generate(prompts, params)
    return [(ids + r.completions[0].ids, len(ids)) for ids, r in zip(prompts, results, strict=True)]


@torch.inference_mode()
def record(path: Path, every: int, temperature: float) -> None:
    llm = LLM("smollm2", device="cpu", ngram=False, max_seqs=8)
    drafter, found = drafter_of(llm), []
    width, ops = drafter.draft.block_size, llm.engine.runner.model.ops
    texts = texts_of(llm, every, temperature)
    for number, (ids, prompt) in enumerate(texts):
        aux_hidden = observe_text(llm, ids)
        request = Request("", 0, [0], SamplingParams(temperature=temperature), number, 1)
        for place in range(prompt, min(prompt + loop_start(ids[prompt:], LOOP), len(ids) - 1)):
            rows, block = (
                int32(list(range(place, place + width))),
                [ids[place]] + [drafter.draft.mask_token_id] * (width - 1),
            )
            where = seen(drafter, place, width)
            logits = drafter.logits(DraftBlock(int32(block), rows, rows, where, int32([*range(1, width)])))
            draws = draws_of([request], [place + 1], torch.device("cpu"), width - 1)
            drafts, gaps = pick_sure(ops, logits, draws, drafter.ends.ids)
            truth = torch.full((width - 1,), -1)
            truth[: len(ids) - 1 - place] = torch.tensor(ids[place + 1 : place + width])
            found.append((number, gaps.numpy().copy(), (drafts == truth).numpy()))
            here = rows[: len(aux_hidden) - place]
            drafter.observe(CommittedRows(aux_hidden[place : place + width], here, here))  # what the block overwrote
        print(f"text {number + 1} of {len(texts)}", flush=True)
    numbers, sure, right = zip(*found, strict=True)
    gaps = np.stack(sure).astype(np.float16)
    np.savez_compressed(path, text=np.int32(numbers), gaps=gaps, right=np.stack(right), drawn=temperature > 0)


# ---- replaying


def walk(blocks: Blocks, policy: Callable[[int], int], learn: Callable[[int, int, int], None]) -> tuple[float, float]:
    """(rows, tokens) per step. policy: how many drafts of the block at a place are verified."""
    rows = tokens = steps = 0
    for first, count in blocks.texts():
        place = first
        while place < first + count:
            drafts = policy(place)
            accepted = blocks.accepted(place, drafts)
            learn(place, drafts, accepted)
            rows, tokens, steps, place = rows + 1 + drafts, tokens + 1 + accepted, steps + 1, place + 1 + accepted
    return rows / steps, tokens / steps


def cut_at(blocks: Blocks, price: float) -> tuple[float, float]:
    """(rows, tokens) per step if a row costs so many tokens; the engine's own fit learns as it walks."""
    fit, position = Confidence(DEPTHS[-1], [Kind(START, blocks.drawn, True, True)]), np.arange(DEPTHS[-1])
    zero = np.zeros(1, np.int64)

    def policy(place: int) -> int:
        survival = fit.chances(zero, blocks.gaps[place : place + 1].astype(float))[0].cumprod()
        return int((survival >= price).sum())

    def learn(place: int, drafts: int, accepted: int) -> None:
        compared = position[None] < min(accepted + 1, drafts)
        fit.learn(0, blocks.gaps[place : place + 1].astype(float), position[None] < accepted, compared)

    return walk(blocks, policy, learn)


def controlled(blocks: Blocks, machine: str, cut: bool) -> dict[str, float]:
    """The engine's budget over all texts, one request after the other."""
    (draft, verify), rng = MACHINES[machine], random.Random(0)
    budget = Budget(DEPTHS[-1], [Kind(START, blocks.drawn, True, cut)], DEPTHS)
    for depth in DEPTHS * 3:
        budget.measured(1 + depth, 1, 100, verify(depth) / 1e3, draft(depth) / 1e3, int(depth > 0), depth)
    time = rows = tokens = steps = 0.0
    for first, count in blocks.texts():
        slot, place = budget.open(0), first
        while place < first + count:
            (depth,) = budget.choose([slot], 100)
            kept = depth
            if depth and cut:
                gaps = np.where(np.arange(DEPTHS[-1]) < depth, blocks.gaps[place : place + 1].astype(float), np.nan)
                (kept,) = budget.admit([slot], gaps, 1)
            accepted = blocks.accepted(place, kept)
            parts = draft(depth) * rng.gauss(1, 0.03), verify(kept) * rng.gauss(1, 0.03)
            budget.measured(1 + kept, 1, 100, parts[1] / 1e3, parts[0] / 1e3, int(depth > 0), depth)
            budget.record([slot], [kept], [accepted])
            time, rows, steps = time + draft(depth) + verify(kept), rows + 1 + kept, steps + 1
            tokens, place = tokens + 1 + accepted, place + 1 + accepted
        budget.close(slot)
    speed = tokens * (draft(0) + verify(0)) / time
    return {"times_plain": round(speed, 3), "rows": round(rows / steps, 2), "tokens": round(tokens / steps, 3)}


def rows_for(points: list[tuple[float, float]], tokens: float) -> float | None:
    """Rows per step that a policy needs for so many tokens, between the points measured."""
    low = [p for p in points if p[1] <= tokens]
    high = [p for p in points if p[1] >= tokens]
    if not low or not high:
        return None
    (a, b), (c, d) = max(low, key=lambda p: p[1]), min(high, key=lambda p: p[1])
    return a if b == d else a + (c - a) * (tokens - b) / (d - b)


def replay(path: Path, tokens: float) -> None:
    data = np.load(path)
    blocks = Blocks(data["text"], data["gaps"], data["right"], bool(data["drawn"]))
    fixed = [walk(blocks, lambda _, depth=depth: depth, lambda *_: None) for depth in range(1, 16)]
    cuts = [cut_at(blocks, price) for price in PRICES]
    for depth, (rows, length) in enumerate(fixed, 1):
        print(f"fixed depth {depth:2}      {rows:5.2f} rows  {length:.3f} tokens")
    for price, (rows, length) in zip(PRICES, cuts, strict=True):
        print(f"cut at {price:4.2f} per row  {rows:5.2f} rows  {length:.3f} tokens")
    need = {"fixed": rows_for(fixed, tokens), "cut": rows_for(cuts, tokens)}
    print(f"rows for {tokens:g} tokens per step: {', '.join(f'{k} {v:.2f}' for k, v in need.items() if v)}")
    found = {name: {how: controlled(blocks, name, how == "cut") for how in ("whole", "cut")} for name in MACHINES}
    for name, each in found.items():
        for how, result in each.items():
            print(f"{name}, {how}: {result}")
    summary = {"bench": "replay_cuts", "places": len(blocks.text), "texts": len(blocks.texts()), "tokens": tokens}
    print(json.dumps(summary | {"rows_needed": need, "controller": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the recording")
    parser.add_argument("--record", action="store_true", help="make it")
    parser.add_argument("--every", type=int, default=6, help="of the 152 texts, every so many (default 6)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the texts (default 0: as given)")
    parser.add_argument("--tokens", type=float, default=3.3, help="tokens per step to compare rows at (default 3.3)")
    args = parser.parse_args()
    record(args.path, args.every, args.temperature) if args.record else replay(args.path, args.tokens)


if __name__ == "__main__":
    main()
