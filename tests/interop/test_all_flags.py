"""The tables know every flag that the other servers have: its names, and whether a value follows it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from sparkdraft.interop.importing import read
from sparkdraft.interop.llama_flags import LLAMA_CPP
from sparkdraft.interop.tables import LIST, SWITCH, VALUE, Flag, Server, read_flags
from sparkdraft.interop.vllm_flags import VLLM

HERE = Path(__file__).parent
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
