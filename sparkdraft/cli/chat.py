"""`sparkdraft chat`: a conversation in the terminal, streamed, with its history.

Messages come from chat_input.py, and commands that begin with / are in chat_commands.py. Answers go to standard output,
everything else to standard error.
"""

from __future__ import annotations

import signal
import sys
import termios
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from sparkdraft import __version__
from sparkdraft.cli.chat_commands import Conversation, is_command, run_command, show_params
from sparkdraft.cli.chat_input import messages
from sparkdraft.cli.options import add_engine_flags, add_sampling_flags, load_llm, sampling_params, standard_input
from sparkdraft.core import SamplingParams, UserError
from sparkdraft.defaults import KINDS
from sparkdraft.util.progress import errors

HELP = "talk to a model in the terminal"
EXAMPLES = """examples:
  sparkdraft chat
  sparkdraft chat --system "Answer in one sentence." --temperature 0.7
  sparkdraft chat < questions.txt               (each line is a message; status 1 if one has no answer)
in the chat: /help lists the commands, ctrl-c stops an answer, ctrl-d ends
"""
DEFAULTS = SamplingParams(max_tokens=512, repetition_limit=200)  # except for what the model names


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions before the conversation")
    add_sampling_flags(parser, DEFAULTS, from_model=KINDS)
    add_engine_flags(parser, profile=True)


def run(args: Namespace) -> int:
    sampling_params(args, DEFAULTS)  # refuse a bad flag before anything is loaded
    is_typed = standard_input().isatty()
    llm = load_llm(args)
    params = sampling_params(
        args, llm.default_params(max_tokens=DEFAULTS.max_tokens, repetition_limit=DEFAULTS.repetition_limit)
    )
    talk = Conversation(llm, params, args.system)
    talk.prompt("Hello!")  # refuse a model that cannot chat before anything is asked
    all_answered = True
    if is_typed:
        errors.print(banner(args.model, talk), markup=False, soft_wrap=True)
    for text in messages():
        if is_command(text):
            said = run_command(talk, text)
            if said is None:
                break
            errors.print(said, markup=False, soft_wrap=True)
        elif text.strip():
            all_answered &= answer(talk, text)
    return 0 if all_answered or is_typed else 1


def banner(model: str, talk: Conversation) -> str:
    plan, proposer = talk.llm.plan, talk.llm.engine.drafting.proposer
    caps = proposer.drafter.caps if proposer else None
    drafter = f"{caps.name}, up to {caps.max_depth} drafts per step" if caps else "none"
    return (
        f"sparkdraft {__version__}, {model}\n"
        f"  device    {plan.describe().splitlines()[0]}\n"
        f"  drafter   {drafter}\n"
        f"  context   {plan.max_model_len:,} tokens\n"
        f"  sampling  {show_params(talk.params)}\n"
        "/help lists the commands, ctrl-c stops an answer, ctrl-d ends"
    )


def answer(talk: Conversation, question: str) -> bool:
    """Whether there is an answer, or was until it was stopped; if there is none, it says why."""
    try:
        with interruptible() as stopped:
            cut = talk.answer(question, stopped)
    except UserError as error:
        errors.print(str(error), style="yellow", markup=False, soft_wrap=True)
        return False
    if cut:
        errors.print(f"({cut})", style="dim", markup=False, soft_wrap=True)
    return True


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it ctrl-c only asks the answer to end, which it does between two steps, so that the engine stays intact; a
    second ctrl-c ends the program."""
    asked = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        with no_control_echo():
            yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def no_control_echo() -> Iterator[None]:
    """Within it a terminal does not write ^C into the answer."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = list(before)
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
