"""Asks a backend one thing at a time and checks the answers.

Two answers count as equal if their ids are, or if they part at a near tie: where sums are made in another order (larger
batches on a GPU, torch's own products), the last bit of a logit may differ and another token may win.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.backend import Backend
from sparkdraft.core import MAX_LOGPROBS, FinishReason, GrammarSpec, SamplingParams, TokenLogprob, UserError
from sparkdraft.operate.canary.findings import Failed, Skipped
from sparkdraft.text import chat
from sparkdraft.text.control import ChatText
from sparkdraft.text.events import Content, Event, ToolArguments, ToolCall
from sparkdraft.text.families import AUTO
from sparkdraft.text.style import ChatStyle, chat_style
from sparkdraft.text.tokenizer import Tokenizer

NEAR = 0.25  # nats: two tokens nearer than this are a near tie, and two log-probabilities of one token the same
LONGEST = 300.0  # seconds of one request, after which something hangs


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_cached: int = 0
    drafting: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Asker:
    def __init__(self, backend: Backend) -> None:
        self.backend, self.info = backend, backend.info
        self._count = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(RawTokenizer.from_str(self.info.tokenizer), self.info.special)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @property
    def room(self) -> int:
        """The most tokens of a prompt that leaves room for a short answer."""
        return self.info.max_model_len - 80

    def ask(self, ids: list[int], params: SamplingParams) -> Answer:
        """Run one request alone and return its answer."""
        if len(ids) + params.max_tokens > self.info.max_model_len:
            raise Skipped(f"the context has {self.info.max_model_len} tokens, which is too short to ask")
        self._count += 1
        name, answer, begin = f"canary-{self._count}", Answer(), time.monotonic()
        try:
            grammar = self.backend.compile_grammar(params.grammar) if params.grammar else None
            self.backend.add(name, ids, params, grammar)
        except UserError as error:
            raise Skipped(f"the model does not take the request: {error}") from None
        while answer.finish is None:
            if not self.backend.has_work or time.monotonic() - begin > LONGEST:
                self.backend.abort(name)
                raise Failed(f"a request did not end within {LONGEST:.0f} s")
            for piece in self.backend.step():
                if piece.request_id == name:
                    answer.ids += piece.ids
                    answer.text += piece.text
                    answer.logprobs += piece.logprobs or []
                    answer.prompt_logprobs = piece.prompt_logprobs or answer.prompt_logprobs
                    answer.finish, answer.num_cached = piece.finish, piece.num_cached
                    answer.drafting = piece.speculation or {}
        answer.seconds = time.monotonic() - begin
        return answer

    def same(self, one: Answer, other: Answer, names: tuple[str, str]) -> str:
        """Say that two answers are equal or part at a near tie; raise Failed otherwise. one: has the log-probabilities
        of two tokens or more at each place."""
        length = min(len(one.ids), len(other.ids))
        place = next((i for i in range(length) if one.ids[i] != other.ids[i]), length)
        if place == len(one.ids) == len(other.ids):
            return f"{place} tokens are equal"
        if place < length and nearness(one.logprobs[place], other.ids[place]) <= NEAR:
            return f"{place} tokens are equal, and then a near tie"
        said = [self.tokenizer.decode(answer.ids[place : place + 3]) for answer in (one, other)]
        raise Failed(f"after {place} equal tokens, {names[0]} says {said[0]!r} and {names[1]} says {said[1]!r}")


def nearness(row: TokenLogprob, token: int) -> float:
    """By how many nats the likeliest token was likelier than this one."""
    known = dict(row.top) | {row.id: row.logprob}
    return max(known.values()) - known.get(token, -float("inf"))


# ---- probes
#
# Each asks something with a known answer and raises Failed if another one comes. Each compares two ways to one text
# that share as little as possible: drafted and plain, cached and computed, sampled and scored.

# Text that repeats itself with changes: some drafts of it are right and some are wrong.
COUNTED = "1. One apple costs 3 euros.\n2. Two apples cost 6 euros.\n3. Three apples cost 9 euros.\n4."
WORDS = (
    "harbour lantern copper violin meadow saddle orchid thunder pepper marble anchor velvet compass basket willow "
    "candle falcon ribbon tunnel walnut glacier button spider trumpet cotton desert feather hammer island jacket"
)
LIST = f"The words of the list are: {WORDS}. Once more, the words of the list are: harbour lantern copper"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ALTERNATIVES = 5


def drafted_is_plain(asker: Asker) -> str:
    """Text with as many drafts as possible must be the text without any."""
    depth = int(asker.info.plan_facts.get("max_draft") or 0)
    if not depth:
        raise Skipped("nothing drafts")
    prompt, params = asker.encode(COUNTED), SamplingParams(max_tokens=32, ignore_eos=True)
    plain = asker.ask(prompt, replace(params, num_draft=0, logprobs=ALTERNATIVES))
    drafted = asker.ask(prompt, replace(params, num_draft=depth))
    tried, taken = (drafted.drafting.get(f"num_{name}_tokens", 0) for name in ("draft", "accepted_draft"))
    if not tried:
        raise Skipped("no step drafted")
    return f"{asker.same(plain, drafted, ('plain text', 'drafted text'))}; {taken} of {tried} drafts were accepted"


def sampler_is_honest(asker: Asker) -> str:
    """The sampler must choose what the scores say: greedy text is the likeliest by scores computed without the sampler,
    and the reported log-probabilities are those scores."""
    prompt = asker.encode(COUNTED)
    said = asker.ask(prompt, SamplingParams(max_tokens=16, num_draft=0, logprobs=ALTERNATIVES, ignore_eos=True))
    scored = asker.ask([*prompt, *said.ids], SamplingParams(max_tokens=1, num_draft=0, prompt_logprobs=ALTERNATIVES))
    rows = scored.prompt_logprobs[len(prompt) :]
    if len(rows) != len(said.ids) or len(said.logprobs) != len(said.ids):
        raise Failed(f"{len(said.ids)} tokens were written, and {len(said.logprobs)} of them have log-probabilities")
    for place, (token, reported, row) in enumerate(zip(said.ids, said.logprobs, rows, strict=True)):
        assert row is not None, "only a prompt's first token has no score"
        if (gap := nearness(row, token)) > NEAR:
            raise Failed(f"token {place} of a greedy text is {gap:.1f} nats less likely than the likeliest one")
        if reported.id != token or not abs(reported.logprob - row.logprob) <= NEAR:
            raise Failed(
                f"token {place} is reported with the log-probability {reported.logprob:.2f} and has {row.logprob:.2f}"
            )
    first = SamplingParams(max_tokens=16, temperature=1.0, top_k=1, seed=7, num_draft=0, ignore_eos=True)
    found = asker.same(said, asker.ask(prompt, first), ("greedy text", "text with top_k 1"))
    return f"{len(said.ids)} greedy tokens are the likeliest, as scored without the sampler; with top_k 1 {found}"


def hit_is_cold(asker: Asker) -> str:
    """A prompt whose beginning comes from the prefix cache must be continued like one that is computed anew. The model
    copies a list, so each block of the prompt is read."""
    if not asker.info.plan_facts.get("prefix_cache"):
        raise Skipped("the prefix cache is off")
    prompt = asker.encode(LIST)
    params = SamplingParams(max_tokens=min(len(prompt), 40), num_draft=0, logprobs=ALTERNATIVES, ignore_eos=True)
    cold = asker.ask(prompt, replace(params, prompt_logprobs=0))  # the cache has no prompt log-probabilities
    hit = asker.ask(prompt, params)
    if cold.num_cached:
        raise Skipped("the prompt was not computed anew")
    if not hit.num_cached:
        raise Skipped("the prompt was not found again in the prefix cache")
    found = asker.same(cold, hit, ("the computed prompt", "the cached prompt"))
    pairs = [(a.logprob, b.logprob) for a, b in zip(cold.logprobs, hit.logprobs, strict=False) if a.id == b.id]
    if wrong := next((pair for pair in pairs if not abs(pair[0] - pair[1]) <= NEAR), None):
        raise Failed(f"a token has the log-probability {wrong[0]:.2f} computed, and {wrong[1]:.2f} from the cache")
    return f"{found}, {hit.num_cached} of {len(prompt)} prompt tokens cached"


def grammar_holds(asker: Asker) -> str:
    """An answer under a schema must follow it, also with drafts."""
    params = SamplingParams(max_tokens=64, grammar=GrammarSpec("json_schema", json.dumps(SCHEMA)))
    answer = asker.ask(asker.encode("The person as JSON:\n"), params)
    if answer.finish is not FinishReason.STOP:
        raise Failed(f"an answer under a schema did not end: {answer.text!r}")
    try:
        value = json.loads(answer.text)
    except ValueError:
        raise Failed(f"an answer under a schema is not JSON: {answer.text!r}") from None
    if not _fits(value):
        raise Failed(f"an answer does not follow its schema: {answer.text!r}")
    return f"the answer follows its schema: {json.dumps(value)}"


def codes_are_within_bounds(asker: Asker) -> str:
    errors = asker.backend.coding_errors()
    if not errors:
        raise Skipped("keys and values are not coded")
    worst = errors[0]
    said = f"{worst.what} are off by {worst.error:.1%}, and {worst.limit:.1%} is the limit"
    if not worst.error <= worst.limit:
        wrong = sum(not each.error <= each.limit for each in errors)
        raise Failed(f"{said}; {wrong} of {len(errors)} are beyond theirs")
    return f"at most, {said}"


def _fits(value: Any) -> bool:
    """Tell if a value follows SCHEMA."""
    if not isinstance(value, dict) or set(value) != {"name", "age"}:
        return False
    name, age = value["name"], value["age"]
    return isinstance(name, str) and len(name) <= 12 and type(age) is int and age <= 99


# ---- a needle in a long text
#
# A sentence with one of two words is hidden in a long text that ends with the beginning of that sentence. Small models
# answer badly, so the scores are compared: planting a word must make it likelier. A short text comes first, because a
# model that fails there (random weights, say) cannot show that long contexts are broken.

SENTENCE = "The password of the lighthouse is"
PASSWORDS = (" banana", " window")
SHORT, LONG = 96, 8192  # tokens
BUDGET = 1.2  # seconds for both runs of the long text
FOUND = 2.0  # nats by which planting must favour a word
UNSEEN = -20.0  # the log-probability of a word that is not among the likeliest
PEOPLE = ("Ada", "Bela", "Carl", "Dora", "Emil", "Frida", "Georg", "Hanna", "Ivan", "Jana")
THINGS = ("fences", "boats", "letters", "bridges", "gardens", "clocks", "kites", "maps", "shoes", "stoves")
PLACES = ("by the mill", "near the station", "behind the church", "on the hill", "at the market", "in the valley")


def needle_is_found(asker: Asker) -> str:
    if asker.room < SHORT:
        raise Skipped(f"the context has {asker.info.max_model_len} tokens, which is too short to hide anything")
    favour, speed = planted(asker, SHORT)
    if favour < FOUND:
        raise Skipped(f"the model does not find a word again among {SHORT} tokens, so longer texts would tell nothing")
    length = min(asker.room, LONG, max(4 * SHORT, int(speed * BUDGET / len(PASSWORDS))))
    favour, _ = planted(asker, length)
    said = f"a word planted among {length} tokens became {favour:.1f} nats likelier"
    if favour < FOUND:
        raise Failed(f"{said}, and {FOUND:.0f} is the least; among {SHORT} tokens the model finds it")
    return said


def planted(asker: Asker, length: int) -> tuple[float, float]:
    """Return how much planting favours a word, in nats (the mean of both words, in a text of about this many tokens),
    and the tokens read per second, without those of the prefix cache."""
    words = [asker.encode(f"x{word}")[-1] for word in PASSWORDS]
    if words[0] == words[1]:
        raise Skipped("the tokenizer does not tell the planted words apart")
    before, after = _filler(asker, length // 2, 1), _filler(asker, length - length // 2 - 24, 2)
    scores, seconds, read = [], 0.0, 0
    for word in PASSWORDS:
        text = f"{before} {SENTENCE}{word}. {after} {SENTENCE}"
        ids = asker.encode(text)
        answer = asker.ask(ids, SamplingParams(max_tokens=1, num_draft=0, logprobs=MAX_LOGPROBS))
        known: dict[Any, float] = dict(answer.logprobs[0].top)
        scores.append([max(known.get(token, UNSEEN), UNSEEN) for token in words])
        seconds, read = seconds + answer.seconds, read + len(ids) - answer.num_cached
    return (scores[0][0] - scores[0][1] + scores[1][1] - scores[1][0]) / 2, read / seconds


def _filler(asker: Asker, length: int, seed: int) -> str:
    """Return plain sentences of about this many tokens, always the same."""
    numbers, text, sentences = random.Random(seed), "", []
    while len(asker.encode(text)) < length:
        for _ in range(max(1, (length - len(asker.encode(text))) // 16)):
            who, what, where = (numbers.choice(choices) for choices in (PEOPLE, THINGS, PLACES))
            sentences.append(f"{who} repairs {numbers.randrange(2, 99)} {what} {where}.")
        text = " ".join(sentences)
    return text


# ---- tool calls
#
# A call is forced by the grammar of the model's own format, and the parser must find it. The parser must also read an
# earlier call as the chat template writes it.

NAME, CITY = "get_weather", "Paris"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": [CITY, "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = {"role": "user", "content": f"What is the weather in {CITY}?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": {"city": CITY}}}


def call_is_read(asker: Asker, tool_parser: str = AUTO) -> str:
    """tool_parser: the parser that the server uses. The call must come at once; thoughts are another parser's."""
    style = chat_style(asker.info.model_type, asker.info.chat_template, tool_parser=tool_parser)
    form, written = style.tools, _template_is_read(asker, style)
    grammar = form.constraint([TOOL], NAME, parallel=False)
    params = SamplingParams(max_tokens=96, grammar=grammar, keep_special=form.keep_special)
    answer = asker.ask(asker.tokenizer.encode_chat(_prompt(asker, style)), params)
    parser = form.parser([TOOL])
    events = [event for letter in answer.text for event in parser.feed(letter)] + parser.finish()
    arguments = read_call(events, answer.text)
    if arguments.get("city") not in (CITY, "Oslo"):
        raise Failed(f"a forced call has the arguments {arguments}, which its schema does not allow")
    return f"a forced call is read by the {form.name} parser{written}"


def read_call(events: list[Event], text: str) -> dict[str, Any]:
    """Return the arguments of the only call among these events."""
    calls = [event for event in events if isinstance(event, ToolCall)]
    rest = "".join(event.text for event in events if isinstance(event, Content)).strip()
    if len(calls) != 1 or calls[0].name != NAME or rest:
        names = ", ".join(call.name for call in calls) or "none"
        raise Failed(f"of the text {text!r} the parser reads the calls: {names}; content: {rest!r}")
    joined = "".join(event.text for event in events if isinstance(event, ToolArguments))
    try:
        value = json.loads(joined)
    except ValueError:
        raise Failed(f"the parser gives the arguments {joined!r}, which are not JSON") from None
    if not isinstance(value, dict):
        raise Failed(f"the parser gives the arguments {joined!r}, which are not an object")
    return value


def _template_is_read(asker: Asker, style: ChatStyle) -> str:
    """Check that the parser reads a call as the chat template writes it: the text that a call adds to a chat."""
    form = style.tools
    messages = form.history([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}])
    try:
        whole, before = _chat(asker, style, messages, False).text, _chat(asker, style, [ASKED], True).text
    except UserError:
        return ""  # a template that writes no such history
    written = whole.removeprefix(before)
    if NAME not in written or written == whole:
        return ""
    parser = form.parser([TOOL])
    events = [*parser.feed(written), *parser.finish()]
    if not any(isinstance(event, ToolCall) and event.name == NAME for event in events):
        raise Failed(
            f"the chat template writes a call as {written[:120]!r}, which the {form.name} parser does not read"
        )
    return ", and so is one that the chat template writes"


def _prompt(asker: Asker, style: ChatStyle) -> ChatText:
    """Return a chat that asks for a call, with the tools in the template, the system prompt or the user's message."""
    said, reason = style.tools.instructions([TOOL], only=NAME), ""
    chats: list[list[dict[str, Any]]] = [[ASKED]]
    if said:
        chats = [[{"role": "system", "content": said}, ASKED], [ASKED | {"content": f"{said}\n\n{ASKED['content']}"}]]
    for messages in chats:
        try:
            return _chat(asker, style, messages, True)
        except UserError as error:
            reason = str(error)
    raise Skipped(f"the chat template does not take the question: {reason}")


def _chat(asker: Asker, style: ChatStyle, messages: list[dict[str, Any]], opens: bool) -> ChatText:
    """opens: whether the assistant's turn begins at the end."""
    info, control = asker.info, asker.tokenizer.control
    tools = None if style.tools.instructions([TOOL], only=NAME) else [TOOL]
    usual = style.thinking.variables(None)
    return chat.prompt_text(control, info.chat_template, messages, info.special, opens, tools, usual)
