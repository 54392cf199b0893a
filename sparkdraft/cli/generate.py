"""`sparkdraft generate`: streams the text that follows one prompt, and prints what it cost."""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sparkdraft.cli import STARTED
from sparkdraft.cli.console import WordWrap, terminal_width
from sparkdraft.cli.options import add_engine_flags, add_sampling_flags, as_text, load_llm, read_text, sampling_params
from sparkdraft.core import REPETITION, SamplingParams, UserError
from sparkdraft.text.events import Content, Event, Parser, Reasoning
from sparkdraft.util.progress import errors, waiting
from sparkdraft.util.side_by_side import Run

if TYPE_CHECKING:
    from sparkdraft.llm import LLM
    from sparkdraft.text.reasoning import ReasoningFormat

HELP = "continue a prompt"
EXAMPLES = """examples:
  sparkdraft generate --prompt "The sea is" --max-tokens 32
  sparkdraft generate --chat --prompt "Explain TCP in one sentence." --temperature 0.7 --seed 1
  sparkdraft generate --prompt-file story.txt --json | tail -n 1
"""
DEFAULTS = SamplingParams(max_tokens=64)


def configure(parser: ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to continue")
    source.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file ('-': standard input)")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message, in the chat template")
    parser.add_argument(
        "--json", action="store_true", help="end with one line of JSON: text, counts, speed, memory, how it runs"
    )
    add_sampling_flags(parser, DEFAULTS)
    add_engine_flags(parser, profile=True)


def run(args: Namespace) -> int:
    params = replace(sampling_params(args, DEFAULTS), continues=not args.chat)
    prompt = read_prompt(args)
    llm = load_llm(args)
    gc.freeze()  # the model stays; the garbage collector would take 2 ms to search it, in the middle of a step
    ids = llm.chat_ids([{"role": "user", "content": prompt}]) if args.chat else llm.encode(prompt)
    report = write(llm, ids, params, thoughts=llm.style.reasoning if args.chat else None)
    if args.json:
        report["fallbacks"] = [fallback.as_dict() for fallback in llm.fallbacks()]
        report["facts"] = [asdict(fact) for fact in llm.facts()]
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(
            f"{report['num_output']} tokens, {report['tok_s']} tok/s, first after {report['ttft_ms']} ms, "
            f"peak memory {report['peak_rss_mb']} MB",
            file=sys.stderr,
        )
        if report["stop_reason"] == REPETITION:
            print(
                "(the text was ended, because it repeats itself: --repetition-limit 0 lets it go on)", file=sys.stderr
            )
        if report["kv_errors"]:
            print(coding_line(report["kv_errors"]), file=sys.stderr)
    return 0


def coding_line(errors: dict[str, Any]) -> str:
    """The result of `LLM.kv_errors` in words."""
    worst, layer = max((found["attention_error"], found["layer"]) for found in errors["layers"])
    return (
        f"with coding, keys would be off by {errors['key_error']:.1%}, values by {errors['value_error']:.1%}, "
        f"attention by {errors['attention_error']:.1%} (most in layer {layer}: {worst:.1%}), over {errors['rows']} rows"
    )


def read_prompt(args: Namespace) -> str:
    """Read and check the prompt before a model is loaded for it."""
    if args.prompt_file is None:
        prompt = as_text(args.prompt.encode("utf-8", "surrogateescape"), "the prompt")
    else:
        prompt = read_text(args.prompt_file)
    if not prompt:
        raise UserError("the prompt is empty; give at least one character")
    return prompt


class Page:
    """Writes an answer to standard output as it comes, and its thoughts to standard error."""

    def __init__(self, parser: Parser | None, wraps: bool = False) -> None:
        """wraps: whether lines of a terminal break between words."""
        self.parser = parser
        self.text = self.thoughts = ""
        self._answer = WordWrap(_print, lambda: terminal_width(sys.stdout) if wraps else 0)
        self._thoughts = WordWrap(_print_dim, lambda: terminal_width(sys.stderr) if wraps else 0)

    def add(self, text: str) -> None:
        self._show(self.parser.feed(text) if self.parser else [Content(text)])

    def end(self) -> None:
        self._show(self.parser.finish() if self.parser else [])
        self._thoughts.end()
        self._answer.end()
        print()

    def _show(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Reasoning):
                self._thoughts.add(event.text)
                self.thoughts += event.text
            elif isinstance(event, Content):
                if self.thoughts and not self.text:
                    self._thoughts.end()
                    errors.print("\n")
                self._answer.add(event.text)
                self.text += event.text


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _print_dim(text: str) -> None:
    errors.print(text, end="", style="dim", markup=False, soft_wrap=True)


def write(
    llm: LLM,
    ids: list[int],
    params: SamplingParams,
    stopped: Callable[[], bool] = lambda: False,
    thoughts: ReasoningFormat | None = None,
    wraps: bool = False,
    runs: list[Run] | None = None,
) -> dict[str, Any]:
    """Stream the text to standard output, to its end or until it is stopped. Returns what --json reports (start_ms:
    from the command's start to the first token, including loading). thoughts: how they are told from the answer. wraps:
    whether lines of a terminal break between words. runs: gets the text of every step with its time."""
    begin = time.perf_counter()
    first = last = begin
    num_output, finish, stop_reason, speculation = 0, None, None, None
    page = Page(thoughts(llm.opening(ids)) if thoughts else None, wraps)
    if thoughts and thoughts.keep_special:
        params = replace(params, keep_special=True)
    with closing(waiting(llm.stream(ids, params, stopped), f"reading {len(ids)} tokens of prompt")) as pieces:
        for piece in pieces:
            last = time.perf_counter()
            first = last if num_output == 0 else first
            num_output += len(piece.ids)
            finish, stop_reason, speculation = piece.finish, piece.stop_reason, piece.speculation
            page.add(piece.text)
            if runs is not None:
                runs.append(Run(last - first, piece.text, len(piece.ids)))
    page.end()
    decode = last - first
    return {
        "text": page.text,
        "reasoning": page.thoughts or None,
        "num_prompt": len(ids),
        "num_output": num_output,
        "finish_reason": finish.value if finish else None,
        "stop_reason": stop_reason,
        "tok_s": round((num_output - 1) / decode, 1) if num_output > 1 else 0.0,
        "ttft_ms": round((first - begin) * 1000, 1),
        "start_ms": round((first - STARTED) * 1000, 1),
        "peak_rss_mb": peak_rss_mb(),
        "speculative_decoding": speculation,
        "kv_errors": llm.kv_errors(),
    }


def peak_rss_mb() -> int:
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
