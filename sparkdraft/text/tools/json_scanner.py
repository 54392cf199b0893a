"""Reads one JSON object in text that arrives in pieces: where it ends, where it breaks, and its repaired text.

It is a small automaton with an explicit stack, so that deep nesting cannot overflow ours. It repairs what models get
wrong without changing the meaning: raw line breaks in strings, backslashes that escape nothing, Python's True, False
and None.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
VALUE, FIRST_ITEM, FIRST_KEY, KEY, COLON, AFTER, STRING, ESCAPE, HEX, WORD = range(10)
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # characters of a JSON string that need no escape
WORD_LETTERS = re.compile(r"[-+.\w]+", re.ASCII)
LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
PYTHON = {"True": "true", "False": "false", "None": "null"}
SPACE = " \t\r\n"


def literal(word: str) -> str | None:
    """A number, true, false or null as JSON writes it; None for any other word."""
    word = PYTHON.get(word, word)
    return word if LITERAL.fullmatch(word) else None


class JsonScanner:
    """inside: begin within an object, after one of its members."""

    def __init__(self, inside: bool = False) -> None:
        self.done = False
        self.broken = False
        self._stack = ["{"] if inside else []
        self._state = AFTER if inside else VALUE
        self._is_key = False
        self._word = ""  # a number or name that may continue, or the letters of an escape: not given out yet

    def push(self, text: str, start: int = 0) -> tuple[int, str]:
        """How far the object reaches in this text, and its text there. At the first character that cannot belong to it,
        it is broken; a word that is not JSON is then given out as it is."""
        at, out = start, []
        while at < len(text) and not self.done and not self.broken:
            if self._state == STRING and (run := PLAIN.match(text, at)):
                out.append(run.group())
                at = run.end()
            elif self._state == WORD and (run := WORD_LETTERS.match(text, at)):
                self._word += run.group()
                at = run.end()
            elif self._state == WORD:
                word = literal(self._word)
                out.append(self._word if word is None else word)
                self._word, self._state, self.broken = "", AFTER, word is None
            elif (piece := self._step(text[at])) is None:
                self.broken = True
            else:
                out.append(piece)
                at += 1
        return at, "".join(out)

    def rest(self) -> str:
        """What was not given out when the text ended too early."""
        return ("\\" if self._state in (ESCAPE, HEX) else "") + self._word

    def _step(self, letter: str) -> str | None:
        """Take one character; None if it is not allowed here."""
        if self._state == STRING:
            return self._in_string(letter)
        if self._state == ESCAPE:
            return self._escape(letter)
        if self._state == HEX:
            return self._hex(letter)
        if letter in SPACE:
            return letter if self._stack else None
        if self._state == COLON:
            self._state = VALUE
            return letter if letter == ":" else None
        if letter in "]}":
            return self._close(letter)
        if self._state == AFTER:
            self._state = KEY if self._stack[-1] == "{" else VALUE
            return letter if letter == "," else None
        if self._state in (KEY, FIRST_KEY):
            self._state, self._is_key = STRING, True
            return letter if letter == '"' else None
        return self._open(letter)

    def _open(self, letter: str) -> str | None:
        """A value begins."""
        if not self._stack and letter != "{":
            return None
        if letter in "{[":
            self._stack.append(letter)
            self._state = FIRST_KEY if letter == "{" else FIRST_ITEM
            return letter if len(self._stack) <= MAX_DEPTH else None
        if letter == '"':
            self._state, self._is_key = STRING, False
            return letter
        if WORD_LETTERS.match(letter):
            self._state, self._word = WORD, letter
            return ""
        return None

    def _close(self, letter: str) -> str | None:
        empty = FIRST_KEY if letter == "}" else FIRST_ITEM
        if not self._stack or self._stack[-1] != ("{" if letter == "}" else "[") or self._state not in (AFTER, empty):
            return None
        self._stack.pop()
        self._state, self.done = AFTER, not self._stack
        return letter

    def _in_string(self, letter: str) -> str:
        if letter == '"':
            self._state = COLON if self._is_key else AFTER
            return letter
        if letter == "\\":
            self._state = ESCAPE
            return ""
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(letter, f"\\u{ord(letter):04x}")

    def _escape(self, letter: str) -> str:
        if letter == "u":
            self._state, self._word = HEX, "u"
            return ""
        self._state = STRING
        if letter == "'":
            return letter
        if letter in '"\\/bfnrt':
            return "\\" + letter
        return "\\\\" + (letter if letter >= " " else self._in_string(letter))

    def _hex(self, letter: str) -> str:
        if letter in "0123456789abcdefABCDEF":
            self._word += letter
            if len(self._word) < 5:
                return ""
            word, self._word, self._state = self._word, "", STRING
            return "\\" + word
        word, self._word, self._state = self._word, "", STRING
        return "\\\\" + word + self._in_string_or_plain(letter)

    def _in_string_or_plain(self, letter: str) -> str:
        return self._in_string(letter) if letter in '"\\' or letter < " " else letter
