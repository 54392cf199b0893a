"""Stop strings in pieces against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.text.detokenize import StopFinder


def whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The shortest beginning of the text that ends with a stop, cut before the longest stop that it ends with."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    out, stopped = "", False
    for piece in pieces:
        text, stopped = finder.push(piece)
        out += text
        if stopped:
            break
    return out + finder.finish(), stopped


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", max_size=4), max_size=4),
)
def test_any_cut_gives_the_same(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == whole("".join(pieces), stops)


@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=5))
def test_nothing_is_held_that_could_go(text: str, stop: str) -> None:
    finder = StopFinder([stop])
    out, stopped = finder.push(text)
    if not stopped:
        held = text[len(out) :]
        assert len(held) < len(stop) and (not held or stop.startswith(held))
        longer = [n for n in range(len(held) + 1, len(stop)) if text.endswith(stop[:n])]
        assert not longer


def test_across_a_border() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("Hi\n") == ("Hi", False)
    assert finder.push("\nUs") == ("", False)
    assert finder.push("er: more") == ("", True)
    assert finder.push("never") == ("", True) and finder.finish() == ""


def test_a_false_start_is_given_back() -> None:
    finder = StopFinder(["STOP"])
    assert [finder.push(piece)[0] for piece in ("aST", "O", "b")] == ["a", "", "STOb"]
    assert finder.push("S") == ("", False) and finder.finish() == "S"


def test_no_stops_hold_nothing() -> None:
    assert StopFinder([]).push("text") == ("text", False)
    assert StopFinder([""]).push("text") == ("text", False)
