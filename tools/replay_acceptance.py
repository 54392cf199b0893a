"""Acceptance of the embedded drafter on fixed texts: the target's own greedy responses to the 152 evaluation prompts.

    python tools/replay_acceptance.py               the real engine, about five minutes on two cores
    python tools/replay_acceptance.py --replay      the second opinion, three minutes
    python tools/replay_acceptance.py --preceding   by the length of the conversation before it, fifteen minutes
    python tools/replay_acceptance.py --every 4 --draft-vocab ids.txt             what fewer ids to draft among cost
    python tools/replay_acceptance.py --every 4 --dtype float32 --drafter-weights fp8    what smaller weights cost

Texts of different machines part ways at near-ties, and with them acceptance; here the texts are given (responses.npz,
written once by the target in bfloat16, at most 384 tokens, loops kept), so that figures compare. The engine serves
them as requests, 15 drafts a step, and only what its sampler says is replaced by the given ids; the replay shows each
text to target and drafter in one pass and walks it as speculation would. "Loops cut" leaves out the steps whose anchor
lies where the response only repeats itself. The embedded drafter's file has 8 bits; with --drafter-weights it is read
as floats, and those are quantised. Ends in one line of JSON.

With --preceding the texts are answers within conversations of the model with itself (conversations.npz), greedy too:
of each conversation, the ones that begin nearest to so many tokens, if any is near. The two commands below write such
a file. The one that is here was ended early: five conversations have 4,000 to 4,700 tokens; three were made longer with
turns of another conversation, whose answers do not count, and went on from there to 6,300 to 6,600 tokens:

    sparkdraft train data --out talks --device cpu --synthesise 8 --lengths 6700:1 --greedy 1 --max-new 256 --seed 3
    python tools/replay_acceptance.py --keep talks
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
from sparkdraft.config import EngineConfig
from sparkdraft.drafters.base import CommittedRows
from sparkdraft.drafters.dflash import DFlash, DraftBlock
from sparkdraft.drafters.vocabulary import IdCounts
from sparkdraft.engine.host_steps import HostSteps
from sparkdraft.engine.load import Loaded, load_opened, open_model
from sparkdraft.engine.sampler import Sampled, Sampler, SampleRow, ids_of
from sparkdraft.kernels.ops import AttentionView
from sparkdraft.models.common.blocks import Step
from sparkdraft.operate.bench.accept import LOOP
from sparkdraft.operate.bench.formats import FLOATS, FloatCheckpoint
from sparkdraft.text.repetition import loop_start
from sparkdraft.train.corpus import Corpus

TEXTS, TALKS = (Path(__file__).with_name(name) for name in ("responses.npz", "conversations.npz"))
PRECEDING, NEAREST = "256,720,1024,2048,4096,6000", 3  # tokens before an answer; answers of each conversation
NEAR = 0.25  # an answer that begins further off, by this share of the length, does not count
CLASSES = ("code", "maths", "json", "qa", "dialogue", "prose", "summary")
Steps = dict[str, list[int]]  # class -> accepted drafts of each step
Text = tuple[list[int], int]  # ids, and how many of them are the prompt's
Walk = list[tuple[int, int]]  # (position of the anchor, accepted drafts) of each step
VOCABULARY = 49152  # of the embedded model
BLOCKS = 64  # of the cache: room for the longest text and a block after it
Named = list[tuple[str, Text]]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def view(first: int, rows: int) -> AttentionView:
    """'rows' rows from position 'first' on, of the one sequence whose slots are its positions."""
    tables = torch.arange(BLOCKS, dtype=torch.int32).unsqueeze(0)
    return AttentionView(int32([0, rows]), int32([first + rows]), tables, rows, first + rows)


def seen(drafter: DFlash, first: int, rows: int) -> AttentionView:
    """The same as the drafter sees it: without the blocks that it is not shown."""
    sees, size, whole = drafter.caps.sees, drafter.kv.k[0].shape[2], view(first, rows)
    if sees is None or not (left_out := sees.left_out(first, size)):
        return whole
    kept, context = sees.kept(size), first + rows - left_out * size
    tables = torch.cat((whole.block_tables[:, :kept], whole.block_tables[:, kept + left_out :]), 1)
    return AttentionView(whole.query_start, int32([context]), tables, rows, context)


def observe_text(llm: Loaded, ids: list[int]) -> Tensor:
    """Run the target over a whole text and show it to the drafter; returns what it was shown."""
    runner, everywhere = llm.engine.runner, int32(list(range(len(ids))))
    aux_hidden = torch.empty(len(ids), len(runner.aux_layers), llm.model_config.hidden_size)
    step = Step(int32(ids), everywhere, everywhere, view(0, len(ids)), runner.kv.layers)
    runner.model.forward(step, runner.aux_layers, aux_hidden)
    drafter_of(llm).observe(CommittedRows(aux_hidden, everywhere, everywhere))
    return aux_hidden


def drafter_of(llm: Loaded) -> DFlash:
    proposer = llm.engine.drafting.proposer
    assert proposer and isinstance(proposer.drafter, DFlash)
    return proposer.drafter


def walk(drafter: DFlash, aux_hidden: Tensor, ids: list[int], start: int) -> Walk:
    """(anchor, accepted drafts) of each step, from the anchor at 'start' to the end of the text."""
    width, accepted, p = drafter.draft.block_size, [], start
    while p < len(ids) - 1:
        rows = int32(list(range(p, p + width)))
        block = [ids[p]] + [drafter.draft.mask_token_id] * (width - 1)
        masked = DraftBlock(int32(block), rows, rows, seen(drafter, p, width), int32([*range(1, width)]))
        drafts = ids_of(drafter.logits(masked).argmax(-1), drafter.ends.ids)
        truth = ids[p + 1 : p + width]
        count = next((i for i, (a, b) in enumerate(zip(drafts.tolist(), truth, strict=False)) if a != b), len(truth))
        here = rows[: len(aux_hidden) - p]
        drafter.observe(CommittedRows(aux_hidden[p : p + width], here, here))  # what the block overwrote
        accepted.append((p, count))
        p += count + 1
    return accepted


def lengths(steps: Steps) -> dict[str, float]:
    return {name: 1 + sum(counts) / max(len(counts), 1) for name, counts in steps.items()}


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
    given = GivenText(engine.sampler.vocab_size, engine.sampler.eos_ids, engine.sampler.device)
    given.texts = {name: ids for name, (ids, _) in zip(walks, texts, strict=True)}
    engine.steps = HostSteps(engine.runner, given, engine.drafting)  # a device would sample by itself
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


def responses() -> Named:
    """The given responses, by class."""
    data = np.load(TEXTS)
    ends = np.cumsum(data["len"]).tolist()
    spans = zip(data["cls"].tolist(), ends, data["len"].tolist(), data["plen"].tolist(), strict=True)
    return [
        (CLASSES[kind], (data["tok"][end - n : end].astype(int).tolist(), prompt)) for kind, end, n, prompt in spans
    ]


def answers_after(lengths: list[int]) -> Named:
    """Answers in conversations, by the tokens before them."""
    data = np.load(TALKS)
    ends, found = np.cumsum(data["len"]).tolist(), []
    for length in lengths:
        for talk, (end, size) in enumerate(zip(ends, data["len"].tolist(), strict=True)):
            ids = data["tok"][end - size : end].astype(int).tolist()
            spans = data["answers"][data["talk"] == talk].tolist()
            near = sorted(spans, key=lambda span: abs(span[0] - length))[:NEAREST]
            near = [span for span in near if abs(span[0] - length) <= NEAR * length]
            found += [(f"{length:,}", (ids[:stop], begin)) for begin, stop in near if stop - begin > 1]
    return found


def keep(folder: str) -> None:
    """Write a corpus of conversations as the file that --preceding reads."""
    corpus = Corpus(folder)
    counts = np.diff(corpus.first_span)
    np.savez_compressed(
        TALKS,
        tok=np.concatenate([corpus.ids(i) for i in range(len(corpus))]).astype(np.uint16),
        len=corpus.length.astype(np.int32),
        answers=corpus.spans.astype(np.int32),
        talk=np.repeat(np.arange(len(corpus)), counts).astype(np.int32),
    )
    print(f"{TALKS}: {len(corpus)} conversations, {int(corpus.length.sum())} tokens, {len(corpus.spans)} answers")


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
    text = f"answers after so many tokens of conversation, a list (default, where given: {PRECEDING})"
    parser.add_argument("--preceding", nargs="?", const=PRECEDING, metavar="TOKENS", help=text)
    parser.add_argument("--keep", metavar="FOLDER", help="write conversations.npz from a corpus, and measure nothing")
    args = parser.parse_args()
    if args.keep:
        keep(args.keep)
        return
    if args.replay and args.preceding:
        parser.error("--replay lays a text into the cache by itself, which is too short for conversations")
    how: Callable[[Loaded, list[Text]], Iterator[Walk]] = replayed if args.replay else served
    named = answers_after([int(part) for part in args.preceding.split(",")]) if args.preceding else responses()
    if args.count_rest:
        counts = IdCounts(args.count_rest, VOCABULARY)
        for _, (ids, prompt) in (each for i, each in enumerate(named) if i % args.every):
            counts.add(ids[prompt:])
        return counts.flush()
    llm = load(args)
    summary = measure(llm, named[:: args.every], how)
    print(json.dumps({"bench": "replay_acceptance", **summary}))


def measure(
    llm: Loaded, named: Named, how: Callable[[Loaded, list[Text]], Iterator[Walk]] = served
) -> dict[str, object]:
    """Print the tables, and return what they say."""
    steps: Steps = {name: [] for name, _ in named} | {"all": []}
    cut: Steps = {name: [] for name in steps}  # only steps whose anchor lies before the response's loop
    texts = [text for _, text in named]
    for (kind, (ids, prompt)), taken in zip(named, how(llm, texts), strict=True):
        loop = prompt + loop_start(ids[prompt:], LOOP)
        for name in (kind, "all"):
            steps[name] += [count for _, count in taken]
            cut[name] += [count for anchor, count in taken if anchor < loop]
    return report(steps, cut, drafter_of(llm).draft.block_size)


def report(steps: Steps, cut: Steps, width: int) -> dict[str, object]:
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
    return summary


if __name__ == "__main__":
    main()
