"""Turns a request's messages and tools into the ids that the model reads, and makes the parser for its answer.

`ModelText` has the model's tokenizer, chat template, and formats of tool calls and reasoning, all from the engine
process's description. It works in a thread; stream.py runs the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as RawTokenizer

from sparkdraft.core import GrammarSpec, SamplingParams, UserError
from sparkdraft.server.protocol.chat import ChatFields, ChatMessage, ChatRequest, ToolCallIn
from sparkdraft.server.protocol.conversation import text_of
from sparkdraft.server.protocol.sampling import ALL, SamplingFields
from sparkdraft.server.protocol.validation import ApiError, as_sentence
from sparkdraft.server.protocol.written import Written
from sparkdraft.text import chat
from sparkdraft.text.control import ChatText
from sparkdraft.text.events import OnlyCalls, Parser, chain
from sparkdraft.text.families import AUTO
from sparkdraft.text.reasoning import ReasoningFormat, after_thinking, answer_rule
from sparkdraft.text.style import EFFORT, EFFORTS, chat_style
from sparkdraft.text.template import PastLimit
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.text.tools import ToolFormat

if TYPE_CHECKING:
    from sparkdraft.backend import ModelInfo

RESERVED = {"template", "messages", "tools", "add_generation_prompt"}  # variables of the template that are fields
HINTS = (*EFFORTS, "max")  # efforts that agents send, in order
# By the name of a tool format: what a call begins with, in text that is to have none.
CALL_MARKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("hermes", "generic"), ("<tool_call>",)),
    "qwen3_xml": ("<tool_call>", "<function="),
    "gemma4": ("<|tool_call>",),
    "harmony": ("<|start|>", "<|channel|>"),
}
USUAL_CHARS = 8  # more than a token has on average in any language; of a longer text the opening is tokenised first


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    ids: list[int]
    params: SamplingParams
    new_text: Callable[[], Written]  # called once per answer


class ModelText:
    def __init__(
        self,
        info: ModelInfo,
        sampling: Mapping[str, float],
        reasoning_parser: str = AUTO,
        tool_parser: str = AUTO,
        repetition_limit: int = 0,
    ) -> None:
        """sampling, repetition_limit: of requests that name none. AUTO: the parser is chosen by the model."""
        self.info, self.sampling, self.repetition_limit = info, sampling, repetition_limit
        self.tokenizer = Tokenizer(RawTokenizer.from_str(info.tokenizer), info.special)
        self._longest = max(map(len, self.tokenizer.raw.get_vocab()))  # most characters of one token
        self.eos_ids = frozenset(info.eos_ids)
        self.style = chat_style(info.model_type, info.chat_template, reasoning_parser, tool_parser)
        self.tools, self.reasoning = self.style.tools, self.style.reasoning
        chat.fault_of(info.chat_template, info.special)  # a template without an end runs once, and not for a user

    # ---- ids

    def encode(self, text: str, add_special: bool = True, cuts: bool = False) -> list[int]:
        """Tokenise a text. One that cannot fit is refused with as little work as possible. cuts: only the last tokens
        will be used, so it may have more than fit."""
        if cuts:  # of twice the longest end that can be used, the first tokens may differ, and they are cut off
            text = text[-2 * self.info.max_model_len * self._longest :]
        else:
            self._check_length(text, "prompt")
        return self.tokenizer.encode(text, add_special)

    def encode_chat(self, rendered: ChatText, cuts: bool = False) -> list[int]:
        if not cuts:
            self._check_length(rendered.text, "messages")
        return self.tokenizer.encode_chat(rendered)

    def truncated(self, ids: list[int], body: SamplingFields) -> list[int]:
        """The last ids, if the request asks for no more: as vLLM does."""
        keep = body.truncate_prompt_tokens
        if keep == ALL:
            asked, limit = body.wanted_tokens, self.info.max_model_len
            keep = limit - (1 if asked in (None, ALL) else asked)
            if keep < 1:
                name, room = body.tokens_field, f"of the context of {limit} tokens it leaves none for the prompt"
                raise ApiError(400, f"{name} is {asked}; {room}: ask for fewer.", name)
        return ids if keep is None else ids[-keep:]

    def _check_length(self, text: str, param: str) -> None:
        self._check_chars(len(text), param)
        limit = self.info.max_model_len
        opening = text[: limit * USUAL_CHARS]
        if len(opening) < len(text) and len(self.tokenizer.encode(opening)) > 2 * limit:
            # The rest of the text may change the last tokens of the opening, but it cannot halve their number.
            raise _too_long(param, f"more than {2 * limit} tokens", limit)

    def _check_chars(self, count: int, param: str) -> None:
        """Refuse a text that has too many characters to fit, whatever they are."""
        if count > self.info.max_model_len * self._longest:
            raise _too_long(param, f"{count} characters", self.info.max_model_len)

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        most = self.info.vocab_size - 1
        wrong = next((token for token in ids if token > most), None)
        if wrong is not None:
            raise ApiError(400, f"{param} holds the token id {wrong}; ids go from 0 to {most}.", param)

    def check_count(self, ids: list[int], param: str) -> None:
        """Check the number of ids that a client sent, before anything is done with them."""
        limit = self.info.max_model_len
        if len(ids) > limit:
            raise _too_long(param, f"{len(ids)} tokens", limit)

    def check_fields(self, body: SamplingFields) -> None:
        """Check what depends on the model. The engine would refuse the same, but not with the API's field names."""
        self.check_ids(body.logit_bias or (), "logit_bias")
        self.check_ids(body.stop_token_ids or (), "stop_token_ids")
        asked, most = body.speculation, self.info.plan_facts.get("max_draft")
        if isinstance(asked, int) and most is not None and asked > most:
            limit = f"the drafter of this model allows {most}" if most else "this model has no drafter"
            raise ApiError(400, f"speculation is {asked}; {limit}: ask for fewer, or leave it out.", "speculation")

    def check_length(self, ids: list[int], param: str) -> int:
        """Return the number of tokens that may follow these ids."""
        limit = self.info.max_model_len
        if not ids:
            raise ApiError(400, f"The {_noun(param)} has no tokens; send at least one.", param)
        if len(ids) >= limit:
            raise _too_long(param, f"{len(ids)} tokens", limit)
        return limit - len(ids)

    # ---- chat

    def messages(self, given: list[ChatMessage]) -> list[dict[str, Any]]:
        """Messages as the template wants them: text instead of parts, only roles that it knows, earlier calls in its
        format."""
        self._check_chars(sum(map(_num_chars, given)), "messages")
        knows_developer = "developer" in (self.info.chat_template or "")
        return self.tools.history([_plain(message, knows_developer) for message in _with_calls(given)])

    def variables(
        self, given: Mapping[str, Any] | None = None, effort: str | None = None, effort_is_hint: bool = False
    ) -> dict[str, Any]:
        """Further variables of the template: the model's own, those of an effort, and over both the request's.
        effort_is_hint: an effort that the model does not have becomes the nearest one, or none."""
        effort = self._known_effort(effort) if effort_is_hint else effort
        wrong = next((name for name in given or () if name in RESERVED), None)
        if wrong:
            raise ApiError(400, f"chat_template_kwargs may not set '{wrong}'; remove it.", "chat_template_kwargs")
        try:
            return self.style.thinking.variables(effort) | dict(given or {})
        except UserError as error:
            raise ApiError(400, as_sentence(str(error)), EFFORT) from None

    def _known_effort(self, effort: str | None) -> str | None:
        """The effort that the model has and that is nearest to this one; None if it has none."""
        thinking = self.style.thinking
        if effort is None or effort in thinking.efforts or (thinking.has_efforts and not thinking.efforts):
            return effort
        if not (thinking.has_efforts or thinking.switch) or effort not in HINTS:
            return None
        known = [each for each in HINTS if each in (thinking.efforts or EFFORTS)]
        return min(known, key=lambda each: abs(HINTS.index(each) - HINTS.index(effort)), default=None)

    def prompt(self, body: ChatRequest) -> ChatPrompt:
        self.check_fields(body)
        tools = Tools(self.tools, body) if body.choice != "none" else None
        variables = self.variables(body.chat_template_kwargs, body.reasoning_effort, body.effort_is_hint)
        if body.documents:
            variables["documents"] = self._documents(body.documents)
        rendered = self.rendered(
            body.messages, body, tools.shown if tools else None, tools.instructions if tools else None, variables
        )
        ids = self.truncated(self.encode_chat(rendered, cuts=body.truncate_prompt_tokens is not None), body)
        text = rendered.text
        room = self.check_length(ids, "messages")
        params = body.sampling(
            self.sampling,
            room,
            self.repetition_limit,
            logprobs=body.wanted_logprobs,
            grammar=self._grammar(body, tools, text),
            keep_special=body.skip_special_tokens is False
            or bool((tools and self.tools.keep_special) or (self.reasoning and self.reasoning.keep_special)),
            continues=bool(body.continue_final_message),
        )
        several = tools is None or tools.may_be_several
        return ChatPrompt(
            ids, params, lambda: Written(self._parser(text, tools), self.eos_ids, several, self.tools.may_be_empty)
        )

    def _documents(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if "documents" in chat.variables_of(self.info.chat_template):
            return given
        sentence = "documents are not read by this model's chat template; put their text into a message."
        raise ApiError(400, sentence, "documents")

    def rendered(
        self,
        given: list[ChatMessage],
        body: ChatFields,
        tools: list[dict[str, Any]] | None,
        instructions: str | None,
        variables: dict[str, Any],
    ) -> ChatText:
        """The prompt of a request. It ends where the assistant's answer begins, unless the request says otherwise."""
        messages = self.messages(given)
        if body.continue_final_message:
            return chat.cut_open(self._with_tools(chat.left_open(messages), tools, instructions, variables, False))
        return self._with_tools(messages, tools, instructions, variables, body.add_generation_prompt is not False)

    def _with_tools(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        instructions: str | None,
        variables: dict[str, Any],
        opens: bool,
    ) -> ChatText:
        """The rendered prompt with tools: shown by the template, or by a text ('instructions') in the system prompt or
        the first user message. opens: it ends where the answer begins."""
        control, info = self.tokenizer.control, self.info
        write = partial(chat.prompt_text, control, info.chat_template, special=info.special, variables=variables)
        render = partial(write, add_generation_prompt=opens)
        if instructions is None:
            return render(messages, tools=tools)
        try:
            return render(with_system(messages, instructions))
        except PastLimit:
            raise
        except UserError:
            return render(before_first_user(messages, instructions))

    def _parser(self, prompt: str, tools: Tools | None) -> Parser:
        # Under a grammar calls begin only after the thoughts.
        calls = tools is not None and tools.allowed is None
        thoughts = self.reasoning(prompt, calls=calls) if self.reasoning else None
        parser = chain(thoughts, tools.form.parser(tools.callable) if tools else None)
        return OnlyCalls(parser) if tools and not tools.is_free else parser

    def _grammar(self, body: ChatRequest, tools: Tools | None, prompt: str) -> GrammarSpec | None:
        """The grammar of calls, of the answer's text, or of either; after the reasoning."""
        found = body.constraint()
        try:
            rule = _answer_rule(found.spec) if found else ""
            alone = self._after_thinking(found.spec, prompt) if found else None
        except UserError as error:
            raise ApiError(400, as_sentence(str(error)), body.constraint_field) from None
        return (tools and tools.constraint(self.reasoning, prompt, rule)) or alone

    def _after_thinking(self, spec: GrammarSpec, prompt: str) -> GrammarSpec:
        if spec.kind != "lark":
            return after_thinking(spec, self.reasoning, prompt)
        rules = self.reasoning.answer_grammar(prompt) if self.reasoning else ""
        return GrammarSpec("lark", f"{rules}\n{_answer_rule(spec)}\n") if rules else spec


def _answer_rule(spec: GrammarSpec) -> str:
    """Lark with a rule `answer`. A grammar that is Lark itself stands in it with names of its own."""
    return f"answer: %lark {{\n{spec.text}\n}}" if spec.kind == "lark" else answer_rule(spec)


class Tools:
    """The tools of one request in the model's own format."""

    def __init__(self, form: ToolFormat, body: ChatRequest) -> None:
        self.form, self.dicts = form, body.tool_dicts()
        self.shown = body.shown_tools() or None  # those of the prompt
        self.is_free, self.only, self.allowed = body.choice == "auto", body.chosen, body.allowed
        asked = body.parallel_tool_calls
        self.parallel = self.only is None and (form.parallel if asked is None else asked)
        # without a grammar the model decides
        self.may_be_several = self.parallel or (self.is_free and asked is None and self.allowed is None)
        self.instructions = form.instructions(self.shown, not self.is_free, self.only) if self.shown else None
        if self.is_free and self.allowed is not None and form.name not in CALL_MARKS:
            sentence = f"tool_choice allowed_tools needs the mode required for this model's calls ({form.name})."
            raise ApiError(400, sentence, "tool_choice")

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        allowed = self.allowed
        return self.dicts if allowed is None else [each for each in self.dicts if each["function"]["name"] in allowed]

    def constraint(self, reasoning: ReasoningFormat | None, prompt: str, answer: str) -> GrammarSpec | None:
        """The grammar of a required or named call, or of calls of the allowed tools. With "auto" the model decides
        between calls and any text, or response_format if that is given (answer: its Lark rule)."""
        thinking, instead = reasoning.grammar(prompt) if reasoning else "", ""
        if self.is_free and answer:
            instead = f"{reasoning.before_answer if reasoning else ''}answer\n{answer}"
        elif self.is_free and self.allowed is None:
            return None
        elif self.is_free and reasoning and reasoning.before_answer:
            instead = f"{reasoning.before_answer}free\n{self._free_text}"
        elif self.is_free:
            thoughts = thinking.replace("thinking:", "thoughts:", 1)
            thinking, instead = f"thinking: {'thoughts ' * bool(thoughts)}free\n{thoughts}\n{self._free_text}", '""'
        return self.form.constraint(self.callable, self.only, self.parallel, thinking, instead)

    @property
    def _free_text(self) -> str:
        return free_text(CALL_MARKS[self.form.name])


def free_text(marks: Sequence[str]) -> str:
    """Lark with a rule `free` for any text in which none of these marks stands. All of them begin with the same
    character and have it nowhere else.

    It is made of the text between such characters, and of beginnings of a mark that do not become one: either another
    character follows, or the text ends, or the next such character does.
    """
    heads = sorted({mark[:size] for mark in marks for size in range(1, len(mark))})
    ends = {head: {mark[len(head)] for mark in marks if mark.startswith(head)} | {head[0]} for head in heads}
    turns = "|".join(f"{_codes(head)}[^{_codes(sorted(ends[head]))}]" for head in heads)
    return "\n".join(
        [
            "free: free_open | free_held",
            'free_open: "" | free_open FREE_PLAIN | free_open FREE_TURN | free_held FREE_TURN',
            "free_held: free_open FREE_HEAD | free_held FREE_HEAD",
            f"FREE_PLAIN: /[^{_codes(marks[0][0])}]+/",
            f"FREE_TURN: /{turns}/",
            f"FREE_HEAD: /{'|'.join(map(_codes, heads))}/",
        ]
    )


def _codes(letters: Iterable[str]) -> str:
    return "".join(f"\\x{{{ord(letter):X}}}" for letter in letters)


def _noun(param: str) -> str:
    return "conversation" if param == "messages" else param


def _too_long(param: str, size: str, limit: int) -> ApiError:
    """In OpenAI's words, which LiteLLM recognises, and in plain digits, which clients parse."""
    limited = f"This model's maximum context length is {limit} tokens, including the answer"
    return ApiError(400, f"{limited}; the {_noun(param)} has {size}: shorten it.", param, "context_length_exceeded")


def with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def before_first_user(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    i = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if i is None:
        return [{"role": "user", "content": text}, *messages]
    first = messages[i]
    return [*messages[:i], first | {"content": f"{text}\n\n{first['content']}"}, *messages[i + 1 :]]


def _plain(message: ChatMessage, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": text_of(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump() | {"type": "function"} for call in message.tool_calls]
    return plain


def _with_calls(messages: list[ChatMessage]) -> Iterator[ChatMessage]:
    """The messages with OpenAI's older function_call and role 'function' as tool calls and their results."""
    name = ""
    for i, message in enumerate(messages):
        if message.function_call:
            name = f"call{i:05}"  # nine letters and digits: Mistral's template takes nothing else
            calls = [ToolCallIn(id=name, function=message.function_call)]
            message = message.model_copy(update={"tool_calls": calls})
        elif message.role == "function":
            message = message.model_copy(update={"role": "tool", "tool_call_id": name})
        yield message


def _num_chars(message: ChatMessage) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.shown) for part in content)
