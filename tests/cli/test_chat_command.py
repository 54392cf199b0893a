"""The chat as people use it: typed at a terminal, pasted, piped, stopped, and told by commands what to do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len

from sparkdraft.cli.chat import COMMANDS, DEFAULTS, Conversation, answer, is_command, messages, run_command
from sparkdraft.cli.console import WordWrap, note
from sparkdraft.cli.main import main
from sparkdraft.core import REPETITION, FinishReason, SamplingParams, StepOutput, UserError
from sparkdraft.llm import LLM
from sparkdraft.text.style import chat_style
from tests.cli.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, LEFT, READY, UP, Terminal, paste
from tests.models.tiny import write_tiny
from tests.patience import PATIENT

ECHO = "from sparkdraft.cli.chat import messages\nfor text in messages(): print(repr(text), flush=True)"
ANALYSIS = "<|channel|>analysis<|message|>"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return folder


def chat(folder: Path, *flags: str) -> list[str]:
    engine = ("--model", str(folder), "--dtype", "float32", "--device", "cpu")
    fixed = ("--temperature", "0", "--max-tokens", "5", "--ignore-eos")
    return [sys.executable, "-m", "sparkdraft.cli.main", "chat", *engine, *fixed, *flags]


# ---- typing


def test_a_line_can_be_edited_and_a_paste_is_one_message(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", ECHO], SPARKDRAFT_CACHE=str(tmp_path)) as terminal:
        terminal.wait_for(READY)
        terminal.type("helo" + LEFT + "l" + ENTER)
        terminal.wait_for("'hello'")
        terminal.wait_for(READY)
        terminal.type(paste("one\ntwo\n\nthree") + ENTER)
        terminal.wait_for(r"'one\ntwo\n\nthree'")
        terminal.wait_for(READY)
        terminal.type("four" + ALT_ENTER + "five" + ENTER)
        terminal.wait_for(r"'four\nfive'")
        terminal.wait_for(READY)
        terminal.type("never sent" + CTRL_C)
        terminal.wait_for("ctrl-d or /quit ends")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0
    assert "'never" not in terminal.raw


def test_history_outlasts_the_program(tmp_path: Path) -> None:
    for keys in ("first" + ENTER, UP + " again" + ENTER):
        with Terminal([sys.executable, "-c", ECHO], SPARKDRAFT_CACHE=str(tmp_path)) as terminal:
            terminal.wait_for(READY)
            terminal.type(keys)
            terminal.wait_for("'first" if keys.startswith("first") else "'first again'")
            terminal.wait_for(READY)
            terminal.type(CTRL_D)
            assert terminal.wait_for_end() == 0
    assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600


def test_a_history_that_can_not_be_kept_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Terminal([sys.executable, "-c", ECHO], SPARKDRAFT_CACHE=str(tmp_path / "file")) as terminal:
        terminal.wait_for("what you type is not kept")
        terminal.wait_for(READY)
        terminal.type("works" + ENTER)
        terminal.wait_for("'works'")


def test_a_chat_at_a_terminal(folder: Path, tmp_path: Path) -> None:
    with Terminal(chat(folder), SPARKDRAFT_CACHE=str(tmp_path)) as terminal:
        shown = terminal.wait_for(READY)
        for part in (
            str(folder),
            "cpu, float32 weights",
            "drafter   none",
            "context   512",
            "temperature 0.0",
            "/help",
        ):
            assert part in shown, shown
        terminal.type("/help" + ENTER)
        listed = terminal.wait_for("ctrl-d ends the chat")
        assert all(name in listed for name in COMMANDS), listed
        terminal.wait_for(READY)
        terminal.type("/hlep" + ENTER)
        terminal.wait_for("/hlep is not a command: did you mean /help?")
        terminal.wait_for(READY)
        terminal.type("/stats" + ENTER)
        terminal.wait_for("nothing has been answered yet")  # no command went to the model
        terminal.wait_for(READY)
        terminal.type(paste("a question\nof two lines") + ENTER)
        terminal.wait_for(READY)
        terminal.type("/stats" + ENTER)
        # "<user>", the text, a line's end and "<assistant>" are 41 bytes, which this tokenizer takes for a token each
        terminal.wait_for("5 tokens at")
        terminal.wait_for("46 of 512 tokens of context")
        terminal.wait_for(READY)
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0


WAITS = """
import time
from types import SimpleNamespace
from sparkdraft.cli.chat import DEFAULTS, answer
from sparkdraft.cli.chat import Conversation
from sparkdraft.core import StepOutput

class Waits:
    plan, style = SimpleNamespace(max_model_len=512), SimpleNamespace(reasoning=None)
    def chat_ids(self, messages): return [0]
    def kv_errors(self): return None
    def stream(self, ids, params, stopped):
        for piece in ("The quick brown fox", " jum", "ps over the la", "zy dog. 東京は日本の首都です。 END "):
            yield StepOutput("r", 0, [1], piece, None)
        while not stopped():
            time.sleep(0.01)

answer(Conversation(Waits(), DEFAULTS), "hello")
print("ended")
"""


def test_an_answer_breaks_between_words() -> None:
    with Terminal([sys.executable, "-c", WAITS], columns=20) as terminal:
        terminal.wait_for("END")
        terminal.type(CTRL_C)
        terminal.wait_for("ended")
        assert terminal.wait_for_end() == 0
    lines = terminal.raw.replace("\r", "").replace("^C", "").replace("\x03", "").splitlines()
    assert lines == ["The quick brown fox", "jumps over the lazy", "dog. 東京は日本の首", "都です。 END", "ended"]


@pytest.mark.parametrize("width", [8, 13, 40])
def test_words_stay_whole_however_the_text_is_cut(width: int) -> None:
    text = "  def f(x):\n\n    return x  # a longwordthatdoesnotfit, and \tshort on\n日本語 and more🙂 e\u0301te\u0301"
    random = Random(width)
    for _ in range(20):
        written: list[str] = []
        wrap = WordWrap(written.append, lambda: width)
        places = sorted(random.sample(range(len(text)), 9))
        for first, last in zip([0, *places], [*places, None], strict=True):
            wrap.add(text[first:last])
        wrap.end()
        lines = "".join(written).split("\n")
        assert all(cell_len(line) <= width or " " not in line.strip() for line in lines), lines
        assert "".join("".join(lines).split()) == "".join(text.split())
        narrow = [word for word in text.split() if word.isascii() and len(word) <= width]
        assert all(any(word in line.split() for line in lines) for word in narrow), lines
    whole: list[str] = []
    WordWrap(whole.append, lambda: 0).add(text)
    assert whole == [text]


# ---- a pipe


@pytest.mark.slow
def test_each_line_of_a_pipe_is_a_message(folder: Path) -> None:
    lines = b"hello\n\n/stats\n/zzzz\nmore\n/quit\nnever asked\n"
    result = subprocess.run(chat(folder), input=lines, capture_output=True, timeout=PATIENT)
    errors = result.stderr.decode()
    assert result.returncode == 0, errors
    assert errors.count("5 tokens at") == 1 and "/zzzz is not a command: /help lists them" in errors
    assert "sparkdraft " not in errors, "no banner where nobody looks"
    alone = subprocess.run(chat(folder), input=b"hello\n", capture_output=True, timeout=PATIENT).stdout
    assert alone and result.stdout.startswith(alone) and len(result.stdout) > len(alone)


def test_a_pipe_that_is_no_text(folder: Path) -> None:
    result = subprocess.run(chat(folder), input=b"caf\xe9\n", capture_output=True, timeout=PATIENT)
    assert result.returncode == 1 and b"standard input is not valid UTF-8 at byte 3" in result.stderr


def test_a_piped_message_that_is_refused_gives_a_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for lines, status in (("hello\n/stats\n", 0), ("hello\n" + "x" * 600 + "\nhello\n", 1)):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(lines.encode())))
        assert main(chat(folder)[3:]) == status
        assert capsys.readouterr().out.count("\n") >= lines.count("hello")


def test_a_mark_before_the_first_line_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"\xef\xbb\xbf/stats\nhello\n")))
    assert list(messages()) == ["/stats", "hello"]


@pytest.mark.parametrize("command", [("chat",), ("generate", "--prompt-file", "-"), ("import", "-")])
def test_a_closed_standard_input(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after <&-
    assert main(command) == 1 and "standard input is closed" in capsys.readouterr().err


def test_a_model_without_a_template_can_not_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"hello\nhello\n")))
    assert main(chat(write_tiny(tmp_path, "llama"))[3:]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("no chat template") == 1 and "/clear" not in printed.err


# ---- commands


class Scripted:
    """An LLM that answers with given pieces and remembers what it was asked."""

    def __init__(self, pieces: Sequence[str], model_type: str = "llama", ends: str = "") -> None:
        """ends: what its prompts end with."""
        self.pieces, self.asked, self.is_open = pieces, list[Any](), False
        self.plan, self.style = SimpleNamespace(max_model_len=512), chat_style(model_type, None)
        self.ends = ends
        self.params = SamplingParams()

    def opening(self, ids: Sequence[int]) -> str:
        return self.ends

    def chat_ids(self, messages: Sequence[Any]) -> list[int]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        return [0] * sum(len(message["content"]) for message in messages)

    def stream(self, ids: list[int], params: SamplingParams, stopped: Callable[[], bool]) -> Iterator[StepOutput]:
        if len(ids) >= self.plan.max_model_len:
            raise UserError("the prompt is too long; shorten it")
        self.params = params
        self.is_open = True
        try:
            for text in self.pieces:
                if text == REPETITION:
                    yield StepOutput("r", 0, [1], "", FinishReason.STOP, stop_reason=REPETITION)
                    return
                if text == "length":
                    yield StepOutput("r", 0, [], "", FinishReason.LENGTH)
                    return
                if text == "ctrl-c":
                    signal.raise_signal(signal.SIGINT)
                else:
                    is_last = text is self.pieces[-1]
                    yield StepOutput("r", 0, [1], text, FinishReason.STOP if is_last else None)
                    if stopped():
                        return
        finally:
            self.is_open = False

    def kv_errors(self) -> None:
        return None


def talk_to(*pieces: str) -> tuple[Conversation, Scripted]:
    llm = Scripted(pieces)
    return Conversation(llm, DEFAULTS), llm  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_type", "ends", "said"),
    [
        ("gpt_oss", "<|start|>assistant", f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.<channel|>Yes."),
    ],
)  # fmt: skip
def test_thoughts_are_shown_apart_and_are_no_part_of_the_conversation(
    model_type: str, ends: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = Scripted([said[i : i + 5] for i in range(0, len(said), 5)], model_type, ends)
    talk = Conversation(llm, DEFAULTS)  # type: ignore[arg-type]
    answer(talk, "hello")
    printed = capsys.readouterr()
    assert printed.out == "Yes.\n" and "Hm." in printed.err and llm.params.keep_special
    assert talk.last and (talk.last["text"], talk.last["reasoning"]) == ("Yes.", "Hm.")
    answer(talk, "again")
    assert llm.asked[-1] == [("user", "hello"), ("assistant", "Yes."), ("user", "again")]


def test_thoughts_and_notes_are_printed_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Scripted([f"{ANALYSIS}a[b] :x: 1", "length"], "gpt_oss", "<|start|>assistant")
    answer(Conversation(llm, DEFAULTS), "hello")  # type: ignore[arg-type]
    note("/tmp/:x: [b] is gone")
    printed = capsys.readouterr().err
    assert "a[b] :x: 1" in printed and "/tmp/:x: [b] is gone" in printed


def test_thoughts_that_leave_no_room_for_an_answer_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Scripted(
        ["<|channel|>analysis<|message|>Hm, so", " many thoughts", "length"], "gpt_oss", "<|start|>assistant"
    )
    talk = Conversation(llm, DEFAULTS)  # type: ignore[arg-type]
    assert not answer(talk, "hello")
    assert "no answer was written, because the thoughts were cut at the end of the context" in capsys.readouterr().err
    talk.params = SamplingParams(max_tokens=2)
    assert not answer(talk, "hello") and talk.turns == []
    assert "the thoughts were cut after 2 tokens: /set max_tokens 16 allows more" in capsys.readouterr().err


def test_an_answer_that_is_cut_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = talk_to("so", " many", "length")
    assert answer(talk, "hello") and len(talk.turns) == 2
    assert "(the answer was cut at the end of the context of 512 tokens: /clear begins" in capsys.readouterr().err
    talk.params = SamplingParams(max_tokens=2)
    assert answer(talk, "hello") and len(talk.turns) == 4
    assert "(the answer was cut after 2 tokens: /set max_tokens 16 allows more)" in capsys.readouterr().err
    talk, _ = talk_to("all", " of it")
    assert answer(talk, "hello") and capsys.readouterr().err == ""


def test_a_conversation_goes_on_until_it_is_cleared() -> None:
    talk, llm = talk_to("good", " day")
    answer(talk, "hello")
    run_command(talk, "/system be brief\nand polite")
    answer(talk, "again")
    before = [("user", "hello"), ("assistant", "good day"), ("user", "again")]
    assert llm.asked[-1] == [("system", "be brief\nand polite"), *before]
    run_command(talk, "/clear")
    run_command(talk, "/system")
    answer(talk, "new")
    assert llm.asked[-1] == [("user", "new")]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    talk, llm = talk_to("one", " two", "ctrl-c", " three", " four")
    handler = signal.getsignal(signal.SIGINT)
    answer(talk, "count")
    assert capsys.readouterr().out == "one two three\n" and not llm.is_open
    assert talk.turns[-1] == {"role": "assistant", "content": "one two three"}
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopped, so how it was drafted is not known" in str(run_command(talk, "/stats"))


def test_ctrl_c_while_the_prompt_is_read_drops_the_question(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder), dtype="float32", max_step_tokens=16)
    talk = Conversation(llm, SamplingParams(max_tokens=3, ignore_eos=True))
    answer(talk, "hello")
    before, steps, step = talk.turns, 0, llm.engine.step

    def interrupted() -> list[StepOutput]:
        nonlocal steps
        steps += 1
        if steps == 2:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    answer(talk, "long " * 60)  # about 20 steps
    assert steps == 2 and talk.turns == before and len(before) == 2 and not llm._inboxes
    answer(talk, "short")
    assert len(talk.turns) == 4


def test_a_second_ctrl_c_ends_the_program() -> None:
    talk, llm = talk_to("one", "ctrl-c", "ctrl-c", "two")
    with pytest.raises(KeyboardInterrupt):
        answer(talk, "count")
    assert not llm.is_open and talk.turns == []


def test_a_question_that_does_not_fit_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = talk_to("yes")
    assert not answer(talk, "x" * 600)
    assert capsys.readouterr().err.endswith("shorten it\n"), "/clear would not help"
    assert answer(talk, "short") and not answer(talk, "x" * 600)
    assert "the context holds 512 with the answer: shorten the question, or begin a new" in capsys.readouterr().err
    assert len(talk.turns) == 2


@pytest.mark.parametrize("text", ["/help", "/hlep", "/system be brief", "/QUIT", "/set\ttop_p 1"])
def test_commands(text: str) -> None:
    assert is_command(text)


@pytest.mark.parametrize("text", ["/etc/hosts holds what?", "// a comment\nint x;", "/* c */", " /help", "help", "/"])
def test_texts_that_only_look_like_commands(text: str) -> None:
    assert not is_command(text)


def test_an_answer_that_repeats_itself_is_ended_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = talk_to("ha ha", REPETITION)
    assert answer(talk, "laugh") and DEFAULTS.repetition_limit == 200
    assert "it repeats itself: /set repetition_limit 0 lets it go on" in " ".join(capsys.readouterr().err.split())


def test_set_changes_what_is_sampled() -> None:
    talk, _ = talk_to()
    assert run_command(talk, "/set temperature 0.7") == "max_tokens 512, temperature 0.7, repetition_limit 200"
    assert run_command(talk, "/set max-tokens 9") and talk.params.max_tokens == 9
    assert run_command(talk, "/set seed 4") and talk.params.seed == 4
    before = talk.params
    assert "did you mean temperature?" in str(run_command(talk, "/set temprature 1"))
    assert "top_p is 7.0; it must be above 0" in str(run_command(talk, "/set top_p 7"))
    assert "'hot' is not a value for temperature" in str(run_command(talk, "/set temperature hot"))
    assert talk.params == before and "repetition_penalty" in str(run_command(talk, "/set"))


def test_stats_tell_of_drafting() -> None:
    talk, _ = talk_to("a", "b")
    answer(talk, "hello")
    assert "2 tokens at" in str(run_command(talk, "/stats")) and "no step drafted" in str(run_command(talk, "/stats"))
    drafting = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6}
    assert talk.last is not None
    talk.last["speculative_decoding"] = drafting | {"mean_acceptance_length": 2.5}
    assert "4 steps drafted 12 tokens, 6 were accepted: 2.50 tokens per" in str(run_command(talk, "/stats"))


def test_the_ways_out_and_the_unknown() -> None:
    talk, llm = talk_to("never")
    assert all(run_command(talk, word) is None for word in ("/quit", "/exit", "/bye", "/Quit"))
    assert run_command(talk, "/stat") == "/stat is not a command: did you mean /stats?"
    assert all(each.usage.split()[0] == name for name, each in COMMANDS.items()) and not llm.asked
