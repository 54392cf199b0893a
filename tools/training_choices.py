"""Which way of training a drafter is best at equal time: losses, depths, optimizers, each trained for the same seconds.

    sparkdraft train data --model smollm2 --out corpus --synthesise 200000        (or any corpus of the embedded model)
    python tools/training_choices.py --data corpus --seconds 34                   on a GPU, about a minute a choice

Each choice trains a fresh drafter from the same seed, its schedule fitted to the time; steps before the recording of
the step are not timed. It is then judged on fixed texts (responses.npz, the target's greedy answers to the evaluation
prompts) and on answers sampled at 0.7: the target runs once over each text, blocks are drafted from every position,
and the walk that speculation would take is replayed, at width 16. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.operate.bench.accept import LOOP
from sparkdraft.text.repetition import loop_start
from sparkdraft.train.batches import TrainBatch
from sparkdraft.train.corpus import Corpus
from sparkdraft.train.drafter_config import drafter_config, find_mask_id
from sparkdraft.train.fit import StepGraphs, Trainer, stream_of
from sparkdraft.train.generate import BulkGenerator, Prompt
from sparkdraft.train.settings import FitSettings
from sparkdraft.train.target import Target, load_target

TEXTS = Path(__file__).with_name("responses.npz")
CHOICES: dict[str, dict[str, Any]] = {
    "3 layers, D-PACE": {},
    "soft labels 1": {"soft": 1.0},
    "soft labels 0.5": {"soft": 0.5},
    "2 layers": {"layers": 2},
    "4 layers": {"layers": 4},
    "5 layers": {"layers": 5},
    "half the batch": {"context": 8192, "block_rows": 24576},
    "half the text": {"context": 8192},
    "widths 16, 8, 4": {"widths": (16, 8, 4)},
    "D-PACE's alpha 0.3": {"alpha": 0.3},
    "rate 0.03": {"lr": 0.03},
}
Texts = list[tuple[list[int], int]]  # ids, and how many of them are the prompt


def greedy_texts() -> Texts:
    data = np.load(TEXTS)
    ends = np.cumsum(data["len"])
    return [
        (data["tok"][end - size : end].astype(int).tolist(), int(prompt))
        for end, size, prompt in zip(ends, data["len"], data["plen"], strict=True)
    ]


def sampled_texts(target: Target, texts: Texts) -> Texts:
    prompts = [Prompt(ids[:count], "any", 0.7, 384, i) for i, (ids, count) in enumerate(texts)]
    written = BulkGenerator(target, 1024, len(prompts), seed=7).run(iter(prompts))
    return [([*w.prompt.ids, *w.ids.tolist()], len(w.prompt.ids)) for w in written]


def block_batch(ids: list[int], count: int, width: int, device: torch.device) -> TrainBatch:
    """A block at every response token but the last."""
    size, anchors = len(ids), np.arange(count, len(ids) - 1)
    where = anchors[:, None] + np.arange(1, width)
    labels = np.where(where < size, np.array(ids)[np.minimum(where, size - 1)], -1)
    arrays = {"ids": ids, "bounds": [0, size], "positions": range(size), "anchors": anchors, "starts": anchors * 0}
    arrays |= {"stops": anchors, "seen": anchors[:0]}
    tensors = {n: torch.tensor(np.array(a), dtype=torch.int32, device=device) for n, a in arrays.items()}
    temperature = torch.zeros(len(anchors), device=device)
    return TrainBatch(**tensors, labels=torch.tensor(labels, device=device), temperature=temperature, width=width)


@torch.no_grad()
def lengths(trainer: Trainer, texts: Texts, width: int = 16) -> tuple[float, float]:
    """Tokens a step over all texts, as they are and with their loops cut."""
    steps: list[int] = []
    cut: list[int] = []
    for ids, count in texts:
        batch = block_batch(ids, count, width, trainer.target.device)
        aux_hidden, _ = trainer.features(batch)
        blocks = trainer.block_ids(batch)
        hidden = trainer.model(batch, aux_hidden, F.embedding(blocks.flatten(), trainer.target.decoder.embedding))
        drafts = (hidden.view(*blocks.shape, -1)[:, 1:] @ trainer.target.decoder.head.weight.t()).argmax(-1)
        accepted = (drafts == batch.labels).long().cumprod(1).sum(1).tolist()
        loop, at = count + loop_start(ids[count:], LOOP), count
        while at < len(ids) - 1:
            steps.append(accepted[at - count])
            cut += steps[-1:] if at < loop else []
            at += steps[-1] + 1
    return 1 + sum(steps) / max(len(steps), 1), 1 + sum(cut) / max(len(cut), 1)


def train(trainer: Trainer, seconds: float) -> tuple[int, float]:
    """Steps in so many seconds, and milliseconds of one; the learning rate ends at nothing with them."""
    graphs, step = trainer.learn, 0
    assert isinstance(graphs, StepGraphs), "this needs a GPU"
    while len(graphs.shapes) < len(trainer.settings.all_widths) or not all(s.graph for s in graphs.shapes.values()):
        trainer.step(step)
        step += 1
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(step, step + 20):
        trainer.step(number)
    torch.cuda.synchronize()
    each = (time.perf_counter() - begin) / 20
    last = step + 20 + int(seconds / each)
    trainer.settings = replace(trainer.settings, steps=last)
    for number in range(step + 20, last):
        trainer.step(number)
    return last, each * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a corpus of smollm2, made by `sparkdraft train data`")
    parser.add_argument("--seconds", type=float, default=34.0, help="of training for each choice")
    parser.add_argument("--only", default="", help="choices to run, by part of their names, with commas between")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 256  # every text has a length of its own
    target, corpus = load_target("smollm2", "cuda", 2048), Corpus(Path(args.data))
    mask = find_mask_id(target.decoder.embedding, target.tokenizer.vocab_size)
    greedy = greedy_texts()
    sampled, rows = sampled_texts(target, greedy), []
    wanted = [part.strip() for part in args.only.split(",") if part.strip()]
    print(f"{'choice':<24} ms/step  steps  greedy  no loops  sampled at 0.7")
    for name, changes in CHOICES.items():
        if wanted and not any(part in name for part in wanted):
            continue
        settings = FitSettings("smollm2", args.data, steps=1 << 20, **changes)
        draft = DFlashConfig.read(drafter_config(target.config, settings, mask))
        with stream_of(target.device):
            trainer = Trainer(settings, target, corpus, draft)
            steps, each = train(trainer, args.seconds)
            (all_, cut), (warm, _) = lengths(trainer, greedy), lengths(trainer, sampled)
        print(f"{name:<24} {each:7.1f}  {steps:5}  {all_:6.2f}  {cut:8.2f}  {warm:6.2f}", flush=True)
        row = {"choice": name, "ms": each, "steps": steps, "greedy": all_, "no_loops": cut, "sampled": warm}
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    print(json.dumps({"bench": "training_choices", "seconds": args.seconds, "choices": rows}))


if __name__ == "__main__":
    main()
