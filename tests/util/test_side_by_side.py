"""The animated picture of two texts: XML, every letter once, wrapped between words, hidden until it was written."""

from __future__ import annotations

from xml.etree import ElementTree

from sparkdraft.util.side_by_side import COLUMNS, LINE, Run, Writing, side_by_side

TEXT = "def f(x):\n    return x < 1 & 2\n\n" + "a sentence of some words " * 6
SVG = "{http://www.w3.org/2000/svg}"


def letters(runs: list[Run]) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(side_by_side([Writing("drafted", "12 tok/s", runs)]))
    return [text for text in root.iter(f"{SVG}text") if text.get("textLength")]


def test_every_word_is_drawn_once_and_lines_break_between_words() -> None:
    runs = [Run(i / 10, TEXT[i : i + 7], 1 + i % 2) for i in range(0, len(TEXT), 7)]
    found = letters(runs)
    assert "".join((each.text or "").replace(" ", "") for each in found) == "".join(TEXT.split())
    ends = [float(each.get("x", 0)) / 7 + len(each.text or "") for each in found]
    assert max(ends) <= COLUMNS
    lines: dict[int, list[tuple[float, str]]] = {}
    for each in found:
        lines.setdefault(int(each.get("y", 0)) // LINE, []).append((float(each.get("x", 0)), each.text or ""))
    assert len(lines) == 5  # two of code, and a paragraph of 150 letters in three
    assert {words[0][1].split()[0][0] for words in list(lines.values())[2:]} <= set("asow")


def test_letters_are_hidden_until_their_step_and_runs_of_several_tokens_have_a_colour() -> None:
    first, second = letters([Run(0.0, "one", 1), Run(0.5, " two three", 4)])
    assert first.find(f"{SVG}set") is None
    hidden = second.find(f"{SVG}set")
    assert hidden is not None and hidden.get("end") == "loop.begin+8.000s"  # slowed down to eight seconds
    assert first.get("fill") != second.get("fill")
