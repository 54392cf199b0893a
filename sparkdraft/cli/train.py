"""`sparkdraft train`: data, fit, eval, export: makes a drafter for a target, from nothing but the target."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.bench import accepted
from sparkdraft.cli.options import add_engine_flags, check_least, load_llm, temperature_list
from sparkdraft.core import UserError
from sparkdraft.train.memory import CPU_STEP, SHRINKS
from sparkdraft.train.settings import FitSettings
from sparkdraft.util.names import user_path
from sparkdraft.util.progress import duration, errors, progress

if TYPE_CHECKING:
    from torch import Tensor

ALL_PROMPTS, LONG = 0, 384  # of a full evaluation: prompts of each class (0: all), and most tokens of an answer
SHORT_TEXTS = 2048  # tokens of a prompt and its one answer, at most
STOPPED = 130  # the status after Ctrl-C, so that `fit && export` does not export half a run
HELP = "train a drafter for a model"
EXAMPLES = """a drafter for your own model, in four commands:
  sparkdraft train data   --model ./my-model --out corpus --synthesise 200000
  sparkdraft train fit    --model ./my-model --data corpus --out run --layers 5 --steps 20000
  sparkdraft train export run --out my-drafter
  sparkdraft train eval   --model ./my-model --drafter my-drafter

  sparkdraft train data --model smollm2 --out corpus --prompts prompts.jsonl    (your own prompts)
  sparkdraft train fit  --model smollm2 --data corpus --out run --soft 0.5      (repeat it to continue the run)
  sparkdraft train fit  --model ./my-finetune --data corpus --out run --init ./drafter-of-its-base   (after fine-tuning)
  sparkdraft train export run --out my-drafter --layout speculators             (for vLLM)
  sparkdraft train export smollm2 --out for-vllm --layout speculators           (the drafter in the package)
"""
FIT_FIELDS = {each.name: each for each in fields(FitSettings) if each.name not in ("target", "data")}


def configure(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    data = verbs.add_parser("data", help="the target writes its own training texts; the same command continues")
    _target_flags(data)
    data.add_argument(
        "--out", required=True, metavar="FOLDER", help="where the texts go; texts that are there already count"
    )
    data.add_argument("--prompts", default="", metavar="FILE", help=".jsonl with 'prompt' or 'messages', or .txt")
    data.add_argument("--synthesise", type=int, default=0, metavar="N", help="number of prompts that the target writes")
    data.add_argument("--max-new", type=int, default=384, help="longest response, in tokens (default 384)")
    text = "conversations, as tokens:share of the documents, a list ('': none; default %(default)s)"
    data.add_argument("--lengths", default="2048:0.03,4096:0.02,8192:0.01", metavar="LIST", help=text)
    data.add_argument("--greedy", type=float, default=0.5, help="share of greedy responses (default 0.5)")
    data.add_argument("--seats", type=int, default=0, help="texts written at once (0: what fits)")
    data.add_argument("--seed", type=int, default=0, help="seed of what is sampled")
    fit = verbs.add_parser("fit", help="train a drafter on them; the same command continues")
    _target_flags(fit)
    fit.add_argument("--data", required=True, metavar="FOLDER", help="a corpus, made by `train data`")
    fit.add_argument("--out", required=True, metavar="FOLDER", help="the run: its settings, checkpoint and log")
    fit.add_argument("--every", type=int, default=500, help="steps between checkpoints (default 500)")
    for name, each in FIT_FIELDS.items():
        default, text = each.default, each.metadata["help"]
        kind = str if isinstance(default, tuple) else type(default)
        if name in SHRINKS:
            default, text = None, f"{text} (default {default}, on a CPU {CPU_STEP[name]}, or less to fit in memory)"
        elif isinstance(default, tuple):
            default = ""
        elif default != "":
            text += f" (default {default})"
        fit.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=text)
    evaluate = verbs.add_parser("eval", help="measure how many drafts are accepted, by class, greedy and sampled")
    evaluate.add_argument("--per-class", type=int, default=2, help="prompts of each class, 0 for all (default 2)")
    evaluate.add_argument("--output-len", type=int, default=128, help="maximum tokens of an answer (default 128)")
    evaluate.add_argument(
        "--temperature", default="0,0.7", metavar="LIST", help="temperatures to measure (default 0,0.7)"
    )
    add_engine_flags(evaluate, without=("ngram",))
    export = verbs.add_parser("export", help="write a run's drafter as a checkpoint that engines load")
    text = "the run's folder; or a drafter in z-lab's layout: a folder, a hub id, or smollm2 for the one in the package"
    export.add_argument("run", metavar="RUN", help=text)
    export.add_argument("--out", required=True, metavar="FOLDER", help="the checkpoint")
    export.add_argument("--force", action="store_true", help="replace a drafter that is in the folder already")
    export.add_argument("--layout", default="zlab", help="zlab or speculators (default zlab)")
    export.add_argument("--bits", type=int, default=16, help="16, or 8: integers in groups of 32 (default 16)")
    text = "draft only the N most frequent ids of the corpus (0: all; default: as it was trained)"
    export.add_argument("--vocab", type=int, default=None, metavar="N", help=text)
    text = "the target, if it is no longer where `fit` found it; speculators with fewer ids reads its head"
    export.add_argument("--model", default="", help=text)
    for verb in (data, fit, evaluate, export):
        verb.epilog = EXAMPLES


def run(args: Namespace) -> int:
    return {"data": _data, "fit": _fit, "eval": _eval, "export": _export}[args.step](args)


def _target_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="the target: a known name, a folder, a .gguf or a hub id")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def _fit(args: Namespace) -> int:
    values = {name: getattr(args, name) for name in FIT_FIELDS}
    shrinks = [name for name in SHRINKS if values[name] is None]
    for name in shrinks:
        del values[name]
    values |= {name: _ids(f"--{name}", values[name]) for name in ("widths", "aux_layers")}
    settings = FitSettings(target=args.model, data=args.data, **values)
    check_least(args, every=1)
    from sparkdraft.train.fit import fit
    from sparkdraft.train.run import Run

    def report(entry: dict[str, float]) -> None:
        line = "step {step:>7} of {steps} {seconds:7.0f} s  loss {loss:6.3f}  first draft {first:5.1%}"
        line += "  length {length:5.2f}" if "length" in entry else ""
        errors.print(line.format(**entry, steps=settings.steps), markup=False, soft_wrap=True)

    def begin(step: int, seconds: float) -> None:
        meter.resume(step, settings.steps, seconds)
        if step >= settings.steps:
            _note(f"the run has finished its {step} steps already: a larger --steps trains on")
        elif step:
            _note(f"continuing after step {step} of {settings.steps}, after {duration(seconds)} of training")

    load = partial(progress, f"loading {args.model}")
    with progress("training", "steps", shows_left=True) as meter:
        reached = fit(
            settings, Path(args.out), args.device, args.every, report, load, shrinks, _note,
            begin=begin, done=lambda step: meter(step, settings.steps),
        )  # fmt: skip
    last = (Run(Path(args.out)).log() or [{}])[-1]
    print(json.dumps({"train": "fit", "run": args.out, **last}))
    if reached < settings.steps:
        then = "continues from there" if reached else "begins again, for there is no checkpoint yet"
        errors.print(f"stopped after step {reached}: the same command {then}", markup=False, soft_wrap=True)
        return STOPPED
    return 0


def _note(text: str) -> None:
    errors.print(f"note: {text}", markup=False, soft_wrap=True)


def _ids(flag: str, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError:
        raise UserError(f"{flag} is '{value}'; give comma-separated numbers, such as 16,8") from None


def _data(args: Namespace) -> int:
    from sparkdraft.train.data import check_sources, make_corpus, open_model, read_lengths

    check_sources(args.prompts or None, args.synthesise, args.max_new, args.greedy, args.seats)
    lengths = read_lengths(args.lengths)
    longest = max([SHORT_TEXTS, *(tokens for tokens, _ in lengths)])
    with progress(f"loading {args.model}") as report:
        target = open_model(args.model, args.device, longest, args.seats, report)
    with progress("writing responses") as report:
        sources = (args.prompts or None, args.synthesise)
        options = {"seed": args.seed, "seats": args.seats, "report": report, "lengths": lengths}
        summary = make_corpus(target, args.out, *sources, args.max_new, args.greedy, **options)
    speed, share = summary["tokens_per_second"], summary["loops"]
    print(f"{summary['documents']} documents, {summary['tokens']} tokens of responses in {summary['seconds']:.0f} s")
    print(f"{speed:,.0f} tokens per second; {share:.0%} ran into a loop and were cut; {summary['excluded']} left out")
    print(json.dumps({"train": "data", "model": args.model, **summary}))
    return _said_of_data(args.out, summary)


def _said_of_data(folder: str, summary: dict[str, Any]) -> int:
    """Print what may be unexpected, in a sentence; returns the exit status."""
    if summary["stopped"]:
        kept = f"{summary['all_documents']} documents of {folder} are kept"
        errors.print(f"stopped: {kept}; the same command continues from there", markup=False, soft_wrap=True)
        return STOPPED
    if summary["conversations"] is None:
        _note("the chat template writes earlier turns differently once others follow: no conversations were written")
    if missing := summary.get("self_written", {}).get("missing"):
        note = f"note: {missing} self-written prompts are missing, too few were worth asking: try another --seed"
        errors.print(note, markup=False, soft_wrap=True)
    elif summary["held"] and not summary["documents"]:
        errors.print(f"note: {folder} already has the answers to all of these prompts", markup=False, soft_wrap=True)
    return 0


def _eval(args: Namespace) -> int:
    check_least(args, per_class=0, output_len=8)
    temperatures = temperature_list(args.temperature)
    llm = load_llm(args, ngram=False)
    if llm.engine.drafting.proposer is None:
        raise UserError("There is no drafter to evaluate; name one with --drafter, and leave --spec on auto")
    depth = llm.engine.drafting.max_depth
    groups = accepted(llm, args.per_class, args.output_len, depth, temperatures)
    if args.per_class or args.output_len < LONG:
        _note(f"a short run; the full one is --per-class {ALL_PROMPTS} --output-len {LONG}")
    summary = {"train": "eval", "model": args.model, "drafter": args.drafter, "depth": depth}
    print(json.dumps(summary | {"output_len": args.output_len, "groups": groups}))
    return 0


def _export(args: Namespace) -> int:
    drafter, out = _drafter_folder(args.run), Path(args.out)
    if out.is_dir() and any(out.iterdir()) and not args.force:
        raise UserError(f"{out} is not empty: name another folder, or replace the drafter in it with --force")
    with progress(f"exporting {args.run}"):
        what, note = _convert_drafter(args, drafter) if drafter else _write_drafter(args)
    if note:
        print(f"note: {note}", file=sys.stderr)
    size = sum(file.stat().st_size for file in Path(args.out).iterdir())
    print(f"{args.out}: {what}, {args.layout} layout, {size / 1e6:.1f} MB")
    return 0


def _drafter_folder(name: str) -> str:
    """The drafter that this names, if it is one already; empty: a run's folder."""
    from sparkdraft.drafters.find import default_drafter

    if packaged := default_drafter(name):
        return packaged
    folder = user_path(name)
    is_hub_id = not folder.exists() and name.count("/") == 1 and not name.startswith((".", "~"))
    return name if is_hub_id or (folder / "config.json").is_file() else ""


def _convert_drafter(args: Namespace, drafter: str) -> tuple[str, str]:
    """Write a drafter that is a checkpoint already in another layout, or in other bits. Returns what it was made from,
    and a note or nothing."""
    from sparkdraft.drafters.find import EMBEDDED
    from sparkdraft.train.export import ExportTarget, export, read_drafter
    from sparkdraft.weights.hub import portable_name

    model = args.model or (args.run if args.run in EMBEDDED else "")
    if args.layout == "speculators" and not model:
        raise UserError("The speculators layout names the drafter's target: name it with --model")
    if args.vocab is not None:
        raise UserError("--vocab counts ids of a run's corpus, which a finished drafter does not have: leave it out")
    try:
        config, tensors, ids = read_drafter(drafter)
    except UserError as error:
        if user_path(drafter).exists():
            raise
        raise UserError(f"There is no run and no drafter in a folder {args.run}, and as a hub id: {error}") from None
    head = _head_rows(model, ids, config) if ids is not None and args.layout == "speculators" else None
    target = ExportTarget(portable_name(model)) if model else None
    note = export(config, tensors, Path(args.out), args.layout, args.bits, target=target, vocabulary=ids, head=head)
    return f"from {args.run}", note


def _write_drafter(args: Namespace) -> tuple[str, str]:
    """Returns the step of training that was exported, and a note or nothing."""
    from sparkdraft.train.corpus import Corpus
    from sparkdraft.train.drafter_config import draft_ids
    from sparkdraft.train.export import ExportTarget, export
    from sparkdraft.train.model import folded
    from sparkdraft.train.run import Run
    from sparkdraft.weights.hub import portable_name

    run = Run(Path(args.run))
    info = run.open()
    state = run.load()
    if state is None:
        raise UserError(f"{args.run} has no checkpoint yet: let `sparkdraft train fit` reach its first one")
    name, ids, head = args.model or info.settings.target, None, None
    if vocab := info.settings.vocab if args.vocab is None else args.vocab:
        ids = state.ids if vocab == info.settings.vocab else None  # whatever the corpus has become since
        ids = draft_ids(info.settings, Corpus(info.settings.data), vocab) if ids is None else ids
        head = _head_rows(name, ids, info.draft) if args.layout == "speculators" else None
    tensors, target = folded(state.model()), ExportTarget(portable_name(name))
    note = export(info.draft, tensors, Path(args.out), args.layout, args.bits, target=target, vocabulary=ids, head=head)
    return f"step {state.step}", note


def _head_rows(name: str, ids: Tensor, draft: dict[str, Any]) -> Tensor:
    from sparkdraft.drafters.dflash import DFlashConfig
    from sparkdraft.train.target import head_rows

    try:
        return head_rows(name, ids, DFlashConfig.read(draft))
    except UserError as error:
        raise UserError(
            f"The speculators layout keeps rows of the target's head beside a smaller vocabulary, and {name} does not "
            f"give them ({str(error).rstrip('.')}): name the target with --model, or export with --layout zlab or "
            "--vocab 0."
        ) from error
