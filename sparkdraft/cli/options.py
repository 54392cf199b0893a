"""Flags that several commands share, and how they become an EngineConfig and SamplingParams."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams, UserError

if TYPE_CHECKING:
    from sparkdraft.llm import LLM

ENGINE_FLAGS = {
    "device": "auto, cpu or cuda",
    "dtype": "auto, quantised, float32 or bfloat16 (auto: quantised on a CPU, bfloat16 on a GPU)",
    "max_model_len": "longest prompt and output together, in tokens (0: what the model was made for, or less if the "
    "KV cache holds less)",
    "max_seqs": "requests that run at once (0: automatic)",
    "max_rows": "rows of a step, prompt chunks and decode rows together (0: automatic)",
    "max_step_ms": "longest step in milliseconds while requests decode beside a prompt, whose chunks are cut to fit "
    "(0: 200, on a GPU 50)",
    "kv": "how keys and values are kept: exact, fp8 (half the memory) or turboquant (a quarter)",
    "tq_mode": "of turboquant: hybrid (the last tokens exact), full_tq (all coded), capture_only (all exact, and the "
    "errors of coding measured) or off",
    "tq_key_bits": "of turboquant, 2 to 5",
    "tq_value_bits": "of turboquant, 2 to 5",
    "tq_ring_capacity": "of turboquant's hybrid: the last tokens that stay exact",
    "tq_initial_layers": "of turboquant: first layers that get one more key bit",
    "kv_tokens": "size of the KV cache in tokens, which one request can not exceed (0: on a GPU what fits; on a CPU "
    "what fits into a quarter of the free memory; never more than a full context for each of max_seqs requests)",
    "threads": "CPU threads (0: the cores this process may use)",
    "spec": "drafts a step: auto chooses every step, off never drafts, a number is fixed",
    "drafter": "a drafter's folder or hub id (auto: the one known for the model, none: text alone drafts)",
}
SAMPLING_FLAGS = {
    "max_tokens": "most tokens to write",
    "temperature": "0 writes the most likely token, 1 follows the model's own chances",
    "top_p": "keep the likeliest tokens that hold this share of the chance",
    "top_k": "keep this many of the likeliest tokens (0: all)",
    "min_p": "keep tokens with at least this share of the likeliest one's chance",
    "repetition_penalty": "above 1 avoids tokens that were already used",
    "seed": "the same seed writes the same text",
}


def add_engine_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="smollm2", help="a known name, a folder, a .gguf file or a hub id")
    group.add_argument("--verbose", action="store_true", help="say what was settled and how it runs on this machine")
    for name, text in ENGINE_FLAGS.items():
        default = getattr(EngineConfig(), name)
        group.add_argument(_flag(name), type=type(default), default=default, metavar="X", help=text)


def add_sampling_flags(parser: ArgumentParser, max_tokens: int, temperature: float = 0.0) -> None:
    group = parser.add_argument_group("sampling")
    defaults = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    for name, text in SAMPLING_FLAGS.items():
        default = getattr(defaults, name)
        kind = int if default is None else type(default)
        shown = "" if default is None else f" (default {default})"
        group.add_argument(_flag(name), type=kind, default=default, metavar="X", help=text + shown)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may repeat")
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever the model writes")


def sampling_params(args: Namespace) -> SamplingParams:
    values = {name: getattr(args, name) for name in SAMPLING_FLAGS}
    return SamplingParams(**values, stop=args.stop, ignore_eos=args.ignore_eos)


def engine_options(args: Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ENGINE_FLAGS}


def load_llm(args: Namespace, **more: Any) -> LLM:
    """The model with a progress bar; whatever runs otherwise than asked is said. 'more': further engine options."""
    from sparkdraft.cli.console import loading, show_fallbacks, show_plan
    from sparkdraft.llm import LLM

    options = engine_options(args) | more
    EngineConfig(model=args.model, **options)  # refuse a bad flag before torch is imported
    with loading(f"loading {args.model}") as progress:
        llm = LLM(args.model, progress=progress, **options)
    if args.verbose:
        show_plan(llm.plan, llm.facts())
    else:
        show_fallbacks(llm.plan)
    return llm


def temperature_list(text: str) -> list[float]:
    try:
        return [SamplingParams(temperature=float(part)).temperature for part in text.split(",")]
    except ValueError:
        raise UserError(f"--temperature is '{text}'; give numbers with commas between them, such as 0,0.7") from None


def read_text(path: str) -> str:
    """A file's text, or standard input's where the path is '-'."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"the file {path} can not be read: {error.strerror}") from None
    return as_text(raw, path)


def as_text(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not valid UTF-8 at byte {error.start}; save it as UTF-8") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
