"""Commands and compose files of others as ours: every posted one, each flag that has no counterpart by name, mistakes
as one sentence."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.bridges.importing import read
from sparkdraft.bridges.llama_cpp import LLAMA_CPP
from sparkdraft.bridges.tables import read_flags
from sparkdraft.bridges.vllm.flags import VLLM
from sparkdraft.cli.main import parser
from sparkdraft.core import UserError
from sparkdraft.server.config import FIELDS
from tests.bridges import commands
from tests.patience import PATIENT

POSTED = {
    "GEMMA_DFLASH": {
        **{"model": "google/gemma-4-31B-it", "weights": "fp8", "max_model_len": 16384, "max_step_tokens": 16384},
        **{
            "memory_fraction": 0.8,
            "graphs": False,
            "drafter": "RedHatAI/gemma-4-31B-it-speculator.dflash",
            "spec": "7",
        },
    },
    "GEMMA_TWO_SPARKS": {
        **{
            "model": "google/gemma-4-31B-it",
            "weights": "fp8",
            "max_model_len": 16384,
            "max_step_tokens": 16384,
            "spec": "7",
        },
        **{"memory_fraction": 0.8, "graphs": False, "drafter": "RedHatAI/gemma-4-31B-it-speculator.dflash"},
    },
    "GEMMA_INT4": {
        **{"model": "Intel/gemma-4-31B-it-int4-AutoRound", "max_seqs": 4, "spec": "7"},
        **{"drafter": "RedHatAI/gemma-4-31B-it-speculator.dflash"},
    },
    "QWEN_INT4": {
        **{"model": "Intel/Qwen3.5-35B-A3B-int4-AutoRound", "host": "0.0.0.0", "port": 8888, "allow_public": True},
        **{"max_model_len": 262144, "max_step_tokens": 32768, "memory_fraction": 0.7, "tool_parser": "qwen3_xml"},
        **{"drafter": "z-lab/Qwen3.5-35B-A3B-DFlash", "spec": "15"},
    },
    "CODER_NEXT": {
        **{
            "model": "saricles/Qwen3-Coder-Next-NVFP4-GB10",
            "max_step_tokens": 32768,
            "max_seqs": 4,
            "memory_fraction": 0.6,
        },
        **{"graphs": False, "drafter": "z-lab/Qwen3-Coder-Next-DFlash", "spec": "15"},
    },
    "CODER_NEXT_COMPILED": {
        **{
            "model": "saricles/Qwen3-Coder-Next-NVFP4-GB10",
            "max_step_tokens": 32768,
            "max_seqs": 4,
            "memory_fraction": 0.6,
        },
        **{"drafter": "z-lab/Qwen3-Coder-Next-DFlash", "spec": "15"},
    },
    "DFLASH_CONTAINER": {
        **{"model": "/models/DFlash-Qwen3.5-27B-Uncensored-NVFP4", "served_name": "qwen35-dflash", "max_seqs": 16},
        **{"drafter": "z-lab/Qwen3.5-27B-DFlash", "spec": "15", "max_model_len": 65536, "max_step_tokens": 32768},
        **{"api_key": "$VLLM_API_KEY"},
    },
    "TURBOQUANT_CONTAINER": {
        **{"model": "/models/DFlash-Qwen3.5-27B-Uncensored-NVFP4", "max_seqs": 16, "kv": "turboquant"},
        **{"drafter": "z-lab/Qwen3.5-27B-DFlash", "spec": "15", "max_model_len": 65536, "max_step_tokens": 32768},
    },
    "GEMMA_MTP": {
        **{"model": "RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic", "served_name": "gemma4-fp8-mtp", "port": 11437},
        **{"max_model_len": 65536, "memory_fraction": 0.45, "max_seqs": 4, "max_step_tokens": 8192},
        **{"tool_parser": "gemma4", "reasoning_parser": "gemma4"},
        **{"drafter": "google/gemma-4-26B-A4B-it-assistant", "spec": "4"},
    },
    "GEMMA_MTP_BARE": {
        **{"model": "RedHatAI/gemma-4-26B-A4B-it-FP8-Dynamic", "max_model_len": 32768, "spec": "4"},
        **{"drafter": "google/gemma-4-26B-A4B-it-assistant"},
    },
    "LLAMA": {
        **{"model": "unsloth/Qwen3.6-35B-A3B-GGUF", "kv_tokens": 65536, "max_model_len": 16384, "max_seqs": 4},
        **{
            "kv": "fp8",
            "sampling_defaults": "temperature=0.7,top_k=20",
            "max_step_tokens": 4096,
            "served_name": "qwen",
        },
        **{"host": "0.0.0.0", "port": 8080, "allow_public": True},
    },
}
NAMED = {  # flags and variables that have no counterpart, which must be named
    "GEMMA_DFLASH": ("--limit-mm-per-prompt", "VLLM_DISABLE_COMPILE_CACHE", "makes 7 drafts at most, not 8"),
    "GEMMA_TWO_SPARKS": (
        "--tensor-parallel-size 2: one machine, one GPU",
        "--distributed-executor-backend",
        "NCCL_IB_DISABLE",
    ),
    "GEMMA_INT4": ("--attention-backend",),
    "QWEN_INT4": (
        "--load-format",
        "--chat-template",
        "--attention-backend",
        "VLLM_MARLIN_USE_ATOMIC_ADD",
        "--apply-mod",
    ),
    "CODER_NEXT": ("--attention-backend", "--enforce-eager"),
    "CODER_NEXT_COMPILED": ("--attention-backend",),
    "DFLASH_CONTAINER": ("ATTENTION_BACKEND is flash_attn", "listens on all addresses"),
    "TURBOQUANT_CONTAINER": ("ATTENTION_BACKEND",),
    "GEMMA_MTP": ("the depth is fixed as there",),
    "GEMMA_MTP_BARE": ("listens on all addresses",),
    "LLAMA": ("--mlock", "-ub", "name the file", "shared by 4 slots"),
}


def test_none_is_left_out() -> None:
    assert {name for names in commands.POSTED_IN.values() for name in names} == {*POSTED, "COMPOSE"}


@pytest.mark.parametrize("name", POSTED)
def test_every_posted_command(name: str) -> None:
    found = read(getattr(commands, name))
    assert found.values == POSTED[name]
    for words in NAMED[name]:
        assert any(words in note for note in found.notes), (words, found.notes)


@pytest.mark.parametrize("name", POSTED)
def test_what_is_printed_is_a_command_of_ours(name: str) -> None:
    found = read(getattr(commands, name))
    words = shlex.split(found.command())
    if "api_key" in found.values:
        assert words.pop(0) == "SPARKDRAFT_API_KEY=$VLLM_API_KEY" and '"$VLLM_API_KEY"' in found.command()
    args = vars(parser().parse_args(words[1:]))
    given = {field: value for field, value in args.items() if field in FIELDS}
    assert given == {key: value for key, value in POSTED[name].items() if key != "api_key"}


def test_a_compose_file_of_variables(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(commands.COMPOSE)
    found = read(str(path))
    assert found.values == {
        **{"model": "/models/DFlash-Qwen3.5-27B-Uncensored-NVFP4", "served_name": "qwen35-dflash", "spec": "15"},
        **{"drafter": "z-lab/Qwen3.5-27B-DFlash", "max_model_len": 65536, "api_key": "${VLLM_API_KEY}", "kv": "fp8"},
    }
    assert any("--seed: requests have seeds" in note for note in found.notes)


def test_a_compose_file_of_a_command_and_of_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "docker-compose.yml"
    path.write_text(commands.COMPOSE_OF_A_COMMAND)
    found = read(str(path))
    assert found.values == {"model": "Qwen/Qwen3-8B", "max_seqs": 16, "prefix_cache": False}
    assert any("VLLM_LOGGING_LEVEL" in note for note in found.notes)
    path.write_text(commands.LLAMA_COMPOSE)
    found = read(str(path))
    assert found.server == "llama.cpp"
    assert found.values == {"model": "./models/my_model.gguf", "kv_tokens": 4096, "max_model_len": 2048, "max_seqs": 2}
    path.write_text(commands.COMPOSE + commands.COMPOSE_OF_A_COMMAND.split("services:\n")[1])
    with pytest.raises(UserError, match="several servers: vllm, server; name one with --service"):
        read(str(path))
    assert read(str(path), "server").values["model"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("docker run -p 9000:8000 i/vllm --model m", {"host": "0.0.0.0", "port": 9000, "allow_public": True}),
        ("docker run -p 127.0.0.1:9000:80/tcp i/vllm --model m --port 80", {"port": 9000}),
        ("docker run -p 9000:80 -p 9001:81 i/vllm --model m --port 81 --host 0.0.0.0 --api-key k",
         {"host": "0.0.0.0", "port": 9001, "api_key": "k"}),
        ("docker run --rm -e VLLM_API_KEY i/vllm --model m", {"api_key": "$VLLM_API_KEY"}),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", {}),
    ],
)  # fmt: skip
def test_where_a_container_is_reached(text: str, values: dict[str, Any]) -> None:
    assert read(text).values == {"model": "m"} | values


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("vllm serve m --port 9000 > log.txt 2>&1 &", "> log.txt 2>&1 &"),
        ("vllm serve m --port 9000 2>&1 | tee log", "2>&1 | tee log"),
        ("# don't\nvllm serve m \\\n  --port 9000 # it's free\nsleep 5", "sleep 5"),
        ("docker run i/vllm --model m --port 9000 >> log", ">> log"),
        ("docker run i/vllm bash -lc 'vllm serve m --port 9000 | tee log'", "| tee log"),
    ],
)
def test_a_command_ends_where_a_shell_ends_it(text: str, left_out: str) -> None:
    found = read(text)
    assert found.values == {"model": "m", "port": 9000}
    assert f"left out, after the command: {left_out}" in found.notes
    assert read("vllm serve m --api-key 'a|b&c#d'").values == {"model": "m", "api_key": "a|b&c#d"}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('MODEL=a/b\nexport PORT=9000\nvllm serve "$MODEL" --port ${PORT}', {"model": "a/b", "port": 9000}),
        ("ARGS='--port 9 --max-num-seqs 4'\nvllm serve m $ARGS", {"model": "m", "port": 9, "max_seqs": 4}),
        ("vllm serve ${MODEL:-a/b} --port ${PORT:-9000}", {"model": "a/b", "port": 9000}),
        ("KEY=x\nvllm serve m --api-key 'a$KEY'", {"model": "m", "api_key": "a$KEY"}),
        ('KEY=x\nvllm serve m --api-key "a\\$KEY$KEY"', {"model": "m", "api_key": "a$KEYx"}),
        ("KEY=$(openssl rand -hex 9)\nvllm serve m --api-key $KEY", {"model": "m", "api_key": "$KEY"}),
        ("ARGS=''\nvllm serve m $ARGS --port 9", {"model": "m", "port": 9}),
        ("END=\nvllm serve m$END ${END:---port} ${END-8}9", {"model": "m", "port": 9}),
        ('S=\'{"method":"mtp"}\'\nvllm serve m --speculative-config $S', {"model": "m", "drafter": "mtp"}),
        ('KEY="it\'s"\nvllm serve m --api-key $KEY', {"model": "m", "api_key": "it's"}),
        ("vllm serve m --api-key `cat a file` --port 9", {"model": "m", "api_key": "`cat a file`", "port": 9}),
    ],
)
def test_what_a_script_says_elsewhere(text: str, values: dict[str, Any]) -> None:
    """Variables that it sets or has defaults for, as a shell reads them, and folders that it mounts."""
    assert read(text).values == values


@pytest.mark.parametrize(
    "text",
    [
        "MODEL=a\nMODEL=$(choose)",
        "if [ $SIZE = big ]; then\n  MODEL=a\nelse\n  MODEL=b\nfi",
        "MODEL=a; if [ $SIZE = big ]; then MODEL=b; fi",
        "MODEL=a\n[ $SIZE = big ] && MODEL=b",
        "MODEL=a\ntest -d a || MODEL=b",
        "for each in a b; do\n  MODEL=$each\ndone",
    ],
)
def test_a_variable_of_which_no_one_knows_the_value_stays_one(text: str) -> None:
    assert read(f"{text}\nvllm serve $MODEL").values == {"model": "$MODEL"}
    assert read(f"{text}\nMODEL=c\nvllm serve $MODEL").values == {"model": "c"}


def test_a_comment_ends_with_its_line() -> None:
    """A shell ends the command there, so the flags behind it are named and not swallowed."""
    found = read("# as in vllm serve x \\\nvllm serve m --port 9 \\\n  # --seed 3 \\\n  --max-num-seqs 4")
    assert found.values == {"model": "m", "port": 9}
    assert "left out, after the command: --max-num-seqs 4" in found.notes


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    def says(text: str, words: str) -> bool:
        return any(words in note for note in read(text).notes)

    assert says("docker run --env-file .env i/vllm --model m", "--env-file: the variables of .env are not read")
    path = tmp_path / "compose.yaml"
    path.write_text("services: {server: {image: i/vllm, command: --model m, env_file: [a.env]}}")
    assert says(str(path), "env_file: the variables of a.env are not read")
    assert says("vllm serve --port 9", "no model is named: name one with --model, or ours serves smollm2")
    assert not says("vllm serve m", "no model is named")
    assert says("vllm serve m", "add --host 0.0.0.0 and a key")
    assert not says("vllm serve m --api-key k", "and a key")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--max_model_len=64K --port=9000", {"max_model_len": 65536, "port": 9000}),
        ("--max-model-len auto", {"max_model_len": 0}),
        ("--kv-cache-dtype turboquant_3bit_nc", {"kv": "turboquant", "tq_key_bits": 3, "tq_value_bits": 3}),
        ("--kv-cache-dtype nvfp4", {"kv": "turboquant"}),
        ("--no-enable-prefix-caching", {"prefix_cache": False}),
        ("--generation-config vllm", {"sampling base": "openai"}),
        ("--override-generation-config '{\"top_p\": 0.9}'", {"sampling_defaults": "top_p=0.9"}),
        ("--api-key a b --dtype half", {"api_key": "a", "dtype": "bfloat16"}),
        ("-cc.cudagraph_mode=PIECEWISE -tp 2 --enable-expert-parallel", {}),
        ("""--speculative-config '{"method":"ngram","num_speculative_tokens":4}'""",
         {"drafter": "none", "ngram": True, "spec": "4"}),
        ("""--speculative-config '{"method":"mtp","num_speculative_tokens":9}'""", {"drafter": "mtp", "spec": "6"}),
        ("""--speculative-config '{"method":"dflash","num_speculative_tokens":9}'""", {}),
        ("--speculative-config '{}'", {}),
        ("""--speculative-config '{"method":"qwen3_next_mtp","model":"a/b","num_speculative_tokens":2}'""",
         {"drafter": "a/b", "spec": "2"}),
    ],
)  # fmt: skip
def test_single_flags_of_vllm(text: str, values: dict[str, Any]) -> None:
    assert read_flags(VLLM, shlex.split(text)).values == values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("-ngl 0 -t 8", {"device": "cpu", "threads": 8}),
        ("-ctk q4_0 -ctv q4_0", {"kv": "turboquant"}),
        ("--no-cache-prompt --cache-ram 0", {"prefix_cache": False}),
        ("--spec-type ngram-simple --spec-draft-n-max 5", {"ngram": True}),
        ("-md draft.gguf --spec-type draft-mtp", {}),
        ("-md z-lab/Qwen3-8B-DFlash-b16", {"drafter": "z-lab/Qwen3-8B-DFlash-b16"}),
    ],
)
def test_single_flags_of_llama_cpp(text: str, values: dict[str, Any]) -> None:
    found = read_flags(LLAMA_CPP, shlex.split(text))
    assert found.values == values
    assert "mtp" not in text or any("takes its head" in note for note in found.notes)


def test_a_file_of_the_hub_is_named_with_its_repository() -> None:
    found = read("llama-server -hf org/x -hff y.gguf")
    assert found.values == {"model": "org/x:y.gguf"} and not found.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ls -l", "no `vllm serve` or `llama-server` is in it"),
        ("vllm serve m --max-num-seqs many", "--max-num-seqs: 'many' is not a whole number"),
        ("vllm serve m --speculative-config {method", "is not valid JSON"),
        ("vllm serve m --port --host x", "--port needs a value, and --host follows it"),
        ("vllm serve m --port", "--port needs a value, and nothing follows it"),
        ("vllm serve m --port $PORT", "--port: $PORT is a variable without a value here"),
        (
            "vllm serve m --speculative-config.num_speculative_tokens few",
            "--speculative-config: 'few' is not a whole number",
        ),
        (
            "vllm serve m --speculative-config.model a --speculative-config.model.revision b",
            "--speculative-config.model.revision: 'model' already has the value 'a' and cannot have keys",
        ),
        ("vllm serve 'm", "No closing quotation"),
        ("vllm serve m tee", "'tee' follows no flag, and m is the model already"),
        ('EXTRA_ARGS="--seed \'3" vllm serve m', "EXTRA_ARGS cannot be read: No closing quotation"),
        ("vllm serve m --port 70000", "port is 70000"),
        ("docker run -d", "names no image"),
        ("missing.yaml", "the file missing.yaml does not exist"),
    ],
)
def test_mistakes_are_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        read(text)


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("{image: i/vllm, environment: 5}", "environment of the service 'server' is 5, which compose cannot read"),
        ("{image: i/vllm, ports: '80:80'}", "ports of the service 'server' is '80:80', which compose cannot read"),
        ("{image: nginx, environment: 5}", "has no server among server"),
        ("5", "has no server among server"),
    ],
)
def test_a_compose_file_that_compose_cannot_read(tmp_path: Path, service: str, words: str) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(f"services: {{server: {service}}}")
    with pytest.raises(UserError, match=re.escape(words)):
        read(str(path))


def test_a_service_may_have_a_number_for_a_name(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("services: {1: {image: i/vllm, command: --model m}, 2: {image: i/vllm, command: --model n}}")
    assert read(str(path), "2").values == {"model": "n"}
    with pytest.raises(UserError, match="has several servers: 1, 2; name one with --service"):
        read(str(path))


@pytest.mark.parametrize("more", [300, 5000])
def test_a_command_may_be_longer_than_the_name_of_a_file(more: int) -> None:
    """It is looked for as a file first, which no operating system lets have so long a name."""
    text = f"llama-server -m model.gguf --alias {'a' * more}"
    assert read(text).values == {"model": "model.gguf", "served_name": "a" * more}


def test_a_service_of_a_command_is_refused() -> None:
    with pytest.raises(UserError, match="a command has no services"):
        read("vllm serve m", "server")


def test_a_flag_that_nobody_knows_is_named() -> None:
    found = read("vllm serve m --fancy 3 --dazzle")
    assert [note for note in found.notes if "not a known flag of vLLM" in note] == [
        "--fancy: not a known flag of vLLM (its value is 3)",
        "--dazzle: not a known flag of vLLM",
    ]


def test_every_flag_of_the_tables_can_be_read() -> None:
    """Each row has a reader whose fields exist, or says why nothing corresponds to it."""
    samples = ("3", "auto", "true", '{"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}')
    passing = {"blocks", "hub file", "context", *(f"sampling {name}" for name in ("temperature", "top_p", "top_k"))}
    passing |= {"sampling base", "sampling min_p", "sampling repetition_penalty"}
    for server in (VLLM, LLAMA_CPP):
        names = [name for flag in server.flags for name in flag.names]
        assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
        for flag in server.flags:
            if flag.read is None:
                assert flag.remark and not flag.ours.startswith("`"), flag.names
                continue
            assert flag.ours, flag.names
            fields: set[str] = set()
            for sample in samples:
                try:
                    fields |= flag.read(sample).values.keys()
                except UserError:
                    continue
            assert fields <= FIELDS.keys() | passing, (flag.names, fields)


def test_the_command_reads_standard_input() -> None:
    command = [sys.executable, "-m", "sparkdraft.cli.main", "import", "-"]
    result = subprocess.run(command, input=commands.GEMMA_MTP, capture_output=True, text=True, timeout=PATIENT)
    assert result.returncode == 0 and result.stdout.startswith("sparkdraft serve --port 11437"), result.stderr
    assert "note: --speculative-config: the depth is fixed" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("docker run -v $HOME/a:/b i/vllm --model /b/m", 'sparkdraft serve --model "$HOME/a/m"'),
        ("vllm serve /a/${NAME}_it", 'sparkdraft serve --model "/a/${NAME}_it"'),
        ("vllm serve '/a/$5 (x)'", "sparkdraft serve --model '/a/$5 (x)'"),
        ("vllm serve m --api-key $(cat key)", 'SPARKDRAFT_API_KEY="$(cat key)" sparkdraft serve --model m'),
        ("vllm serve m --api-key `cat key`", 'SPARKDRAFT_API_KEY="`cat key`" sparkdraft serve --model m'),
        ("vllm serve m --api-key 'a$b'", "SPARKDRAFT_API_KEY='a$b' sparkdraft serve --model m"),
    ],
)
def test_what_a_shell_fills_in_is_left_to_it(text: str, ours: str) -> None:
    assert read(text).command() == ours


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n- b\n", "has no services"),
        ("a: [", "is not valid YAML"),
        ("colour: red\n", "has no services"),
        ("revision: 2026-13-45\n", "is not valid YAML: month must be in 1..12"),
    ],
)
def test_a_yaml_file_of_something_else_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read(str(tmp_path / "a.yaml"))
