"""Converts grammars in GBNF into the Lark of llguidance. GBNF is the form of llama.cpp; vLLM and SGLang call it EBNF.

    root   ::= "[" ws (number ("," ws number)*)? "]"
    number ::= [0-9]+

GBNF is defined by characters. In Lark a terminal takes as many characters as it can, so what stands between two rules
that refer to themselves becomes one terminal, in which nothing is taken too early. A grammar without such rules is one
terminal as a whole. text/grammar.py compiles the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sparkdraft.core import UserError

MAX_DEPTH = 100  # of parentheses
TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n\r]*)
    |(?P<define>::=)
    |(?P<name>[\w-]+)
    |(?P<text>"(?:[^"\\\n\r]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n\r]|\\.)*\])
    |(?P<times>[*+?]|\{\s*\d{1,9}\s*(?:,\s*\d{0,9}\s*)?\})
    |(?P<mark>[|().])""",
    re.VERBOSE,
)
ESCAPE = re.compile(r'\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([nrt"\\\[\]])|([^\\])', re.DOTALL)
CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)


def is_gbnf(text: str) -> bool:
    """True for GBNF, False for Lark, which defines its rules with a single colon."""
    return bool(RULE.search(text))


def lark_of(text: str) -> str:
    """Convert a grammar. Raises UserError for what is not GBNF."""
    rules = _Reader(text).rules()
    return _Writer(rules).text()


# ---- the parts of a rule


@dataclass(frozen=True, slots=True)
class Letters:
    """A literal or a set of characters, as Lark."""

    lark: str


@dataclass(frozen=True, slots=True)
class Reference:
    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Part
    times: str  # as Lark


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Either:
    options: tuple[Sequence, ...]


Part = Letters | Reference | Repeat | Sequence | Either


# ---- reading


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    line: int


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text)]
        self._at = 0

    def rules(self) -> dict[str, Either]:
        found: dict[str, Either] = {}
        while (token := self._peek()).kind != "end":
            if not self._begins_rule():
                raise _wrong(token, "a rule must begin with its name and ::=")
            self._at += 2
            if token.text in found:
                raise _wrong(token, f"the rule {token.text} is defined a second time")
            found[token.text] = self._either(0)
        if "root" not in found:
            raise UserError("the grammar has no rule named root, with which GBNF begins; add one")
        return found

    def _either(self, depth: int) -> Either:
        options = [self._sequence(depth)]
        while self._peek().text == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return Either(tuple(options))

    def _sequence(self, depth: int) -> Sequence:
        parts: list[Part] = []
        while (part := self._part(depth)) is not None:
            if (token := self._peek()).kind == "times":
                self._at += 1
                part = Repeat(part, _times(token))
            parts.append(part)
        return Sequence(tuple(parts))

    def _part(self, depth: int) -> Part | None:
        token = self._peek()
        if token.text in ("|", ")") or token.kind == "end" or self._begins_rule():
            return None
        self._at += 1
        if token.text == "(":
            if depth == MAX_DEPTH:
                raise _wrong(token, f"more than {MAX_DEPTH} parentheses are open, the limit")
            inner = self._either(depth + 1)
            if self._peek().text != ")":
                raise _wrong(token, "this parenthesis is not closed")
            self._at += 1
            return inner
        if token.kind == "name":
            return Reference(token.text, token.line)
        if token.kind == "text":
            return Letters(json.dumps("".join(_letters(token, token.text[1:-1]))))
        if token.kind == "set":
            return Letters(_set(token))
        if token.text == ".":
            return Letters("/(?s:.)/")
        raise _wrong(token, "this stands where a part of a rule is expected")

    def _peek(self) -> Token:
        return self._tokens[self._at]

    def _begins_rule(self) -> bool:
        return self._peek().kind == "name" and self._tokens[self._at + 1].kind == "define"


def _tokens(text: str) -> Iterator[Token]:
    at, line = 0, 1
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise _wrong(Token("", text[at : at + 16], line), "this is no part of GBNF")
        if found.lastgroup != "space":
            yield Token(str(found.lastgroup), found.group(), line)
        line += found.group().count("\n")
        at = found.end()
    yield Token("end", "", line)


def _wrong(token: Token, why: str) -> UserError:
    place = f"at {token.text[:40]!r}" if token.text else "at its end"
    return UserError(f"the grammar is not valid GBNF in line {token.line}, {place}: {why}")


def _letters(token: Token, text: str) -> Iterator[str]:
    """The characters that a literal or a set spells."""
    at = 0
    while at < len(text):
        found = ESCAPE.match(text, at)
        if found is None:
            raise _wrong(
                token, r"after a backslash only \n, \r, \t, \", \\, \[, \], \x.., \u.... and \U........ are known"
            )
        code = found[1] or found[2] or found[3]
        if code and int(code, 16) > 0x10FFFF:
            raise _wrong(token, f"there is no character {code}")
        yield chr(int(code, 16)) if code else CONTROL.get(found[4], found[4]) if found[4] else found[5]
        at = found.end()


def _set(token: Token) -> str:
    inner = token.text[1:-1]
    negated = inner.startswith("^")
    letters = [*_letters(token, inner[negated:])]
    if not letters:
        raise _wrong(token, "a set of characters is empty")
    ranges, at = "", 0
    while at < len(letters):
        is_range = at + 2 < len(letters) and letters[at + 1] == "-"
        first, last = letters[at], letters[at + 2 * is_range]
        if first > last:
            raise _wrong(token, f"the range {first}-{last} is in the wrong order")
        ranges += f"\\x{{{ord(first):X}}}" + (f"-\\x{{{ord(last):X}}}" if is_range else "")
        at += 3 if is_range else 1
    return f"/[{'^' * negated}{ranges}]/"


def _times(token: Token) -> str:
    if token.text in "*+?":
        return token.text
    low, comma, high = map(str.strip, token.text[1:-1].partition(","))
    if high and int(high) < int(low):
        raise _wrong(token, "the smaller number must come first")
    return f"{{{low}{comma}{high}}}"


# ---- writing


class _Writer:
    def __init__(self, rules: Mapping[str, Either]) -> None:
        self._rules = rules
        self._terminals = _terminals(rules)
        self._names = {name: self._name(i, name) for i, name in enumerate(rules)}
        self._known: dict[int, bool] = {}  # whether parts of the rules are terminals, by their id()
        self._runs: dict[str, str] = {}  # the body of a terminal that has no rule of its own -> its name

    def text(self) -> str:
        lines = [f"start: {self._names['root']}"]
        for name, body in self._rules.items():
            text = self._terminal(body) if name in self._terminals else self._rule(body)
            lines.append(f"{self._names[name]}: {text}")
        return "\n".join([*lines, *(f"{name}: {body}" for body, name in self._runs.items())]) + "\n"

    def _name(self, index: int, name: str) -> str:
        plain = f"r{index}_{re.sub('[^a-z0-9]', '_', name.lower())}"
        return plain.upper() if name in self._terminals else plain

    def _is_terminal(self, part: Part) -> bool:
        found = self._known.get(id(part))
        if found is None:  # a part is asked about once for each level around it
            found = self._known[id(part)] = self._found_terminal(part)
        return found

    def _found_terminal(self, part: Part) -> bool:
        match part:
            case Letters():
                return True
            case Reference(name):
                return name in self._terminals
            case Repeat(inner):
                return self._is_terminal(inner)
            case Sequence(parts) | Either(parts):
                return all(map(self._is_terminal, parts))

    def _terminal(self, part: Part) -> str:
        match part:
            case Letters(lark):
                return lark
            case Reference(name):
                return self._names[name]
            case Repeat(inner, times):
                return f"({self._terminal(inner)}){times}"
            case Sequence(parts):
                return " ".join(map(self._terminal, parts)) or '""'
            case Either(options):
                return "(" + " | ".join(map(self._terminal, options)) + ")"

    def _rule(self, part: Part) -> str:
        """Lark of a part of a rule, in which the longest runs without such rules are terminals of their own."""
        if self._is_terminal(part):
            return self._run(self._terminal(part))
        match part:
            case Repeat(inner, times):
                return f"({self._rule(inner)}){times}"
            case Sequence(parts):
                return " ".join(self._runs_and_rules(parts))
            case Either(options):
                return "(" + " | ".join(map(self._rule, options)) + ")"
            case Reference(name):
                return self._names[name]
            case Letters(lark):
                return lark

    def _runs_and_rules(self, parts: tuple[Part, ...]) -> Iterator[str]:
        run: list[Part] = []
        for part in parts:
            if self._is_terminal(part):
                run.append(part)
                continue
            if run:
                yield self._run(self._terminal(Sequence(tuple(run))))
            run = []
            yield self._rule(part)
        if run:
            yield self._run(self._terminal(Sequence(tuple(run))))

    def _run(self, body: str) -> str:
        return self._runs.setdefault(body, f"T{len(self._runs)}")


def _terminals(rules: Mapping[str, Either]) -> set[str]:
    """The rules that refer to themselves neither directly nor through others."""
    waits = {name: {each.name for each in _references(body, rules)} for name, body in rules.items()}
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, names in waits.items():
        for each in names:
            used_by[each].append(name)
    ready = [name for name, names in waits.items() if not names]
    found = set(ready)
    while ready:
        done = ready.pop()
        for name in used_by[done]:
            waits[name].discard(done)
            if not waits[name]:
                found.add(name)
                ready.append(name)
    return found


def _references(part: Part, rules: Mapping[str, Either]) -> Iterator[Reference]:
    match part:
        case Reference(name, line):
            if name not in rules:
                raise UserError(f"the grammar refers in line {line} to the rule {name[:100]}, which it does not define")
            yield part
        case Repeat(inner):
            yield from _references(inner, rules)
        case Sequence(parts) | Either(parts):
            for each in parts:
                yield from _references(each, rules)
