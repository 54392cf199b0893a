"""The tools of a Responses request: what the model is offered, which of them it may call, and how a call is named.

A chat template knows functions only, so namespaces are flattened, and a custom tool becomes a function with one string.
`Toolbox` keeps both names of each tool, the client's and the model's. Tools that appear later in a conversation, as the
results of a tool search do, can be called and are not shown at its beginning, which stays as it was.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from sparkdraft.server.protocol.chat import (
    MAX_SCHEMA_BYTES,
    MAX_TOOLS,
    AllowedChoice,
    AllowedTools,
    ChosenFunction,
    Function,
    Name,
    NamedChoice,
    Tool,
)
from sparkdraft.server.protocol.sampling import Fields
from sparkdraft.server.protocol.shapes import Json
from sparkdraft.server.protocol.validation import ApiError, from_validation, shown
from sparkdraft.server.protocol.written import parsed
from sparkdraft.text.tools.base import json_rule

# Tools that OpenAI's servers run, or clients with a protocol of their own. An agent lists them for every model.
HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer-preview",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "web_search",
)
VERSIONED = ("web_search_",)  # and a date, or "preview"
SEARCH = "tool_search"  # hosted too, unless the client runs it
INPUT = "input"  # the one parameter of a custom tool
LONGEST_NAME = 128
FUNCTION, CUSTOM = "function", "custom"
PATTERN = '"pattern": '  # in a schema as JSON
KINDS = {"lark": "Lark grammar", "regex": "regular expression"}
Find = Callable[[str], Json | None]  # of a stored item by its id
Model = TypeVar("Model", bound=Fields)


def validated(model: type[Model], value: Any, place: str) -> Model:
    """Read a part of the body. place: where it is, for the sentence about a mistake."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = [{**each, "loc": ("body", place, *each["loc"])} for each in error.errors()]
        raise from_validation(found, {place: value}) from None


class FunctionTool(Fields):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(Fields):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Fields):
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class SearchTool(Fields):
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Namespace(Fields):
    name: Name
    description: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Given:
    """A tool of the request. place: where it stands in the body. late: an item within the conversation added it."""

    place: str
    tool: Json
    late: bool = False


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as the model sees it."""

    function: Function
    own: str  # the client's name
    kind: str  # FUNCTION, CUSTOM or SEARCH
    namespace: str | None = None

    @property
    def name(self) -> str:
        return self.function.name


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class Toolbox:
    def __init__(self, given: Sequence[Given]) -> None:
        first = [tool for each in given if not each.late for tool in read(each.tool, each.place)]
        self._by_name: dict[str, Offered] = {}
        self._by_own: dict[tuple[str | None, str], Offered] = {}
        shared = {own for own, count in Counter(tool.own for tool in first).items() if count > 1}
        for tool in first:
            self._add(_renamed(tool) if tool.namespace and tool.own in shared else tool)
        self.late = frozenset(name for each in given if each.late for name in self._added(each))

    def _add(self, tool: Offered) -> None:
        if len(self._by_name) == MAX_TOOLS:
            count = f"more than {MAX_TOOLS} functions, namespaces included"
            raise ApiError(400, f"tools has {count}; {MAX_TOOLS} is the limit: send fewer.", "tools")
        if tool.name in self._by_name:
            raise ApiError(400, f"Two tools have the name {tool.name!r}; give each its own.", "tools")
        self._by_name[tool.name] = self._by_own[tool.namespace, tool.own] = tool

    def _added(self, given: Given) -> list[str]:
        """The new names of a late tool; the same tool may be found again. The names before it stay as they are."""
        found = [tool for tool in read(given.tool, given.place) if (tool.namespace, tool.own) not in self._by_own]
        found = [_renamed(tool) if tool.namespace and tool.own in self._by_name else tool for tool in found]
        for tool in found:
            self._add(tool)
        return [tool.name for tool in found]

    @property
    def tools(self) -> list[Tool]:
        return [Tool(type="function", function=tool.function) for tool in self._by_name.values()]

    def check_patterns(self) -> None:
        """Refuse a regular expression that a grammar of calls would leave out. Call it in the thread."""
        for tool in self._by_name.values():
            schema = tool.function.parameters or {}
            if tool.kind == CUSTOM and "pattern" in schema["properties"][INPUT] and PATTERN not in json_rule(schema):
                sentence = f"The regular expression of the tool '{tool.own}' cannot be used; correct or simplify it."
                raise ApiError(400, sentence, "tools")

    def __getitem__(self, name: str) -> Offered | None:
        """The tool that the model calls so."""
        return self._by_name.get(name)

    def named(self, own: str, namespace: str | None = None) -> Offered | None:
        """The tool that the client calls so; without a namespace, also one that is alone with its name."""
        if found := self._by_own.get((namespace, own)):
            return found
        alone = [tool for tool in self._by_name.values() if tool.own == own and namespace is None]
        return alone[0] if len(alone) == 1 else None

    def described(self, given: Sequence[Json], place: str, before: set[str]) -> str:
        """Tools that an item added, as the model reads them there. before: names of those that were described, which
        are only named again, because a body may repeat them often; those of this item are added."""
        shown: list[Json] = []
        for i, each in enumerate(given):
            for tool in read(each, f"{place}[{i}]"):
                known = self.named(tool.own, tool.namespace) or tool
                is_new = known.name not in before
                shown.append(known.function.model_dump(exclude_none=True) if is_new else {"name": known.name})
                before.add(known.name)
        return json.dumps(shown, ensure_ascii=False)

    def choice(self, given: str | Json | None) -> ToolChoice:
        if isinstance(given, dict):
            if given.get("type") == "allowed_tools":
                return self._allowed(given)
            return _choice(self._chosen(given))
        if given is None or given == "auto":
            return "auto"
        if given == "none" or given == "required":
            return "none" if given == "none" else "required"
        sentence = f'tool_choice is {shown(given)}; it must be "none", "auto", "required" or an object.'
        raise ApiError(400, sentence, "tool_choice")

    def _allowed(self, given: Json) -> AllowedChoice:
        mode, listed = given.get("mode", "auto"), given.get("tools")
        if mode not in ("auto", "required"):
            sentence = f'tool_choice.mode is {shown(mode)}; it must be "auto" or "required".'
            raise ApiError(400, sentence, "tool_choice.mode")
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise ApiError(400, "tool_choice.tools must be a list of objects with type and name.", "tool_choice.tools")
        kept = {tool.name: tool for each in listed if not is_hosted(each) for tool in [self._chosen(each)]}
        if not kept:
            sentence = "tool_choice allows no tool that this server can offer; list a function or a custom tool."
            raise ApiError(400, sentence, "tool_choice.tools")
        allowed = AllowedTools(mode=mode, tools=[_choice(tool) for tool in kept.values()])
        return AllowedChoice(type="allowed_tools", allowed_tools=allowed)

    def _chosen(self, given: Json) -> Offered:
        kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
        if kind == SEARCH:
            name = SEARCH
        elif is_hosted(given):
            sentence = f"tool_choice names {kind}, which this server cannot run; choose a function or a custom tool."
            raise ApiError(400, sentence, "tool_choice")
        if kind not in (FUNCTION, CUSTOM, SEARCH) or not isinstance(name, str):
            sentence = (
                'tool_choice must be an object with the type "function" or "custom" and a name, or allowed_tools.'
            )
            raise ApiError(400, sentence, "tool_choice")
        tool = self.named(name, namespace if isinstance(namespace, str) else None)
        if tool is None or tool.kind != kind:
            others = ", ".join(list(self._by_name)[:8]) or "none"
            sentence = f"tool_choice names the {kind} tool {shown(name)}; the tools are: {others}."
            raise ApiError(400, sentence, "tool_choice")
        return tool


def _choice(tool: Offered) -> NamedChoice:
    return NamedChoice(type="function", function=ChosenFunction(name=tool.name))


def is_hosted(tool: Json) -> bool:
    kind = tool.get("type")
    is_search = kind == SEARCH and tool.get("execution") != "client"
    return isinstance(kind, str) and (is_search or kind in HOSTED or kind.startswith(VERSIONED))


def read(value: Json, place: str) -> list[Offered]:
    """The functions of a tool of the request, under the client's names; none of a hosted one."""
    kind = value.get("type")
    if is_hosted(value):
        return []
    if kind == FUNCTION:
        return [_function(validated(FunctionTool, value, place))]
    if kind == CUSTOM:
        return [_custom(validated(CustomTool, value, place), place)]
    if kind == SEARCH:
        search = validated(SearchTool, value, place)
        function = Function(name=SEARCH, description=search.description, parameters=search.parameters)
        return [Offered(function, SEARCH, SEARCH)]
    if kind == "namespace":
        return _namespace(validated(Namespace, value, place), place)
    kinds = "function, custom, namespace, and OpenAI's hosted tools, which are left out"
    what = f"{place}.type is {shown(kind)}" if kind is not None else f"{place}.type is missing"
    raise ApiError(400, f"{what}; the types of tools are {kinds}.", f"{place}.type")


def _function(tool: FunctionTool) -> Offered:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict or None
    )
    return Offered(function, tool.name, FUNCTION)


def _custom(tool: CustomTool, place: str) -> Offered:
    text: Json = {"type": "string"}
    says = [tool.description] if tool.description else []
    form = tool.format
    if form and form.type == "grammar":
        if not form.syntax or not form.definition:
            sentence = f"{place}.format is a grammar and needs syntax (lark or regex) and definition; send both."
            raise ApiError(400, sentence, f"{place}.format")
        if len(form.definition.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
            sentence = f"{place}.format.definition is longer than {MAX_SCHEMA_BYTES:,} bytes; shorten it."
            raise ApiError(400, sentence, f"{place}.format.definition")
        says.append(f"The input must follow this {KINDS[form.syntax]}:\n{form.definition}")
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function = Function(name=tool.name, description="\n\n".join(says) or None, parameters=schema)
    return Offered(function, tool.name, CUSTOM)


def _namespace(space: Namespace, place: str) -> list[Offered]:
    if any(value.get("type") == "namespace" for value in space.tools):
        raise ApiError(400, f"{place} has a namespace within a namespace; send its tools one level up.", place)
    found = [tool for i, value in enumerate(space.tools) for tool in read(value, f"{place}.tools[{i}]")]
    found = [replace(tool, namespace=space.name) for tool in found]
    if space.description and found:  # said once, so that a large namespace does not cost its description many times
        first = found[0].function
        about = f"{space.name}: {space.description}"
        says = f"{first.description}\n\n{about}" if first.description else about
        found[0] = replace(found[0], function=first.model_copy(update={"description": says}))
    return found


def _renamed(tool: Offered) -> Offered:
    """The tool with its namespace in the name. Others keep the client's name, which instructions use."""
    name = f"{tool.namespace}__{tool.own}"[:LONGEST_NAME]
    return replace(tool, function=tool.function.model_copy(update={"name": name}))


# ---- the input of a custom tool


def wrapped(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# The last but one is no escape: a letter that is no hexadecimal digit follows too soon.
PIECE = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u]|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|"')
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}  # any other character stands for itself
LONE = "\ufffd"  # stands for half of a pair of surrogates


class InputReader:
    """Reads the input of a custom tool out of the arguments while they arrive. Arguments of another form are read at
    the end: the only text among them, or all of them as they are."""

    def __init__(self) -> None:
        self._raw, self._inside, self._ended = "", False, False
        self._high = 0  # the first half of a pair of surrogates

    @property
    def is_broken(self) -> bool:
        """Whether the arguments so far are the beginning of an object. At the end the call has then broken off."""
        return not self._ended if self._inside else self._raw.lstrip().startswith("{") and parsed(self._raw) is None

    def feed(self, text: str) -> str:
        """Return the characters that became known."""
        self._raw += "" if self._ended else text
        if not self._inside and (head := HEAD.match(self._raw)):
            self._inside, self._raw = True, self._raw[head.end() :]
        return self._decoded() if self._inside else ""

    def finish(self) -> str:
        if self._inside:
            return self._paired("") if self._high else ""
        value = parsed(self._raw)
        texts = [each for each in value.values() if isinstance(each, str)] if isinstance(value, dict) else []
        if isinstance(value, dict) and isinstance(value.get(INPUT), str):
            return str(value[INPUT])
        return texts[0] if len(texts) == 1 else self._raw

    def _decoded(self) -> str:
        at, out = 0, ""
        while not self._ended and (piece := PIECE.match(self._raw, at)):
            at, text = piece.end(), piece.group()
            if text == '"':
                self._ended = True
                out += self._paired("")
            elif len(text) == 6 and text.startswith("\\u"):
                out += self._unit(int(text[2:], 16))
            else:
                out += self._paired(ESCAPES.get(text[1:], text[1:]) if text[0] == "\\" else text)
        self._raw = self._raw[at:]
        return out

    def _unit(self, code: int) -> str:
        if 0xDC00 <= code < 0xE000:
            high, self._high = self._high, 0
            return chr(0x10000 + ((high - 0xD800) << 10) + code - 0xDC00) if high else LONE
        if 0xD800 <= code < 0xDC00:
            before = self._paired("")
            self._high = code
            return before
        return self._paired(chr(code))

    def _paired(self, text: str) -> str:
        """The text after a first half that stayed alone."""
        before, self._high = LONE if self._high else "", 0
        return before + text
