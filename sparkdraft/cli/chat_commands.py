"""A conversation with a model, and the /commands that change it. No terminal here: text in, text out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkdraft.cli.generate import write
from sparkdraft.cli.options import SAMPLING_FLAGS, flag_kind
from sparkdraft.cli.parser import suggestion
from sparkdraft.core import REPETITION, FinishReason, SamplingParams, UserError

if TYPE_CHECKING:
    from sparkdraft.llm import LLM, Message

COMMAND = re.compile(r"/[a-zA-Z]+(?=\s|$)")  # no path such as /etc/hosts, and no comment in a pasted program


@dataclass(slots=True)
class Conversation:
    llm: LLM
    params: SamplingParams
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    last: dict[str, Any] | None = None  # what `write` reported about the last answer

    def prompt(self, question: str) -> list[int]:
        """The conversation up to the answer to this question, as the model reads it."""
        opening: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return self.llm.chat_ids([*opening, *self.turns, {"role": "user", "content": question}])

    def answer(self, question: str, stopped: Callable[[], bool]) -> str:
        """Stream the answer to standard output; returns why it was cut, if it was. What was written before a stop is
        part of the conversation. A question without an answer, because it does not fit or was stopped at once, is
        not."""
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
        """Where the last answer was cut, and what allows a longer one."""
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
    """The reply to a text that begins with a command; None if the chat ends."""
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
    """The parameters that are not off."""
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
