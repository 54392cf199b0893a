"""`sparkdraft plan`: what a model needs and how fast it will be on a machine, before anything is loaded.

No weights are read, and torch is imported only to measure this machine. Flags are read here; operate/forecast has the
sums, and plan_report.py prints them.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkdraft.cli import plan_report
from sparkdraft.cli.console import note, show_fallbacks
from sparkdraft.config import DTYPES, ENGINE_FIELDS, EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters.base import DraftConfig, InTarget
from sparkdraft.drafters.find import default_drafter, pick, read_draft_config
from sparkdraft.drafters.vocabulary import read_ids
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.shapes import TARGET_FILES, drafter_shape, drafters, shape, targets
from sparkdraft.operate.forecast.advice import SMALLER, compare, recommend, tried, without_drafter
from sparkdraft.operate.forecast.forecast import Forecast, Question, chance_of
from sparkdraft.operate.forecast.machine import HERE, Machine, find_machine
from sparkdraft.plan.weight_formats import (
    KEPT_ON_GPU,
    WeightFormats,
    kept,
    kept_on_cpu,
    names_of,
    of_gguf,
    parts_of,
    stated,
)
from sparkdraft.util.names import did_you_mean, spelled, user_path
from sparkdraft.util.progress import progress
from sparkdraft.weights import hub
from sparkdraft.weights.checkpoint import HUB_ID, open_checkpoint, read_config_json, tensor_names

HELP = "say what fits and how fast it will be, before anything is loaded"
EXAMPLES = """examples:
  sparkdraft plan --model Qwen/Qwen3-8B                                  on this machine, measured for a few seconds
  sparkdraft plan --model qwen3-8b --machine gb10 --drafter dflash-5x    a named shape on a DGX Spark
  sparkdraft plan --model gpt-oss-120b --machine gb10 --drafter gpt-oss-120b-dflash --concurrency 4 --context 32768
  sparkdraft plan --model ./my-model --weights nvfp4,head=fp8 --machine rtx-5090 --compare
  sparkdraft plan --model qwen3-30b-a3b --machine h200 --json
"""
SHAPES_OF = {"smollm2": "smollm2-135m"}  # known models whose dimensions are a named shape,
FORMATS_OF = {"smollm2": "int4-q4_1,head=int8-q8_0,embedding=int8-q8_0"}  # and those of their files
USUAL_CONTEXT = 4096


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2",
        help="a folder, a config.json, a hub id or the name of a known shape (default smollm2)",
    )
    parser.add_argument(
        "--machine",
        default="this",
        help="gb10, h200, rtx-5090, cpu, or a file (default this: measured in a few seconds)",
    )
    parser.add_argument(
        "--drafter",
        default="auto",
        help="a folder, a hub id, a shape such as dflash-5x, or mtp (default: the one that `serve` would take)",
    )
    parser.add_argument(
        "--kv", default=ENGINE_FIELDS["kv"].default, help=f"{ENGINE_FIELDS['kv'].metadata['help']} (default exact)"
    )
    parser.add_argument(
        "--weights",
        default="auto",
        metavar="FORMAT",
        help="bfloat16, fp8, nvfp4, mxfp4 or int4; parts may differ: nvfp4,attention=fp8 (default: as in config.json)",
    )
    parser.add_argument(
        "--drafter-weights",
        default="auto",
        metavar="FORMAT",
        help="quantise the drafter at load: fp8, int4 or nvfp4 (default auto: do not)",
    )
    parser.add_argument(
        "--draft-vocab", default="", metavar="FILE", help="a file with the token ids that may be drafted"
    )
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="streams at once (default 1)")
    parser.add_argument("--context", type=int, metavar="N", help=f"tokens of each stream (default {USUAL_CONTEXT})")
    parser.add_argument(
        "--acceptance",
        type=float,
        metavar="LENGTH",
        help="tokens per step, as `bench accept` measures them at the full depth (default: those of three classes)",
    )
    parser.add_argument(
        "--compare", action="store_true", help="rank formats of weights and K/V, with drafts and without"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")


def run(args: Namespace) -> int:
    keeps = args.weights if args.weights in DTYPES else "auto"  # how the engine keeps all matrices
    drafts = {"drafter_weights": args.drafter_weights, "draft_vocab": args.draft_vocab}
    config = EngineConfig(model=args.model, kv=args.kv, dtype=keeps, **drafts)  # refuses before a machine is measured
    model, raw = read_model(args.model)
    drafter, names, named = _drafter(args.drafter, args.model, model)
    drafter = _asked(drafter, names, config, model)
    context, chances = _check(args, model), _chances(args.acceptance, drafter)
    with progress("measuring this machine") if args.machine == HERE else nullcontext():
        machine = find_machine(args.machine)
    if machine.hardware.device == "cpu" and args.drafter_weights != "auto":
        raise UserError(
            f"--drafter-weights is {args.drafter_weights}; on a CPU the sums are those of 8 bits: leave it out"
        )
    formats, label = read_formats(args.model, args.weights, raw, model, machine)
    question = Question(model, machine, config, formats, drafter, args.concurrency, context, chances, names=names)
    forecast = _forecast(question)
    weights = label or forecast.plan.weights
    advice, alternatives = recommend(forecast), compare(question, weights) if args.compare else []
    report = plan_report.Report(forecast, advice, alternatives, named, weights)
    show_fallbacks(forecast.plan.fallbacks)
    print(report.text())
    for text in machine.notes:
        note(text)
    if args.json:
        print(json.dumps(report.as_dict()))
    return 0


# ---- what is asked


def read_model(name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a named shape or a config.json; returns the config.json too, {} if there is none."""
    name = SHAPES_OF.get(name, name)
    if found := _shape_name(name):
        return shape(found), TARGET_FILES.get(found, {})
    _check_name("model", name, targets())
    try:
        raw = read_config_json(name)
    except UserError as error:
        if same := spelled(name.rpartition("/")[2], targets()):
            raise UserError(f"{error} The shape of that name needs no files: --model {same}") from error
        raise
    return read_config(raw), raw


def _shape_name(name: str) -> str | None:
    """Return the shape's name as it is spelled here, None for another model, a file or a folder."""
    return None if user_path(name).exists() else spelled(name, targets())


def _check_name(what: str, name: str, known: Sequence[str]) -> None:
    """Raises UserError for a word that can only be a shape's name and is none."""
    if "/" in name or name.endswith((".gguf", ".safetensors")) or name in hub.KNOWN or user_path(name).exists():
        return
    question = did_you_mean(name, known)
    raise UserError(
        f"Unknown {what} '{name}'{f'; {question}' if question else '.'} Known shapes are {', '.join(known)}; "
        "a folder or a hub id such as org/name works too"
    )


def read_formats(
    name: str, asked: str, raw: dict[str, Any], model: ModelConfig, machine: Machine
) -> tuple[WeightFormats | None, str]:
    """Return the formats of coded matrices and their name, or None and "" if all are as the engine keeps them on the
    machine. Formats that it does not keep are noted."""
    on_cpu = machine.hardware.device == "cpu"
    if asked not in DTYPES:
        formats = WeightFormats.parse(asked)
        if on_cpu:
            raise UserError(f"--weights is {asked}; on a CPU the engine keeps matrices quantised or in float32")
        if unread := [name for name in names_of(formats) if name not in KEPT_ON_GPU]:
            note(f"no GPU kernel of this engine reads {' or '.join(unread)} yet: these are sums, not what would run")
        return formats, asked
    if asked != "auto":
        return None, ""
    try:
        found = _in_file(name) or stated(raw, model.num_layers)
    except UserError:
        if not on_cpu:
            raise
        found = None  # 8 bits is what the CPU kernels keep of it
    if found is None:
        return None, ""
    if on_cpu:
        return kept_on_cpu(found), ""
    held = kept(found)
    if held != found:
        decoded = [name for name in names_of(found) if name not in KEPT_ON_GPU]
        note(f"{' and '.join(decoded)} weights of the file become bfloat16 at load: no kernel here reads them")
    return held, " and ".join(sorted({part.format for part in parts_of(model, held)}))


def _in_file(name: str) -> WeightFormats | None:
    """Read the formats in a GGUF's header; None for another file."""
    if name in FORMATS_OF:
        return WeightFormats.parse(FORMATS_OF[name])
    if not name.endswith(".gguf"):
        return None
    from sparkdraft.weights.gguf import GgufCheckpoint

    opened = open_checkpoint(name)
    assert isinstance(opened, GgufCheckpoint), name
    return of_gguf(opened.matrix_types())


def _drafter(name: str, model_name: str, model: ModelConfig) -> tuple[DraftConfig | None, list[str], str]:
    """Read the drafter as read_drafter does, with its name; `auto` is the one that `serve` would take."""
    if name != "auto" or _shape_name(model_name):
        return *read_drafter(name, model_name, model), name

    folder: Path | None = user_path(model_name)
    if folder and not folder.exists():
        folder = hub.cached_snapshot(model_name) if HUB_ID.fullmatch(model_name) else None
    held = list[str]()
    if folder and folder.is_dir():
        try:
            held = tensor_names(folder)
        except UserError as error:  # a plan needs no weights: they may be still to come
            note(f"whether the model's file holds a head that drafts is not known: {error}")

    def in_target(place: InTarget) -> tuple[DraftConfig, list[str]]:
        return place.read(model, held, Path(model_name)), []

    found = pick(model_name, model, held, lambda path: _open_drafter(path, model), in_target)
    show_fallbacks(found.fallbacks)
    return *(found.drafter or (None, [])), found.name


def read_drafter(name: str, model_name: str, model: ModelConfig) -> tuple[DraftConfig | None, list[str]]:
    """Read a drafter, with the names of its tensors if its file is at hand, because it may have tables of its own."""
    found = default_drafter(model_name) if name == "auto" else None if name == "none" else name
    if found is None:
        return None, []
    if not user_path(found).exists() and (shaped := spelled(found, drafters())):
        return drafter_shape(shaped, model), []
    _check_name("drafter", found, drafters())
    return _open_drafter(found, model)


def _open_drafter(name: str, model: ModelConfig) -> tuple[DraftConfig, list[str]]:
    """Raises UserError for a drafter that does not fit."""
    folder = user_path(name)
    names = tensor_names(folder) if folder.is_dir() else []
    draft = read_draft_config(read_config_json(name), names, folder)
    draft.check_fits(model)
    return draft, names


def _asked(
    drafter: DraftConfig | None, names: list[str], config: EngineConfig, model: ModelConfig
) -> DraftConfig | None:
    """Limit the drafter to the ids of --draft-vocab."""
    if drafter is None and (config.draft_vocab or config.drafter_weights != "auto"):
        raise UserError("--drafter-weights and --draft-vocab need a drafter: name one with --drafter")
    if drafter is None or not config.draft_vocab:
        return drafter
    return drafter.among(len(read_ids(config.draft_vocab, model.vocab_size)), names)


def _check(args: Namespace, model: ModelConfig) -> int:
    """Check --concurrency and --context; returns the context."""
    context = min(USUAL_CONTEXT, model.max_position) if args.context is None else args.context
    if args.concurrency < 1:
        raise UserError(f"--concurrency is {args.concurrency}; ask for 1 stream or more")
    if not 1 <= context <= model.max_position:
        raise UserError(f"--context is {context}; the model was made for 1 to {model.max_position:,} tokens")
    return context


def _chances(acceptance: float | None, drafter: DraftConfig | None) -> dict[str, float] | None:
    if acceptance is None:
        return None
    if drafter is None:
        raise UserError("--acceptance needs a drafter whose drafts are accepted: name one with --drafter")
    if not 1 <= acceptance <= drafter.block_size:
        raise UserError(
            f"--acceptance is {acceptance:g}; a step of this drafter commits 1 to {drafter.block_size} tokens"
        )
    return {"as measured": chance_of(acceptance, drafter.block_size - 1)}


def _forecast(question: Question) -> Forecast:
    """Raises UserError if it does not fit, naming what would: no drafter, or smaller weights."""
    try:
        return Forecast(question)
    except UserError as error:
        alone = without_drafter(question)
        others = {"without the drafter": alone} if question.drafter else {}
        for name in SMALLER if question.machine.hardware.device == "cuda" else ():
            unread = "" if name in KEPT_ON_GPU else ", which no kernel here reads yet,"
            formats = WeightFormats.parse(name)
            others[f"in {name}{unread}"] = replace(question, formats=formats)
            if question.drafter:
                others[f"in {name}{unread} and without the drafter"] = replace(alone, formats=formats)
        for name, other in others.items():
            if (found := tried(other)[0]) and found.running():
                raise UserError(f"{error}; {name} it would fit, with {found.max_tokens:,} tokens of context") from None
        raise
