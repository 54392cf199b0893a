"""Chat templates that take too much: every kind ends at a limit, with its name, and the next chat is rendered."""

from __future__ import annotations

import threading

import pytest

from sparkdraft.core import UserError
from sparkdraft.text import chat
from sparkdraft.text import template as templates
from sparkdraft.text.chat import fault_of, render
from sparkdraft.text.template import PastLimit

CHAT = [{"role": "user", "content": "Hi"}]
PLAIN = "{{ messages[0].content }}"
DOUBLING = "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
MEMORY, TIME, LENGTH = "takes more than 128 MiB of memory", r"takes more than 0.1 s of CPU time", "writes more than 1,"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    monkeypatch.setattr(templates, "MAX_BYTES", 128 << 20)
    monkeypatch.setattr(chat, "_faults", {})
    templates.about.cache_clear()


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (LOOPS, TIME),
        ("{{ 9 ** (10 ** 9) }}", TIME),
        ("{{ [1] | slice(10 ** 9) | list }}", TIME),
        ("{{ lipsum(n=10 ** 7) }}", TIME),
        ("{{ 'x' * 10 ** 10 }}", MEMORY),
        ("{{ 'x' | center(10 ** 10) }}", MEMORY),
        ("{{ 'x'.ljust(10 ** 9) }}", MEMORY),
        ("{{ '%1000000000d' % 1 }}", MEMORY),
        ("{{ '{:>1000000000}'.format(1) }}", MEMORY),
        ("{{ [1] | batch(10 ** 9, 'x') | list }}", MEMORY),
        (DOUBLING, f"{MEMORY}|{TIME}"),
        ("{% for a in range(90000) %}{{ 'x' * 100 }}{% endfor %}", LENGTH),
    ],
)
def test_a_template_that_takes_too_much_is_ended(template: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"^The chat template ({limit})"):
        render(template, CHAT)
    assert fault_of(template).startswith("the chat template ")
    monkeypatch.setattr(templates, "SECONDS", 1000.0)  # it does not run again
    with pytest.raises(UserError, match=f"^The chat template ({limit}).*: correct it, or send a plain prompt"):
        render(template, CHAT)
    assert render(PLAIN, CHAT) == "Hi" and not fault_of(PLAIN)


def test_a_template_that_takes_too_much_of_some_chats_is_kept() -> None:
    template = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}" + PLAIN
    assert not fault_of(template)
    with pytest.raises(PastLimit, match="for these messages, which is the limit: send fewer"):
        render(template, [{"role": "user", "content": "loop"}])
    assert render(template, CHAT) == "Hi"


def test_a_template_of_a_million_characters_is_not_parsed() -> None:
    with pytest.raises(UserError, match="has 1,048,577 characters and 1,048,576 is the limit"):
        render("x" * ((1 << 20) + 1), CHAT)


def test_a_long_chat_may_be_rendered_at_length() -> None:
    text = "x" * (2 << 20)
    assert render("{{ messages[0].content }}{{ messages[0].content }}", [{"content": text}]) == text * 2


def test_a_worker_that_was_ended_is_replaced() -> None:
    assert render(PLAIN, CHAT) == "Hi"
    assert templates._worker
    templates._worker.process.kill()
    assert render(PLAIN, CHAT) == "Hi"
    templates.close()
    assert render(PLAIN, CHAT) == "Hi"


def test_threads_get_their_own_answers() -> None:
    said: dict[int, str] = {}

    def ask(i: int) -> None:
        said[i] = render(PLAIN, [{"content": str(i)}])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {i: str(i) for i in range(16)}


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(UserError, match="must be plain JSON values"):
        render(PLAIN, [{"content": object()}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ '{}'.format() }}", " (tuple index out of range): check"),  # an IndexError
        ("{{ messages[0].content + 1 }}", " (can only concatenate str"),
        ("{{ raise_exception('no ' * 10 ** 6) }}", ": no no "),
    ],
)
def test_whatever_a_template_raises_is_one_short_sentence(template: str, said: str) -> None:
    assert render(PLAIN, CHAT) == "Hi" and templates._worker
    process = templates._worker.process
    with pytest.raises(UserError) as raised:
        render(template, CHAT)
    assert str(raised.value).startswith(f"The chat template does not take these messages{said}")
    assert len(str(raised.value)) < 700 and not isinstance(raised.value, PastLimit)
    assert render(PLAIN, CHAT) == "Hi" and templates._worker and templates._worker.process is process


@pytest.mark.parametrize("text", ["Grüße, 你好 🦊", "half \ud83e a fox", "line\nline\r\n\u2028\x00"])
def test_any_text_passes_through(text: str) -> None:
    assert render(PLAIN, [{"content": text}]) == text
