"""Calls as tags within tags, as Qwen3-Coder and Qwen3.5 write them.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values are raw text whose JSON types are in the tool's schema, so each is given out when it is complete. Calls with
omitted or doubled tags are read too. A value may contain </parameter> itself: within a line it belongs to the value
unless the next parameter or the end of the call follows, and on a line of its own if it closes a <parameter ...> of the
value.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from sparkdraft.text.events import Content, Parser, Reading
from sparkdraft.text.tools.base import Function, ToolFormat, Tools, choices_of, json_rule, lark
from sparkdraft.text.tools.calls import literal, quoted, read_json
from sparkdraft.text.tools.hermes import CLOSE, OPEN, HermesParser

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
END = f"{FUNCTION_END}\n{CLOSE}"
AFTER_VALUE = (PARAMETER, FUNCTION_END, CLOSE)
HALF_HEAD = re.compile(r"<function=[^<>\n]*")  # of a call that the end of the text cut
INNER = re.compile(r"<parameter(?:\s[^<>]*)?(?<!/)>")  # opens an element of a text that is XML
SPACE, ANY = r"[ \t\r\n]", "(?s:.*)"  # in a grammar, what skip_space skips, and any text
MOST_OTHERS = 8  # parameters that the schema does not name
SCALARS = {"integer": "INTEGER", "number": "NUMBER", "boolean": "BOOLEAN", "null": '"null"'}  # terminals defined below


class Qwen3XmlParser(HermesParser):
    opens: ClassVar[tuple[str, ...]] = (OPEN, FUNCTION)

    def call(self, tag: str) -> Reading[bool]:
        if tag == OPEN:
            yield from self.skip_space()
            if not (yield from self.skip(FUNCTION)):
                return (yield from super().call(tag))
        end, mark = yield from self.find((">", "\n", "<"))
        name = self.text[self.at : end].strip()
        # Without the outer tag it may be prose about tags, so the function must be a known one.
        if mark != ">" or not name or (tag == FUNCTION and name not in self.functions):
            return False
        self.at = end + 1
        self.begin(name)
        yield from self.skip_space()
        if (yield from self.peek()) == "{":  # Llama 3.1's form: the arguments as one JSON object
            self.complete = yield from self.stream_object()
            if self.complete:
                yield from self.skip_space()
                yield from self.skip(FUNCTION_END)
        else:
            self.complete = yield from self._parameters(self.functions.get(name, Function(name, "", {})))
        return True

    def is_cut(self, tag: str) -> bool:
        text = self.text.strip()
        if tag == FUNCTION:
            return any(name.startswith(text) for name in self.functions)
        return FUNCTION.startswith(text) or bool(HALF_HEAD.fullmatch(text)) or super().is_cut(tag)

    def _parameters(self, function: Function) -> Reading[bool]:
        """Read the arguments up to the end of the function; False if the text ends first."""
        given: list[str] = []
        while True:
            yield from self.skip_space()
            if (yield from self.skip(PARAMETER)):
                if not (yield from self._parameter(function, given)):
                    return False
            elif (yield from self.skip(FUNCTION_END)) or (yield from self._at_close()):
                self.write("}" if given else "{}")
                return True
            else:
                end, mark = yield from self.find(AFTER_VALUE)
                rest, self.at = self.text[:end].strip(), end
                is_half = self.was_cut and not mark and any(tag.startswith(rest) for tag in AFTER_VALUE)
                self.give(Content("" if is_half else rest))
                if not mark:
                    return False

    def _at_close(self) -> Reading[bool]:
        """True if the call ends here without the end of the function; does not read the tag."""
        found = yield from self.skip(CLOSE)
        self.at -= len(CLOSE) if found else 0
        return found

    def _parameter(self, function: Function, given: list[str]) -> Reading[bool]:
        end, mark = yield from self.find((">", "\n"))
        key = self.text[self.at : end].strip()
        self.at = end + len(mark) if mark == ">" else end
        value, complete = yield from self._value(function, {*given, key}, _is_text(function, key))
        given.append(key)
        text = to_json(value, function.property(key), function) if complete else quoted(value)[:-1]
        self.write(f"{', ' if len(given) > 1 else '{'}{quoted(key)}: {text}")
        return complete

    def _value(self, function: Function, given: set[str], is_text: bool) -> Reading[tuple[str, bool]]:
        """Read the value and its end: the closing tag, the end of the call, or a parameter that is not given yet."""
        properties = function.schema.get("properties")
        others = [key for key in properties if key not in given] if isinstance(properties, dict) else []
        nexts = "|".join(map(re.escape, others)) or "(?!)"
        ends = re.compile(rf"{PARAMETER_END}|\n(?={PARAMETER}(?:{nexts})>)|\n?(?={FUNCTION_END}\s{{0,8}}{CLOSE})")
        longest, start = 64 + max(map(len, others), default=0), self.at
        seen = start
        while (found := ends.search(self.text, seen)) is None or (
            is_text and not (yield from self._ends(found, start))
        ):
            if found:
                seen = found.end()
                continue
            seen = max(seen, len(self.text) - longest)
            if not (yield from self.more()):
                found = re.compile(rf"\n?(?={FUNCTION_END}\s*$)").search(self.text, start)
                break
        value = self.text[start : found.start() if found else len(self.text)]
        self.at = found.end() if found else len(self.text)
        value = value.removeprefix("\n")
        return (value.removesuffix("\n") if found else value), found is not None

    def _ends(self, found: re.Match[str], start: int) -> Reading[bool]:
        """True if the value that begins at `start` ends at this tag, which is not a part of it."""
        text = self.text[start : found.start()]
        if found.group() != PARAMETER_END:
            return True
        if text[-1:] in ("", "\n") and len(INNER.findall(text)) <= text.count(PARAMETER_END):
            return True
        self.at = found.end()
        yield from self.skip_space()
        for tag in AFTER_VALUE:
            if (yield from self.skip(tag)):
                return True
        return any(tag.startswith(self.text[self.at :]) for tag in AFTER_VALUE)  # the text breaks off here


def to_json(text: str, schema: Any, function: Function) -> str:
    """Write a raw value as JSON of a type that its schema allows; a string if none fits."""
    if text in [choice for choice in choices_of(schema) or () if isinstance(choice, str)]:
        return quoted(text)
    types = _types(schema, function)
    plain = text.strip()
    word = {"true": "true", "false": "false", "null": "null", "none": "null"}.get(plain.lower()) or literal(plain)
    kind = {"true": "boolean", "false": "boolean", "null": "null"}.get(word or "", "number")
    if word and (kind in types or (kind == "number" and "integer" in types and re.fullmatch(r"-?\d+(\.0+)?", word))):
        return word.split(".")[0] if "number" not in types and kind == "number" else word
    if plain[:1] in ("{", "[") and (types & {"object", "array"} or not types):
        try:
            return json.dumps(read_json(plain), ensure_ascii=False)
        except (ValueError, RecursionError):
            return quoted(text)
    return quoted(text)


def _types(schema: Any, function: Function, seen: list[int] | None = None) -> set[str]:
    """The types that a schema allows; empty if it names none."""
    schema, seen = function.resolve(schema), [] if seen is None else seen
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) > 64:
        return set()
    seen.append(id(schema))
    kind = schema.get("type")
    types = {k for k in (kind if isinstance(kind, list) else [kind]) if isinstance(k, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else []:
            types |= _types(part, function, seen)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return types or {names.get(type(choice), "null") for choice in choices_of(schema) or ()}


class Qwen3Xml(ToolFormat):
    name = "qwen3_xml"
    keep_special = True
    separator = '"\\n"'

    def parser(self, tools: Tools) -> Parser:
        return Qwen3XmlParser(tools)

    def call_rules(self, rule: str, function: Function) -> str:
        """Rule number i is what follows <parameter= once the first i parameters are written or left out."""
        properties, required = function.schema.get("properties"), function.schema.get("required")
        keys = [k for k in properties if not re.search(r"[<>\n]", k)] if isinstance(properties, dict) else []
        others = function.schema.get("additionalProperties", True) is not False
        nexts = [*(f"{rule}_{i}" for i in range(len(keys))), f"others_{MOST_OTHERS}" if others else ""]
        last_needed = max((i for i, key in enumerate(keys) if _in(key, required)), default=-1)

        def then(i: int, more: str, last: str) -> str:
            choices = [f"{more} {nexts[i]}" if nexts[i] else "", last if i > last_needed else ""]
            return f"({' | '.join(filter(None, choices))})"

        head = lark(f"{OPEN}\n{FUNCTION}{function.name}>\n")
        rules = [f"{rule}: {head} {then(0, lark(PARAMETER), lark(END))}"]
        for i, key in enumerate(keys):
            name, value, begin = nexts[i], _value_rule(function, key), lark(f"{key}>\n")
            if value:
                rules.append(f"{name}_value: {value}")
                text = f"{begin} {name}_value {then(i + 1, 'more', 'end')}"
            else:
                text = f"{begin} {then(i + 1, 'text_more', 'text_end')}"
            rules.append(f"{name}: {text}{f' | {nexts[i + 1]}' if nexts[i + 1] and not _in(key, required) else ''}")
        return "\n".join(rules)

    def common_rules(self) -> str:
        """Rules for text that the parser reads as one value: without its end, or a closing tag on a line of its own."""
        shut, tail, key = f"\n{PARAMETER_END}\n", lark(f"\n{CLOSE}"), '/[^<>\\n]+/ ">\\n"'
        end, call_end = rf"<\/parameter>{SPACE}*", rf"<\/function>{SPACE}{{0,8}}<\/tool_call>"
        numbers = range(2, MOST_OTHERS + 1)
        return "\n".join(
            [
                f"others_1: {key} text_end",
                *(f"others_{i}: {key} (text_more others_{i - 1} | text_end)" for i in numbers),
                f"more: {lark(shut + PARAMETER)}",
                f"end: {lark(shut + END)}",
                "text_more[lazy]: MORE",
                f"text_end: text_and_tag {tail}",
                "text_and_tag[lazy]: LAST",
                rf"TEXT: ~/({ANY}\n)?<\/parameter>{ANY}/",
                rf"MORE: (TEXT /\n?{end}<parameter=/) & ~/{ANY}({end}<\/(function|tool_call)>|{call_end}){ANY}/",
                rf"LAST: (TEXT /\n?{end}<\/function>/) & ~/{ANY}({end}(<parameter=|<\/tool_call>)|{call_end}){ANY}/",
                "INTEGER: /-?(0|[1-9][0-9]{0,17})/",
                "NUMBER: /-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/",
                "BOOLEAN: /[Tt]rue|[Ff]alse/",
            ]
        )


def _value_rule(function: Function, key: str) -> str:
    """Lark for the values of a parameter; "": any text."""
    schema = function.property(key)
    types = _types(schema, function)
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) and choice for choice in choices):
        return " | ".join(map(lark, choices))
    if types and types <= set(SCALARS):
        return " | ".join(SCALARS[kind] for kind in sorted(types))
    if types and types <= {"array", "object"}:
        return json_rule(function.whole(schema), {"type": sorted(types)})
    return ""


def _is_text(function: Function, key: str) -> bool:
    """True if a value of a parameter may contain any characters."""
    schema = function.property(key)
    types = _types(schema, function)
    return not (types and types <= set(SCALARS)) and not (isinstance(schema, dict) and "enum" in schema)


def _in(key: str, names: Any) -> bool:
    return isinstance(names, list) and key in names
