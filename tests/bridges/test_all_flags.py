"""The tables know every flag of the other servers: its names, and whether a value follows it. The docs show the
tables."""

from __future__ import annotations

import runpy
import shlex
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from sparkdraft.bridges.importing import read
from sparkdraft.bridges.llama_cpp import LLAMA_CPP
from sparkdraft.bridges.tables import LIST, SWITCH, VALUE, Flag, Server, read_flags
from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.cli.main import parser
from sparkdraft.core import UserError
from sparkdraft.server.config import FIELDS, merge

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVERS = [(VLLM, "vllm_0_32_flags.txt"), (LLAMA_CPP, "llama_cpp_flags.txt")]


def listed(file: str) -> list[tuple[list[str], str]]:
    lines = (HERE / file).read_text().splitlines()
    found = [line.split() for line in lines if not line.startswith("#")]
    return [(words[:-1], words[-1]) for words in found]


def fits(flag: Flag, name: str, kind: str) -> bool:
    """A star stands for flags with and without values: a word after one of them is its value, if it is no flag."""
    return flag.kind == kind or (name not in flag.names and any(fnmatchcase(name, each) for each in flag.names))


@pytest.mark.parametrize(("server", "file"), SERVERS, ids=["vllm", "llama.cpp"])
def test_every_flag_is_known(server: Server, file: str) -> None:
    all_of_them = listed(file)
    assert len(all_of_them) > 200 and {kind for _, kind in all_of_them} == {VALUE, SWITCH, LIST}
    missing = [name for names, _ in all_of_them for name in names if server.find(name) is None]
    assert not missing, missing
    for names, kind in all_of_them:
        for name in names:
            flag = server.find(name)
            assert flag and (kind == SWITCH) == (flag.kind == SWITCH), (name, flag)
            assert fits(flag, name, kind), (name, kind, flag)


@pytest.mark.parametrize(("server", "file"), SERVERS, ids=["vllm", "llama.cpp"])
def test_no_switch_takes_the_word_after_it(server: Server, file: str) -> None:
    """A model's name may follow a flag that has no value."""
    model, flags = ["org/model"] if server is VLLM else ["-m", "org/model"], []
    for names, kind in listed(file):
        flags += names if kind == SWITCH else []
    flags += [f"--no-{name[2:]}" for name in flags if name.startswith("--") and not name.startswith("--no-")]
    for name in flags:
        assert read_flags(server, [name, *model]).values["model"] == "org/model", name


def test_a_switch_that_is_turned_off_keeps_its_name() -> None:
    found = read("vllm serve m --no-enable-prompt-tokens-details --no-enable-moe-shared-loras")
    assert found.notes[0] == "--no-enable-prompt-tokens-details: it is always on here"
    assert found.notes[1].startswith("--enable-moe-shared-loras: adapters")


def test_shorthands_of_the_speculative_config() -> None:
    short = read("vllm serve m --spec-method dflash --spec-model z-lab/Qwen3-8B-DFlash-b16 --spec-tokens 7")
    assert short.values == {"model": "m", "drafter": "z-lab/Qwen3-8B-DFlash-b16", "spec": "7"}


def test_a_context_of_each_slot() -> None:
    found = read("llama-server -m m.gguf -c 65536 -np 4 --kv-unified-per-slot 32768 --fim-qwen-1.5b-default")
    assert found.values == {"model": "m.gguf", "kv_tokens": 65536, "max_model_len": 32768, "max_seqs": 4}
    assert "--fim-qwen-1.5b-default: name the model: `--model`" in found.notes
    assert read("llama-server --gpt-oss-120b-default").values == {"model": "openai/gpt-oss-120b"}


GIVEN = (
    "",
    "0",
    "1",
    "16",
    "99",
    "-1",
    "0.5",
    "2e9",
    "nan",
    "auto",
    "all",
    "none",
    "fp8",
    "q4_0",
    "-x",
    "a b",
    "$A",
    "{}",
)
CONFIGS = (  # values of the flags that take JSON
    '{"method": "ngram", "num_speculative_tokens": 99}',
    '{"method": "dflash", "num_speculative_tokens": 99}',
    '{"method": "mtp", "num_speculative_tokens": 99}',
    '{"model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 99}',
    '{"temperature": 0.5, "top_k": 3}',
)
PROGRAMS = {VLLM.name: ("vllm serve m",), LLAMA_CPP.name: ("llama-server -m m",)}
MOST_DRAFTS = {"none": 15, "mtp": 6, "z-lab/Qwen3-8B-DFlash-b16": 15}


@pytest.mark.parametrize("server", [VLLM, LLAMA_CPP], ids=["vllm", "llama.cpp"])
def test_every_command_that_is_printed_is_accepted(server: Server) -> None:
    """Each flag with each value is refused when it is read, or becomes a command that our own parser accepts."""
    printed: dict[str, str] = {}  # our command -> what was typed
    for flag in server.flags:
        values = GIVEN + (CONFIGS if "config" in flag.names[0] else ()) if flag.read else GIVEN[:1]
        ends = [""] if flag.kind == SWITCH else [f"={shlex.quote(value)}" for value in values]
        for typed in [f"{program} {flag.names[0]}{end}" for program in PROGRAMS[server.name] for end in ends]:
            with suppress(UserError):
                printed[read(typed).command()] = typed
    assert len(printed) > 50
    ours = parser()
    for command, typed in printed.items():
        words = [word for word in shlex.split(command) if not word.startswith("SPARKDRAFT_API_KEY=")]
        args = vars(ours.parse_args(words[1:]))
        config = merge({key: args[key] for key in FIELDS if key in args} | {"allow_public": True}, None, {})
        drafts = config.engine.num_draft or 0
        assert drafts <= MOST_DRAFTS.get(config.engine.drafter, 0), (typed, command)


def test_a_maximum_of_drafts_is_no_fixed_depth() -> None:
    found = read("llama-server -m m.gguf --draft-max 16")
    assert found.command() == "sparkdraft serve --model m.gguf"
    assert found.notes == ["--draft-max 16: the depth is chosen every step, up to what the drafter makes"]
    assert read("llama-server -m m.gguf --draft-max 0").values["spec"] == "off"


def test_a_path_of_llama_server() -> None:
    typed = "./build/bin/llama-server -m m.gguf --port 9000"
    assert read(typed).command() == "sparkdraft serve --port 9000 --model m.gguf"


def test_the_pages_have_the_tables_of_the_code() -> None:
    made = runpy.run_path(str(ROOT / "tools/flag_table.py"))["tables"]()
    assert {path.name for path, _, _ in made} == {"api.md", "plan.md", "from-vllm.md", "from-llama-cpp.md"}
    for path, _, table in made:
        assert table in path.read_text(encoding="utf-8"), f"{path.name}: run tools/flag_table.py"


def test_no_cell_breaks_a_table() -> None:
    for path, header, table in runpy.run_path(str(ROOT / "tools/flag_table.py"))["tables"]():
        bars = header.splitlines()[0].count("|")
        assert all(line.count("|") == bars for line in table.splitlines()), path.name
