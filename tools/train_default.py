"""Trains the package's drafter further, on long conversations among short texts, within a given number of seconds.

    python tools/train_default.py --out made --seconds 560                        everything, on one GPU
    python tools/train_default.py --out made --seconds 560 --texts FOLDER         with given short texts beside its own
    python tools/train_default.py --out more --seconds 560 --resume made          on from what another call has left

In order: the model writes conversations of 8,192, 4,096 and 2,048 tokens and single answers, each for its share of the
data's time (what is unfinished counts as far as it came); the drafter is trained from the packaged one, or from
--resume, with a rate that falls to nothing as the time ends; it is exported in 8 bits; and both are measured on the
given texts of replay_acceptance.py, by class and after conversations. What is left in --out, every file under 16 MB:

    drafter/        the drafter, 8 bits: replaces sparkdraft/assets/smollm2-dflash if the figures say so
    weights/        the same in 16 bits, for --resume; written again every quarter of the training
    results.json    figures before and after, times, tokens, steps; written as far as it is known after every stage
    log.jsonl       loss and length by step

A call that is killed leaves weights/ and results.json of the last quarter. The packaged drafter is measured as far as
the time allows. --texts takes the files *.npz.xz with arrays tok, len, plen and temp (all documents end to end, their
lengths, prompt lengths, temperatures). --small: a dry run for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import lzma
import math
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replay_acceptance import Named, answers_after, measure, responses

from sparkdraft import LLM
from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.train.corpus import Corpus, CorpusWriter, Finish
from sparkdraft.train.data import make_corpus, open_model
from sparkdraft.train.drafter_config import draft_ids
from sparkdraft.train.export import ExportTarget, export
from sparkdraft.train.fit import Trainer, prepare, stream_of
from sparkdraft.train.model import folded
from sparkdraft.train.settings import FitSettings

PACKAGED = Path(__file__).parent.parent / "sparkdraft" / "assets" / "smollm2-dflash"
LENGTHS = [256, 720, 1024, 2048, 4096, 6000]  # tokens before an answer, in the evaluation
EVERY = 50  # steps between two looks at the clock
SAVING = 10.0  # seconds for the last steps and for writing the drafter, where nothing is measured
SETTINGS: dict[str, Any] = {
    "layers": 5, "vocab": 24576, "widths": (16, 16, 8, 4), "lr": 0.01, "flat": 0.1, "window": 256, "sinks": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Shares of a call's seconds, and sizes."""

    conversations: tuple[tuple[int, int, float], ...]  # (tokens, how many, share of the data's time); 0 tokens: answers
    data: float = 0.28  # of all seconds
    evaluation: float = 0.15
    max_new: int = 384
    context: int = 16384
    block_tokens: int = 49152
    longest: int = 8192
    texts: int = 30_000_000  # tokens of given texts at most
    per_class: int = 0  # texts of the evaluation; 0: all
    lengths: tuple[int, ...] = tuple(LENGTHS)


# So few long ones that they end: steps of 256 conversations of 8,192 tokens read 48 GB of keys and values each.
LARGE = Plan(((8192, 96, 0.45), (4096, 256, 0.25), (2048, 768, 0.15), (0, 20000, 0.15)))
SMALL = Plan(
    ((320, 2, 0.6), (0, 4, 0.4)), 0.3, 0.3, 24, 256, 128, 320, texts=20_000, per_class=1, lengths=(256,)
)  # fmt: skip


@dataclass(slots=True)
class Call:
    """One call: its clock, its folder and what it has found so far."""

    out: Path
    end: float  # time.monotonic() at which it must have ended
    plan: Plan
    device: str
    begin: float = field(default_factory=time.monotonic)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def note(self, **found: Any) -> None:
        self.results |= found | {"seconds": round(time.monotonic() - self.begin, 1)}
        fresh = self.out / "results.json.new"
        fresh.write_text(json.dumps(self.results, indent=1) + "\n")
        fresh.replace(self.out / "results.json")
        print(json.dumps(found), flush=True)


# ---- the data


def write_data(call: Call, folder: Path, seed: int) -> None:
    """Conversations and answers, each kind until its share of the time is over."""
    longest = max(tokens for tokens, _, _ in call.plan.conversations)
    model = open_model("smollm2", call.device, max(longest, 2048))
    seconds, begin, asked = (call.end - call.begin) * call.plan.data, time.monotonic(), 0
    written, share_so_far = {}, 0.0
    for tokens, count, share in call.plan.conversations:
        share_so_far += share
        asked, until = asked + count, begin + share_so_far * seconds
        made = make_corpus(
            model, folder, None, asked, call.plan.max_new, seed=seed,
            lengths=((tokens, 1.0),) if tokens else (), until=lambda until=until: time.monotonic() > until,
        )  # fmt: skip
        written[tokens] = {name: made[name] for name in ("documents", "answers", "tokens", "prompt_tokens", "seconds")}
        _free_memory()
    call.note(data=written)


def _free_memory() -> None:
    gc.collect()  # engines and trainers refer to themselves
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _read_texts(path: Path) -> dict[str, Any]:
    with lzma.open(path) as file:
        data = np.load(io.BytesIO(file.read()))
    return {name: data[name] for name in ("tok", "len", "plen", "temp")}


def add_texts(call: Call, folder: Path, texts: Path) -> None:
    """Add given texts to the corpus, up to a number of tokens, some of each file."""
    files = sorted(texts.glob("*.npz.xz"))
    if not files:
        sys.exit(f"{texts} has no *.npz.xz: name a folder of given texts, or leave --texts out")
    each, added = call.plan.texts // len(files), 0
    info = Corpus(folder).info
    with (
        ThreadPoolExecutor(min(len(files), 8)) as pool,  # lzma lets others run; a process with a GPU must not fork
        CorpusWriter(folder, replace(info, kinds=("texts",))) as writer,
    ):
        for data in pool.map(_read_texts, files):
            ends = np.cumsum(data["len"].astype(np.int64))
            for end, length, prompt, warmth in zip(ends, data["len"], data["plen"], data["temp"], strict=True):
                if end > each:
                    break
                ids = data["tok"][int(end) - int(length) : int(end)]
                writer.add(ids, int(prompt), "texts", Finish.END, float(warmth))
                added += int(length)
    call.note(texts={"files": len(files), "tokens": added})


# ---- training


Save = Callable[[dict[str, Any], Trainer, int], None]  # config, trainer, step


def train(call: Call, settings: FitSettings, offset: int, save: Save) -> None:
    """Train until the time of the evaluation begins. offset: steps of earlier calls; the rate goes on from there. If
    the loss is no number, what was saved before stays."""
    info, target, corpus = prepare(settings, call.device, None)
    trainer = Trainer(settings, target, corpus, DFlashConfig.read(info.draft))
    end = call.end - (call.end - call.begin) * call.plan.evaluation
    begin = looked = saved = time.monotonic()
    step = looked_at = offset
    with stream_of(target.device), (call.out / "log.jsonl").open("a") as log:
        while step == offset or time.monotonic() < end:
            trainer.step(step)
            step += 1
            if step % EVERY and target.device.type == "cuda":
                continue
            entry = {"step": step, **trainer.meter.read()}  # waits for the device
            now = time.monotonic()
            each, looked, looked_at = (now - looked) / (step - looked_at), now, step
            # so many steps as the time allows, and the rate falls to nothing with the last
            trainer.settings = replace(settings, steps=step + 1 + int(max(end - now, 0) / each))
            log.write(json.dumps(entry | {"seconds": round(now - begin, 1), "ms": round(each * 1e3, 1)}) + "\n")
            log.flush()
            if not math.isfinite(entry["loss"]):
                return call.note(failed=f"the loss is no number after step {step}")
            if now - saved > (end - begin) / 4:
                save(info.draft, trainer, step)
                saved = now
        save(info.draft, trainer, step)
    call.note(training={"seconds": round(time.monotonic() - begin, 1), "steps": step - offset, "all_steps": step})


def exporter(call: Call, settings: FitSettings, corpus: Corpus) -> Save:
    target = ExportTarget("HuggingFaceTB/SmolLM2-135M-Instruct")
    ids = draft_ids(settings, corpus, settings.vocab)

    def save(config: dict[str, Any], trainer: Trainer, step: int) -> None:
        tensors = folded({name: tensor.detach().cpu() for name, tensor in trainer.model.state_dict().items()})
        for folder, bits in (("weights", 16), ("drafter", 8)):
            export(config, tensors, call.out / folder, "zlab", bits, target=target, vocabulary=ids)
        call.note(checkpoint={"step": step})

    return save


# ---- the evaluation


def chosen(plan: Plan) -> dict[str, Named]:
    given = responses()
    if plan.per_class:
        given = [given[i] for i in range(0, len(given), max(len(given) // (7 * plan.per_class), 1))]
    return {"by_class": given, "after_conversations": answers_after(list(plan.lengths))}


def evaluate(call: Call, name: str, drafter: Path, texts: dict[str, Named]) -> None:
    """Acceptance through the engine on fixed texts, as replay_acceptance.py measures it."""
    llm = LLM("smollm2", device=call.device, drafter=str(drafter), ngram=False, max_seqs=32)
    for kind, named in texts.items():
        known = call.results.get("trained", {}).get(kind, {})
        if known and call.left < known["seconds"]:
            continue  # the trained one took longer than there is left
        begin = time.monotonic()
        found: dict[str, Any] = measure(llm, named)
        kept = {key: found[key] for key in ("length", "length_loops_cut")}
        kept["seconds"] = round(time.monotonic() - begin, 1)
        call.note(**{name: call.results.get(name, {}) | {kind: kept}})
    del llm
    _free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="the folder for all that is made")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call, all in all (default 560)")
    parser.add_argument("--texts", type=Path, help="a folder of given texts, *.npz.xz")
    parser.add_argument("--resume", type=Path, help="the --out of an earlier call: go on from its weights and step")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/train_default"), help="its folder corpus is replaced (default in /tmp)"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--seed", type=int, default=0, help="another one for every call, so that texts differ")
    parser.add_argument("--no-evaluation", action="store_true", help="all time is the training's: measure elsewhere")
    parser.add_argument("--small", action="store_true", help="a dry run with toy sizes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = args.work / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    plan = SMALL if args.small else LARGE
    plan = replace(plan, evaluation=SAVING / args.seconds) if args.no_evaluation else plan
    call = Call(args.out, time.monotonic() + args.seconds, plan, args.device)
    earlier = json.loads((args.resume / "results.json").read_text()) if args.resume else {}
    init = args.resume / "weights" if args.resume else PACKAGED
    texts = chosen(call.plan)  # now, so that a file that is missing is missed before the time is spent
    write_data(call, corpus, args.seed)
    _free_memory()
    if args.texts:
        add_texts(call, corpus, args.texts)
    sizes = {"context": plan.context, "block_rows": plan.block_tokens, "longest": plan.longest}
    settings = FitSettings("smollm2", str(corpus), init=str(init), seed=args.seed, **sizes, **SETTINGS)
    call.note(corpus=about(Corpus(corpus)), settings=settings.as_dict())
    train(call, settings, int(earlier.get("checkpoint", {}).get("step", 0)), exporter(call, settings, Corpus(corpus)))
    _free_memory()
    if "checkpoint" not in call.results:
        sys.exit("nothing was saved: see log.jsonl")
    if not args.no_evaluation:
        evaluate(call, "trained", args.out / "drafter", texts)
        if call.left > 0:
            evaluate(call, "packaged", PACKAGED, texts)
    print(json.dumps(call.results))


def about(corpus: Corpus) -> dict[str, Any]:
    """How long documents are, in tokens of all documents of such lengths."""
    bounds = [0, 512, 1024, 2048, 4096, 1 << 30]
    tokens, _ = np.histogram(corpus.length, bounds, weights=corpus.length.astype(float))
    return {"documents": len(corpus), "tokens": {f"from {low}": int(n) for low, n in zip(bounds, tokens, strict=False)}}


if __name__ == "__main__":
    main()
