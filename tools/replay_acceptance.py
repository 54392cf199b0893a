"""Acceptance of the embedded drafter on fixed texts: the target's own greedy responses to the 152 evaluation prompts.

    python tools/replay_acceptance.py            the real engine, about five minutes on two cores
    python tools/replay_acceptance.py --replay   the second opinion, three minutes
    python tools/replay_acceptance.py --every 4 --draft-vocab ids.txt             what fewer ids to draft among cost
    python tools/replay_acceptance.py --every 4 --dtype float32 --drafter-weights fp8    what smaller weights cost

Texts of different machines part ways at near-ties, and with them acceptance; here the texts are given (responses.npz,
written once by the target in bfloat16, at most 384 tokens, loops kept), so that figures compare. The engine serves
them as requests, 15 drafts a step, and only what its sampler says is replaced by the given ids; the replay shows each
text to target and drafter in one pass and walks it as speculation would. "Loops cut" leaves out the steps whose anchor
lies where the response only repeats itself. The embedded drafter's file has 8 bits; with --drafter-weights it is read
as floats, and those are quantised. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparkdraft import SamplingParams
from sparkdraft.bench.accept import LOOP
from sparkdraft.bench.weights import FLOATS, FloatCheckpoint
from sparkdraft.config import EngineConfig
from sparkdraft.engine.load import Loaded, load_opened, open_model
from sparkdraft.engine.sampler import Sampled, Sampler, SampleRow, argmax, ids_of
from sparkdraft.kernels.view import AttentionView
from sparkdraft.models.blocks import Step
from sparkdraft.spec.dflash import DFlash, DraftBlock
from sparkdraft.spec.drafter import CommittedRows
from sparkdraft.spec.id_files import IdCounts
from sparkdraft.text.loops import loop_start

CLASSES = ("code", "maths", "json", "qa", "dialogue", "prose", "summary")
Steps = dict[str, list[int]]  # class -> accepted drafts of each step
Text = tuple[list[int], int]  # ids, and how many of them are the prompt's
Walk = list[tuple[int, int]]  # (position of the anchor, accepted drafts) of each step
VOCABULARY = 49152  # of the embedded model
BLOCKS = 64  # of the cache: room for the longest text and a block after it


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def view(first: int, rows: int) -> AttentionView:
    """'rows' rows from position 'first' on, of the one sequence whose slots are its positions."""
    tables = torch.arange(BLOCKS, dtype=torch.int32).unsqueeze(0)
    return AttentionView(int32([0, rows]), int32([first + rows]), tables, rows, first + rows)


def observe_text(llm: Loaded, ids: list[int]) -> Tensor:
    """Run the target over a whole text and show it to the drafter; returns what it was shown."""
    runner, everywhere = llm.engine.runner, int32(list(range(len(ids))))
    taps = torch.empty(len(ids), len(runner.tap_layers), llm.model_config.hidden_size)
    step = Step(int32(ids), everywhere, everywhere, view(0, len(ids)), runner.kv.layers)
    runner.model.forward(step, runner.tap_layers, taps)
    drafter_of(llm).observe(CommittedRows(taps, everywhere, everywhere))
    return taps


def drafter_of(llm: Loaded) -> DFlash:
    proposer = llm.engine.drafting.proposer
    assert proposer and isinstance(proposer.drafter, DFlash)
    return proposer.drafter


def walk(drafter: DFlash, taps: Tensor, ids: list[int], start: int) -> Walk:
    """(anchor, accepted drafts) of each step, from the anchor at 'start' to the end of the text."""
    width, accepted, p = drafter.draft.block_size, [], start
    while p < len(ids) - 1:
        rows = int32(list(range(p, p + width)))
        block = [ids[p]] + [drafter.draft.mask_token_id] * (width - 1)
        masked = DraftBlock(int32(block), rows, rows, view(p, width), int32([*range(1, width)]))
        drafts = ids_of(argmax(drafter.logits(masked)), drafter.ends.ids)
        truth = ids[p + 1 : p + width]
        count = next((i for i, (a, b) in enumerate(zip(drafts.tolist(), truth, strict=False)) if a != b), len(truth))
        here = rows[: len(taps) - p]
        drafter.observe(CommittedRows(taps[p : p + width], here, here))  # what the block overwrote
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
def replayed(llm: Loaded, texts: list[Text]) -> Iterator[Walk]:
    for ids, prompt in texts:
        yield walk(drafter_of(llm), observe_text(llm, ids), ids, prompt)


class GivenText(Sampler):
    """Says of every row what the given text has in its place, whatever the logits say."""

    texts: dict[str, list[int]]  # by request

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        said = [(self.texts[row.request.id], row.position) for row in rows]
        given = torch.tensor([ids[min(i, len(ids) - 1)] for ids, i in said], device=logits.device)
        return Sampled(given, {})


def served(llm: Loaded, texts: list[Text]) -> Iterator[Walk]:
    """All of them as requests of the engine, as many at once as it takes."""
    engine, walks = llm.engine, {str(i): Walk() for i in range(len(texts))}
    engine.sampler = GivenText(engine.sampler.vocab_size, engine.sampler.eos_ids, engine.sampler.device)
    engine.sampler.texts = {name: ids for name, (ids, _) in zip(walks, texts, strict=True)}
    position = {}  # of each request's last committed id: the anchor of its next step
    for name, (ids, prompt) in zip(walks, texts, strict=True):
        params = SamplingParams(max_tokens=len(ids) - prompt, num_draft=engine.drafting.max_depth, ignore_eos=True)
        engine.add(ids[:prompt], params, name)
    while engine.has_work:
        for piece in engine.step():
            name = piece.request_id
            if name in position:
                walks[name].append((position[name], len(piece.ids) - 1))
                position[name] += len(piece.ids)
            else:  # the first id comes with the prompt: nothing was drafted
                position[name] = piece.num_prompt
    yield from walks.values()


def load(args: argparse.Namespace) -> Loaded:
    form = args.drafter_weights
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        drafter=args.drafter,
        drafter_weights="auto" if form in ("", FLOATS) else form,
        draft_vocab=args.draft_vocab,
        weights_cache=False,
        ngram=False,
        max_seqs=8,
        profile="none",
    )
    opened = open_model(config)
    assert opened.drafter
    if form:
        opened = replace(opened, drafter=replace(opened.drafter, source=FloatCheckpoint(opened.drafter.source)))
    return load_opened(opened)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replay", action="store_true", help="one pass over each text instead of the engine's steps")
    parser.add_argument("--drafter", default="auto", help="a folder (default: the embedded one)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--dtype", default="auto", help="as `sparkdraft generate` takes it (default auto)")
    parser.add_argument("--drafter-weights", default="", help="floats, fp8, int4 or nvfp4 (default: as its file)")
    parser.add_argument("--draft-vocab", default="", help="a file of ids, as `sparkdraft generate` takes it")
    parser.add_argument("--count-rest", default="", metavar="FILE", help="count the ids of the texts left out, and end")
    parser.add_argument("--every", type=int, default=1, help="take every so many-th text (default 1)")
    args = parser.parse_args()
    how: Callable[[Loaded, list[Text]], Iterator[Walk]] = replayed if args.replay else served
    data = np.load(Path(__file__).with_name("responses.npz"))
    ends = np.cumsum(data["len"]).tolist()
    spans = zip(ends, data["len"].tolist(), data["plen"].tolist(), strict=True)
    texts = [(data["tok"][end - length : end].astype(int).tolist(), prompt) for end, length, prompt in spans]
    if args.count_rest:
        counts = IdCounts(args.count_rest, VOCABULARY)
        for ids, prompt in (text for i, text in enumerate(texts) if i % args.every):
            counts.add(ids[prompt:])
        return counts.flush()
    texts, kinds = texts[:: args.every], data["cls"][:: args.every]
    llm = load(args)
    llm.engine.overlap = None  # the device would sample by itself
    steps: Steps = {name: [] for name in (*CLASSES, "all")}
    cut: Steps = {name: [] for name in steps}  # only steps whose anchor lies before the response's loop
    for (ids, prompt), kind, taken in zip(texts, kinds, how(llm, texts), strict=True):
        loop = prompt + loop_start(ids[prompt:], LOOP)
        for name in (CLASSES[kind], "all"):
            steps[name] += [count for _, count in taken]
            cut[name] += [count for anchor, count in taken if anchor < loop]
    report(steps, cut, drafter_of(llm).draft.block_size)


def report(steps: Steps, cut: Steps, width: int) -> None:
    kept, no_loops = lengths(steps), lengths(cut)
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
