"""GBNF as Lark: the language is the same by characters, and what is no GBNF is refused with its line."""

from __future__ import annotations

import itertools
import re

import pytest

from sparkdraft.core import GrammarSpec, UserError
from sparkdraft.text.gbnf import MAX_DEPTH, is_gbnf, lark_of
from tests.text.test_grammar import is_text

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws   # recursive
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
unused-rule ::= .
"""


def takes(text: str, gbnf: str) -> bool:
    return is_text(GrammarSpec("lark", lark_of(gbnf)), text)


@pytest.mark.parametrize(
    ("gbnf", "regex"),
    [
        ('root ::= [a-b]+ "a"', "[ab]+a"),
        ('root ::= word "a"\nword ::= [a-b]+', "[ab]+a"),  # a terminal of its own would take the last "a" too
        ('root ::= "a"? ("b" | "ab"){2,} | ""', "a?(b|ab){2,}|"),
        ('root ::= "a"{1,2} [^b\\n]* .', "a{1,2}[^b\\n]*(?s:.)"),
        (
            'root ::= a | b\n# a comment ::= here\na ::=\n  [\\]\\[/^-]\nb ::= b-2 (\n b-2\n)\nb-2 ::= "b" |',
            "[][/^-]|b{0,2}",
        ),
        (r'root ::= "\x61\u0062" [\U0000005d-\x5E]', "ab[]^]"),
    ],
)
def test_short_texts_are_taken_as_by_a_regex(gbnf: str, regex: str) -> None:
    for size in range(4):
        for text in map("".join, itertools.product("ab]^", repeat=size)):
            assert takes(text, gbnf) == bool(re.fullmatch(regex, text)), text


def test_rules_that_refer_to_themselves() -> None:
    nested = 'root ::= "(" root ")" | [a-z]* "x" | root "+" root'
    for text, fits in {"((abx))": True, "x+(x+xx)": True, "()": False, "(x": False, "x)": False}.items():
        assert takes(text, nested) == fits, text
    for text, fits in {
        '{"a": [1, -2.5e3, "x\\n\\u00e9"], "b": {"c":null}}': True,
        '{\n  "é": []\n}': True,
        '{"a"}': False,
        '{"a": 01}': False,
        '["a"]': False,
    }.items():
        assert takes(text, JSON) == fits, text


def test_gbnf_is_told_from_lark() -> None:
    assert is_gbnf(JSON) and is_gbnf("# first\n  root::='a'")
    for lark in ('start: "a ::= b"', "%llguidance {}\nstart: /a/", 'start: "::="\n'):
        assert not is_gbnf(lark)


@pytest.mark.parametrize(
    ("gbnf", "told"),
    [
        ('a ::= "x"', "no rule named root"),
        ("root ::= b", "refers in line 1 to the rule b, which it does not define"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3, at 'root': the rule root is defined a second time"),
        ("root ::= (a", "at '(': this parenthesis is not closed"),
        ('root ::= "a")', "at ')': a rule must begin"),
        ('root ::= "a\n"', "this is no part of GBNF"),
        ("root ::= 'a'", "this is no part of GBNF"),
        (r'root ::= "\q"', "after a backslash only"),
        (r'root ::= "\U00110000"', "there is no character 00110000"),
        ("root ::= [z-a]", "the range z-a is in the wrong order"),
        ("root ::= []", "a set of characters is empty"),
        ('root ::= "a"{3,1}', "the smaller number must come first"),
        ('root ::= "a"**', "at '*': this stands where a part of a rule is expected"),
        ("root ::= " + "(" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} parentheses"),
        ("root ::= " + "(" * 60_000, f"more than {MAX_DEPTH} parentheses"),
    ],
)
def test_what_is_no_gbnf(gbnf: str, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)) as error:
        lark_of(gbnf)
    assert len(str(error.value)) < 300
