"""The chat page in a real browser, against a small scripted server that speaks OpenAI's protocol.

The script's tokens, delays and failures are known, so what the page shows can be checked; the real server's side of the
protocol is tested in test_api.py. Without Debian's chromium and chromedriver the browser tests skip and say so.
PAGE_PNG=docs/page.png in the environment makes the picture in the documentation anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.web import serving
from tests.patience import PATIENT, wait_for

PAGE = Path(__file__).parents[2] / "sparkdraft" / "server" / "page" / "index.html"
KEY = "open sesame"
STEP = 0.03  # seconds between steps, drafted or plain
TEXT = (
    "A merge walks both lists once, so `merge` is linear. <img src=x onerror=alert(1)> stays text.\n\n"
    "```python\ndef merge(a, b):\n    out = []\n    while a and b:\n"
    "        out.append((a if a[0] < b[0] else b).pop(0))\n    return out + a + b\n```\n"
    "That is all: **two** pointers, `len(a) + len(b)` steps and no sorting at the end.\n"
)
DRAFTED = 4  # tokens of a drafted step, the last of which is no draft


def pieces() -> list[str]:
    """Three characters per token."""
    return [TEXT[i : i + 3] for i in range(0, len(TEXT), 3)]


def num_steps() -> int:
    """The first token comes alone."""
    return 1 + -(-(len(pieces()) - 1) // DRAFTED)


class Script:
    """What the server saw, and what it is to do."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self.go_on = threading.Event()  # while it is cleared, answers stay at their half
        self.go_on.set()
        self.hang = ""  # why /health says 503
        self.loading = 0  # how often /health says that it is not ready
        self.needs_key = False
        self.name = "tiny-scripted"
        self.fail: tuple[int, str] | None = None

    def refuses(self, request: Request) -> JSONResponse | None:
        if self.needs_key and request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "wrong key", "code": 401}}, 401)
        return None

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE)

    async def health(self, request: Request) -> Response:
        if self.loading:
            self.loading -= 1
            return JSONResponse({"status": "starting", "stage": "loading weights", "progress": [2, 8]}, 503)
        if self.hang:
            return JSONResponse({"status": "unresponsive", "stage": "waiting for the engine", "error": self.hang}, 503)
        return JSONResponse({"status": "ready"})

    async def models(self, request: Request) -> Response:
        return self.refuses(request) or JSONResponse({"data": [{"id": self.name}]})

    async def chat(self, request: Request) -> Response:
        if refusal := self.refuses(request):
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if body["model"] != self.name:
            return JSONResponse({"error": {"message": f"{body['model']} is not served here.", "code": 404}}, 404)
        if self.fail:
            status, message = self.fail
            return JSONResponse({"error": {"message": message, "code": status}}, status, headers={"Retry-After": "7"})
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        def event(**fields: Any) -> str:
            return f"data: {json.dumps({'object': 'chat.completion.chunk', **fields})}\n\n"

        drafting, tokens, at = body["speculation"] != "off", pieces(), 0
        endless = "forever" in body["messages"][-1]["content"]
        yield event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        try:
            while at < len(tokens) or endless:
                size = DRAFTED if drafting and at else 1
                part = tokens[at : at + size] or ["on and on "]
                accepted = len(part) - 1
                delta = {"content": "".join(part)}
                facts = {"tokens": len(part), "accepted": accepted, "accepted_chars": len("".join(part[:accepted]))}
                yield event(choices=[{"delta": delta, "finish_reason": None}], **facts)
                at += size
                await asyncio.sleep(STEP)
                while at > len(tokens) // 2 and not self.go_on.is_set():
                    await asyncio.sleep(STEP)
        except (asyncio.CancelledError, GeneratorExit):
            self.hung_up.set()
            raise
        yield event(choices=[{"delta": {}, "finish_reason": "stop"}])
        metrics = {"speculative_decoding": {"mean_acceptance_length": 3.97} if drafting else None}
        yield event(choices=[], usage={"completion_tokens": len(tokens)}, metrics=metrics)
        yield "data: [DONE]\n\n"

    def app(self) -> Starlette:
        routes = [Route("/", self.page), Route("/health", self.health), Route("/v1/models", self.models)]
        return Starlette(routes=[*routes, Route("/v1/chat/completions", self.chat, methods=["POST"])])


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script.app()) as address:
        yield f"{address}/"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    browser, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not chromedriver:
        pytest.skip("no chromium and chromedriver on PATH: apt-get install chromium chromium-driver")
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1200,800",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(executable_path=chromedriver)
    found = selenium.Chrome(options=options, service=service)
    yield found
    found.quit()


class Tab:
    """The page as a person uses it: typing, pressing, reading."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """What a person sees there; nothing of what is hidden."""
        look = "const node = document.querySelector(arguments[0]); return node?.checkVisibility() ? node.innerText : ''"
        return str(self.driver.execute_script(look, selector))

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements("css selector", selector))

    def wait(self, ready: Callable[[], object], what: str) -> None:
        wait_for(ready, lambda: f"waited for {what}; the page shows: {self.text('body')}")

    def type(self, text: str) -> None:
        self.wait(lambda: self.find("#send").is_enabled(), "the server to be ready")
        self.find("#prompt").send_keys(text)

    def ask(self, text: str) -> None:
        self.type(text + "\n")

    def answered(self, turns: int = 1) -> None:
        self.wait(lambda: self.count(".turn") == turns and not self.count(".busy"), "an answer")

    def number(self, selector: str) -> float:
        return float(self.text(f"{selector} b"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]]


@pytest.fixture
def tab(driver: Any, url: str) -> Tab:
    driver.set_window_size(1200, 800)
    driver.get_log("browser")
    return Tab(driver, url)


def test_an_answer_streams_with_its_figures(tab: Tab, script: Script) -> None:
    tab.wait(lambda: tab.text("#model") == "tiny-scripted", "the title")
    script.go_on.clear()
    tab.ask("merge two lists")
    tab.wait(lambda: tab.text(".speed") and tab.count(".busy"), "a speed while it is written")
    assert tab.find("#log").get_attribute("aria-busy") == "true" and tab.text(".step")
    script.go_on.set()
    tab.answered()
    assert tab.find("#log").get_attribute("aria-busy") == "false"
    assert tab.number(".tokens") == len(pieces()) and tab.number(".step") == round(len(pieces()) / num_steps(), 2)
    assert 0 < tab.number(".speed") < 2.1 * DRAFTED / STEP and tab.number(".first") >= 0
    body = script.bodies[0]
    assert body["model"] == "tiny-scripted" and body["stream"] and body["return_speculation"]
    assert body["stream_options"] == {"include_usage": True} and body["speculation"] == "auto"
    assert body["max_tokens"] == 512 and body["seed"] >= 0
    assert not {"temperature", "top_p"} & body.keys()  # the server's own
    assert body["messages"] == [{"role": "user", "content": "merge two lists"}]


def test_text_is_text_code_is_code_and_drafts_are_tinted(tab: Tab) -> None:
    tab.ask("merge two lists")
    tab.answered()
    assert tab.count(".answer img") == 0 and "<img src=x onerror=alert(1)> stays text." in tab.text(".answer > .text")
    assert tab.count(".text pre code") == 1 and tab.text(".text pre code").startswith("def merge(a, b):\n    out = []")
    inline = [node.text for node in tab.driver.find_elements("css selector", ".text > span code")]
    assert inline == ["merge", "len(a) + len(b)"]
    assert "```" not in tab.text(".answer > .text") and "**two**" in tab.text(".answer > .text")
    shown = tab.driver.execute_script(TINTS)
    assert shown == "".join(letter for letter in tints() if letter != "\n")
    assert tab.count(".answer mark") > 20 and not tab.complaints()


# The letters of the answer's text as they are shown: "d" for a drafted one, "." for one of the model's own.
TINTS = """
const walk = document.createTreeWalker(document.querySelector(".answer > .text"), NodeFilter.SHOW_TEXT);
let shown = "";
while (walk.nextNode()) {
    const drafted = walk.currentNode.parentNode.tagName === "MARK";
    for (const letter of walk.currentNode.data) if (letter !== "\\n") shown += drafted ? "d" : ".";
}
return shown"""


def tints() -> str:
    """The same of the script: a token of its own, then in each step three drafts and one more, without code's marks."""
    tinted = "".join(("." if i % DRAFTED == 0 else "d") * len(piece) for i, piece in enumerate(pieces()))
    last = len(pieces()) - 1  # also where the last step is a short one, its last token is no draft
    tinted = tinted[: last * 3] + "." * len(pieces()[last])
    hidden = {i for found in re.finditer("```(python)?\n|`", TEXT) for i in range(*found.span())}
    kept = [(letter, tint) for i, (letter, tint) in enumerate(zip(TEXT, tinted, strict=True)) if i not in hidden]
    return "".join("\n" if letter == "\n" else tint for letter, tint in kept)


def test_the_whole_text_arrives_whatever_its_pieces(tab: Tab) -> None:
    """The writer fed in pieces of 1, 2, 3, 7 and all: the same text and the same code."""
    found = tab.driver.execute_script(
        """return [1, 2, 3, 7, 9999].map(size => {
            const node = make("div"), writer = new Writer(node);
            for (let i = 0; i < arguments[0].length; i += size) {
                writer.add(arguments[0].slice(i, i + size), 0);
                writer.draw();
            }
            return [node.textContent, node.querySelectorAll("code").length, node.querySelector("pre").textContent];
        })""",
        TEXT,
    )
    assert all(each == found[-1] for each in found)
    assert found[0][0].replace("\n", "") == TEXT.replace("```python", "").replace("`", "").replace("\n", "")


def test_stop_and_escape_hang_up(tab: Tab, script: Script) -> None:
    from selenium.webdriver.common.keys import Keys

    for turn, stop in enumerate(
        (lambda: tab.find("#stop").click(), lambda: tab.find("#prompt").send_keys(Keys.ESCAPE)), 1
    ):
        script.hung_up.clear()
        tab.ask("write forever")
        tab.wait(lambda n=turn: "on and on" in tab.text(f".turn:nth-child({n}) .answer > .text"), "the endless answer")
        stop()
        tab.answered(turn)
        assert script.hung_up.wait(PATIENT), "the server was not told"
        assert "stopped" in tab.text(f".turn:nth-child({turn}) .figures") and tab.find("#send").is_displayed()
    assert [m["role"] for m in script.bodies[1]["messages"]] == ["user", "assistant", "user"]


def test_the_same_again_without_drafting_and_both_speeds(tab: Tab, script: Script) -> None:
    tab.ask("How do I merge two sorted lists in Python?")
    tab.answered()
    tab.find(".other").click()
    tab.wait(lambda: tab.text(".versus"), "the comparison")
    drafted, plain = script.bodies
    assert (drafted.pop("speculation"), plain.pop("speculation")) == ("auto", "off") and drafted == plain
    assert "The two texts are the same." in tab.text(".versus") and "2 tok/s" not in tab.text(".versus p")
    titles = [node.text for node in tab.driver.find_elements("css selector", ".answer h2")]
    assert titles == ["With drafting", "Without drafting"] and tab.count(".versus .bar") == 2
    assert re.search(r"\d+(\.\d+)? times", tab.text(".versus p"))
    assert tab.count(".answer:nth-child(2) mark") == 0 and tab.count(".answer:nth-child(2) .step") == 0


def test_the_switch_turns_drafting_off(tab: Tab, script: Script) -> None:
    from selenium.webdriver.common.keys import Keys

    switch = tab.find("#drafting")
    switch.send_keys(Keys.SPACE)
    tab.ask("merge")
    tab.answered()
    assert script.bodies[0]["speculation"] == "off" and tab.count("mark:not(#welcome mark)") == 0
    assert tab.text(".other") == "Ask the same with drafting"


def test_shift_enter_and_sampling_controls(tab: Tab, script: Script) -> None:
    from selenium.webdriver.common.keys import Keys

    tab.find("#more").click()
    for name, value in (
        ("temperature", "3"),
        ("top_p", "0.5"),
        ("max_tokens", "32"),
        ("seed", "11"),
        ("system", "Be brief."),
    ):
        tab.find(f"#{name}").clear()
        tab.find(f"#{name}").send_keys(value)
    tab.ask("one")
    assert "Temperature" in tab.text("#wrong") and not script.bodies
    tab.find("#temperature").clear()
    tab.find("#temperature").send_keys("0.25")
    tab.find("#prompt").send_keys(Keys.SHIFT, Keys.ENTER)
    tab.find("#prompt").send_keys(Keys.NULL, "two\n")
    tab.answered()
    body = script.bodies[0]
    assert [m["content"] for m in body["messages"]] == ["Be brief.", "one\ntwo"] and tab.text("#wrong") == ""
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.25, 0.5, 32, 11)
    tab.driver.execute_script("localStorage.clear()")


def test_a_key_is_asked_for_only_after_a_401(tab: Tab, script: Script) -> None:
    tab.wait(lambda: tab.text("#model") == "tiny-scripted", "the title")
    assert not tab.find("#unlock").is_displayed()
    script.needs_key = True
    tab.ask("merge")
    tab.wait(lambda: tab.find("#unlock").is_displayed(), "the key field")
    assert "API key" in tab.text(".turn .error")
    tab.find("#key").send_keys(KEY + "\n")
    tab.answered()
    tab.wait(lambda: tab.text(".tokens"), "the answer after the key")
    assert not tab.find("#unlock").is_displayed() and not tab.text(".turn .error")
    kept = "return [sessionStorage.getItem('key'), localStorage.getItem('key')]"
    assert tab.driver.execute_script(kept) == [KEY, None]
    tab.driver.execute_script("sessionStorage.clear()")


@pytest.mark.parametrize(
    ("fail", "words"),
    [((400, "temperature is 9; it must be at most 2."), "temperature is 9"), ((429, "The queue is full."), "in 7 s.")],
)
def test_errors_are_sentences_in_place(fail: tuple[int, str], words: str, tab: Tab, script: Script) -> None:
    script.fail = fail
    tab.ask("merge")
    tab.wait(lambda: words in tab.text(".turn .error"), "the sentence")
    script.fail = None
    tab.find(".turn .after button").click()
    tab.wait(lambda: tab.text(".other"), "the second try")
    assert not tab.text(".turn .error")


def test_another_model_is_served_after_a_restart(tab: Tab, script: Script) -> None:
    tab.wait(lambda: tab.text("#model") == "tiny-scripted", "the title")
    script.name = "other-scripted"
    tab.ask("merge")
    tab.wait(lambda: "tiny-scripted is not served here" in tab.text(".turn .error"), "the sentence")
    tab.find(".turn .after button").click()
    tab.wait(lambda: tab.text(".other"), "the second try")
    assert script.bodies[-1]["model"] == "other-scripted" == tab.text("#model")


def test_an_answer_that_stops_coming_is_explained(tab: Tab, script: Script) -> None:
    tab.wait(lambda: tab.text("#model") == "tiny-scripted", "the title")
    tab.driver.execute_script("performance.now = (now => () => 20 * now())(performance.now.bind(performance))")
    script.go_on.clear()
    script.hang = "the engine does not answer: its process has given no sign of life for 3 s"
    tab.ask("merge")
    said = "The engine does not answer: its process has given no sign of life for 3 s. Waiting."
    tab.wait(lambda: tab.text(".answer .note") == said, "the reason")
    script.hang = ""
    tab.wait(lambda: not tab.text(".answer .note"), "the engine to answer again, and the step to last")
    assert tab.count(".busy")
    script.go_on.set()
    tab.answered()
    assert tab.number(".tokens") == len(pieces()) and not tab.text(".turn .error")


def test_a_connection_that_breaks_is_called_lost(tab: Tab, script: Script) -> None:
    tab.wait(lambda: tab.text("#model") == "tiny-scripted", "the title")
    tab.driver.execute_script("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    tab.ask("merge")
    tab.wait(lambda: "Connection lost." in tab.text(".turn .error"), "the sentence")
    tab.wait(lambda: "Connection lost; trying again" in tab.text("#health"), "the state of the server")


def test_loading_shows_its_stage(driver: Any, url: str, script: Script) -> None:
    script.loading = 2
    tab = Tab(driver, url)
    tab.wait(lambda: "loading weights, 25 %" in tab.text("#health"), "the stage")
    assert not tab.find("#send").is_enabled()
    tab.wait(lambda: tab.find("#send").is_enabled() and tab.text("#model") == "tiny-scripted", "the model")
    assert not tab.find("#health").is_displayed()


def test_a_phone_dark_and_light(tab: Tab) -> None:
    tab.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        tab.ask("merge")
        tab.answered()
        assert tab.driver.execute_script("return document.documentElement.scrollWidth") <= 375
        small = tab.driver.execute_script(
            "return [...document.querySelectorAll('button, textarea, label.switch')].filter(node => {"
            "const box = node.getBoundingClientRect(); return node.offsetParent && (box.height < 44 || box.width < 44)"
            "}).map(node => node.outerHTML)"
        )
        assert small == []
        colour = "return getComputedStyle(document.body).backgroundColor"
        before = tab.driver.execute_script(colour)
        tab.find("#theme").click()
        assert tab.driver.execute_script(colour) != before
        assert tab.driver.execute_script("return localStorage.theme") in ("dark", "light")
    finally:
        tab.driver.execute_script("localStorage.clear()")
        tab.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_the_embedded_model(driver: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The real server, model and drafter; and the picture for the documentation."""
    smollm2 = request.getfixturevalue("smollm2")  # only where there is a browser: it takes its time
    screen = {"width": 1200, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.get_log("browser")
    tab = Tab(driver, smollm2.url)
    try:
        for name, value in (("temperature", "0"), ("max_tokens", "110")):
            tab.driver.execute_script(f"document.getElementById('{name}').value = '{value}'")
        tab.ask("Write a Python function that merges two sorted lists.")
        tab.answered()
        tab.find(".other").click()
        tab.wait(lambda: tab.text(".versus"), "the comparison")
        assert "The two texts are the same." in tab.text(".versus") and tab.count(".answer:nth-child(1) mark") > 0
        assert tab.number(".step") > 1 and tab.number(".tokens") == 110 and tab.text("#model") == "smollm2"
        picture = Path(os.environ.get("PAGE_PNG", tmp_path / "page.png"))
        assert driver.save_screenshot(str(picture)) and 10_000 < picture.stat().st_size < 300_000
        assert not tab.complaints()
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_is_one_small_file_with_nothing_from_outside() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) < 40_000
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
    addresses = [part.split()[0] for part in text.split("http")[1:] if part.startswith(("://", "s://"))]
    assert all(address.startswith("://www.w3.org/2000/svg") for address in addresses)
    assert "src=" not in text and "@import" not in text and "default-src 'none'" in text
