"""`sparkdraft chat`: a conversation in the terminal, streamed, with its history and /commands.

Answers go to standard output, everything else to standard error. At a terminal prompt_toolkit provides line editing and
a history that outlasts the program; otherwise each line of standard input is a message.
"""

from __future__ import annotations

import re
import signal
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from sparkdraft import __version__
from sparkdraft.cli.console import note
from sparkdraft.cli.generate import write
from sparkdraft.cli.options import (
    SAMPLING_FLAGS,
    add_engine_flags,
    add_sampling_flags,
    as_text,
    flag_kind,
    load_llm,
    sampling_params,
    standard_input,
)
from sparkdraft.cli.parser import suggestion
from sparkdraft.config import SAMPLING_KINDS
from sparkdraft.core import REPETITION, FinishReason, SamplingParams, UserError
from sparkdraft.util.progress import errors
from sparkdraft.weights.hub import cache_dir

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from sparkdraft.llm import LLM, Message


HELP = "talk to a model in the terminal"
EXAMPLES = """examples:
  sparkdraft chat
  sparkdraft chat --system "Answer in one sentence." --temperature 0.7
  sparkdraft chat < questions.txt               (each line is a message; status 1 if one has no answer)
in the chat: /help lists the commands, ctrl-c stops an answer, ctrl-d ends
"""
DEFAULTS = SamplingParams(max_tokens=512, repetition_limit=200)  # except for what the model names
COMMAND = re.compile(r"/[a-zA-Z]+(?=\s|$)")  # no path such as /etc/hosts, and no comment in a pasted program
PROMPT, CONTINUED = "> ", "  "


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions before the conversation")
    add_sampling_flags(parser, DEFAULTS, from_model=SAMPLING_KINDS)
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
    """Print the answer. Returns False, after saying why, if there is none."""
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
    """Make ctrl-c ask the answer to end between two steps, so that the engine stays intact; a second one ends the
    program."""
    asked = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


# ---- the conversation


@dataclass(slots=True)
class Conversation:
    llm: LLM
    params: SamplingParams
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    last: dict[str, Any] | None = None  # what `write` reported about the last answer

    def prompt(self, question: str) -> list[int]:
        """Encode the conversation up to the answer to this question."""
        opening: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return self.llm.chat_ids([*opening, *self.turns, {"role": "user", "content": question}])

    def answer(self, question: str, stopped: Callable[[], bool]) -> str:
        """Stream the answer to standard output. Returns why it was cut, or "".

        Text written before a stop stays in the conversation; a question without an answer does not.
        """
        ids, context = self.prompt(question), self.llm.plan.max_model_len
        if self.turns and len(ids) >= context:
            raise UserError(
                f"the conversation has {len(ids)} tokens and the context holds {context} with the answer: "
                "shorten the question, or begin a new conversation with /clear"
            )
        self.last = write(self.llm, ids, self.params, stopped, self.llm.style.reasoning, wraps=True)
        cut = self._cut() if self.last["finish_reason"] == FinishReason.LENGTH.value else ""
        if self.last["text"]:
            said = {"role": "assistant", "content": self.last["text"]}
            self.turns = [*self.turns, {"role": "user", "content": question}, said]
        elif cut:
            raise UserError(f"no answer was written, because the thoughts were cut {cut}")
        if self.last["stop_reason"] == REPETITION:
            return "the answer was ended, because it repeats itself: /set repetition_limit 0 lets it go on"
        return cut and f"the answer was cut {cut}"

    def _cut(self) -> str:
        """Say where the last answer was cut, and what allows a longer one."""
        assert self.last
        if self.last["num_output"] >= self.params.max_tokens:
            most = self.params.max_tokens
            return f"after {most} tokens: /set max_tokens {8 * most} allows more"
        return f"at the end of the context of {self.llm.plan.max_model_len} tokens: /clear begins a new conversation"


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    meaning: str
    run: Callable[[Conversation, str], str | None]  # gets what follows the command; returns what to print, None to end


def run_command(talk: Conversation, text: str) -> str | None:
    """Run a text that begins with a command. Returns the reply, or None to end the chat."""
    found = COMMAND.match(text)
    assert found, "ask is_command first"
    typed, rest = found.group().lower(), text[found.end() :]
    name = OTHER_WORDS.get(typed, typed)
    if name not in COMMANDS:
        return f"{name} is not a command{suggestion(name, COMMANDS) or ': /help lists them'}"
    try:
        return COMMANDS[name].run(talk, rest.strip())
    except UserError as error:
        return str(error)


def is_command(text: str) -> bool:
    return COMMAND.match(text) is not None


def show_params(params: SamplingParams) -> str:
    """Describe the parameters that are not off."""
    off = SamplingParams()
    values = {name: getattr(params, name) for name in SAMPLING_FLAGS}
    shown = [
        f"{name} {value}" for name, value in values.items() if name == "temperature" or value != getattr(off, name)
    ]
    return ", ".join(shown)


# ---- the commands


def _help(talk: Conversation, rest: str) -> str:
    lines = [f"  {each.usage:<18} {each.meaning}" for each in COMMANDS.values()]
    keys = "enter sends, alt-enter makes a new line, the arrow keys and ctrl-r find what was typed before"
    return "\n".join([*lines, f"{keys},", "ctrl-c stops an answer, ctrl-d ends the chat"])


def _clear(talk: Conversation, rest: str) -> str:
    talk.turns = []
    return "a new conversation begins"


def _system(talk: Conversation, rest: str) -> str:
    talk.system = rest
    return "the model gets these instructions from now on" if rest else "the model gets no instructions from now on"


def _set(talk: Conversation, rest: str) -> str:
    name, _, value = rest.partition(" ")
    name = name.replace("-", "_")
    if name and name not in SAMPLING_FLAGS:
        raise UserError(f"{name} cannot be set{suggestion(name, SAMPLING_FLAGS) or ''} (/set alone lists what can be)")
    if not name:
        return "\n".join(
            f"  {each:<18} {getattr(talk.params, each)!s:<6} {text}" for each, text in SAMPLING_FLAGS.items()
        )
    kind = flag_kind(name)
    try:
        given: dict[str, Any] = {name: kind(value)}
    except ValueError:
        example = "0.7" if kind is float else "100"
        raise UserError(f"'{value}' is not a value for {name}: write a number, such as /set {name} {example}") from None
    talk.params = replace(talk.params, **given)
    return show_params(talk.params)


def _stats(talk: Conversation, rest: str) -> str:
    if (last := talk.last) is None:
        return "nothing has been answered yet"
    room = f"{last['num_prompt'] + last['num_output']:,} of {talk.llm.plan.max_model_len:,} tokens of context"
    speed = f"{last['num_output']} tokens at {last['tok_s']} tok/s, the first after {last['ttft_ms']} ms; {room}"
    if last["finish_reason"] is None:
        return f"{speed}\nthe answer was stopped, so how it was drafted is not known"
    return f"{speed}\n{_drafting(last['speculative_decoding'] or {})}"


def _drafting(stats: dict[str, Any]) -> str:
    if not stats.get("num_spec_steps"):
        return "no step drafted"
    drafted, accepted = stats["num_draft_tokens"], stats["num_accepted_draft_tokens"]
    return (
        f"{stats['num_spec_steps']} steps drafted {drafted} tokens, {accepted} were accepted: "
        f"{stats['mean_acceptance_length']:.2f} tokens per drafting step"
    )


def _quit(talk: Conversation, rest: str) -> None:
    return None


COMMANDS = {
    "/help": Command("/help", "this list", _help),
    "/clear": Command("/clear", "forget the conversation and begin a new one", _clear),
    "/system": Command("/system TEXT", "instructions before the conversation; without TEXT none", _system),
    "/set": Command("/set NAME VALUE", "such as /set temperature 0.7; /set alone lists all", _set),
    "/stats": Command("/stats", "speed and drafting of the last answer", _stats),
    "/quit": Command("/quit", "end the chat", _quit),
}
# the names in other chat programs
OTHER_WORDS = {"/exit": "/quit", "/bye": "/quit", "/new": "/clear", "/reset": "/clear"}


# ---- input


def messages() -> Iterator[str]:
    """Yield what the user types at a terminal, or each line of standard input."""
    if standard_input().isatty():
        yield from _typed(cache_dir() / "chat_history")
        return
    for raw in standard_input().buffer:
        yield as_text(raw, "standard input").strip()


def _typed(history: Path) -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=CONTINUED,
        key_bindings=_keys(),
        history=_history(history),
        output=create_output(always_prefer_tty=True),  # answers may be piped on while the prompt stays visible
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            errors.print("(ctrl-d or /quit ends the chat)", style="dim")
        except EOFError:
            return


def _keys() -> KeyBindings:
    """Enter sends; alt-enter, which a terminal sends as escape and enter, makes a new line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path) -> History:
    """Open the history file, readable by its owner only; keep the history in memory if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("a").close()
    except OSError as error:
        note(f"what you type is not kept for the next chat: {path} cannot be written ({error.strerror})")
        return InMemoryHistory()
    return FileHistory(path)
