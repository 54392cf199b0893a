"""`sparkdraft chat`: a conversation in the terminal, streamed, with its history."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from sparkdraft.cli.options import add_engine_flags, add_sampling_flags, load_llm, sampling_params
from sparkdraft.core import SamplingParams, UserError

if TYPE_CHECKING:
    from sparkdraft.llm import LLM, Message

HELP = "talk to a model in the terminal"
EXAMPLES = """examples:
  sparkdraft chat
  sparkdraft chat --system "Answer in one sentence." --temperature 0.7
in the chat: /new forgets the conversation, /quit or ctrl-d ends, ctrl-c stops an answer
"""
DEFAULTS = SamplingParams(max_tokens=512, temperature=0.2, top_p=0.9)


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions that stand before the conversation")
    add_sampling_flags(parser, DEFAULTS)
    add_engine_flags(parser)


def run(args: Namespace) -> int:
    params = sampling_params(args, DEFAULTS)
    llm = load_llm(args)
    opening: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    history = list(opening)
    while (line := _ask()) not in (None, "/quit"):
        if line == "/new":
            history = list(opening)
        elif line:
            history = _turn(llm, [*history, {"role": "user", "content": line}], params)
    return 0


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _turn(llm: LLM, history: list[Message], params: SamplingParams) -> list[Message]:
    """One answer; a conversation that no longer fits is said so and keeps what it was before the question."""
    answer = ""
    try:
        for piece in llm.stream(llm.chat_ids(history), params):
            answer += piece.text
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except UserError as error:
        print(f"{error}; /new begins again", file=sys.stderr)
        return history[:-1]
    print()
    return [*history, {"role": "assistant", "content": answer}]
