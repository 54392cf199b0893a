"""Flags beat the environment, that beats the file, that beats the defaults; and mistakes are one sentence."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.bridges.container_env import CONTAINER_NAMES, container_notes, merge_with_container
from sparkdraft.cli.main import parser
from sparkdraft.config import ENGINE_FIELDS
from sparkdraft.core import UserError
from sparkdraft.server.config import FIELDS, OTHER_NAMES, PREFIX, ServerConfig, default_of, merge
from sparkdraft.server.run import listen
from tests.patience import PATIENT


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text('model = "from-file"\nport = 1\nspec = 4\nmax_seqs = 5\nprefix_cache = false\n')
    return path


def test_the_order_of_the_sources(toml: Path) -> None:
    config = merge({"port": 3, "host": None}, toml, {"SPARKDRAFT_PORT": "2", "SPARKDRAFT_MAX_SEQS": "6"})
    assert (config.port, config.engine.max_seqs, config.engine.model) == (3, 6, "from-file")
    assert config.host == "127.0.0.1" and config.engine.spec == "4" and not config.engine.prefix_cache


def test_every_field_has_a_variable() -> None:
    for name in FIELDS:
        default = default_of(name)
        value = {bool: "yes", int: "4096", float: "0.5"}.get(type(default), default or "x")
        value = 5 if name.endswith("_bits") else "https://x.example" if name == "cors_origins" else value
        kv = {"kv": "turboquant"} if name.startswith("tq_") else {}
        merge({"allow_public": True} | kv, None, {PREFIX + name.upper(): str(value)})


def test_the_names_of_containers() -> None:
    environ = {
        "MODEL_PATH": "/models/target",
        "DFLASH_DRAFTER": "z-lab/x",
        "DFLASH_NUM_SPEC_TOKENS": "15",
        "MAX_MODEL_LEN": "65536",
        "MAX_NUM_SEQS": "16",
        "MAX_NUM_BATCHED_TOKENS": "32768",
        "GPU_MEMORY_UTILIZATION": "0.5",
        "TQ_MODE": "full_tq",
        "TQ_KEY_BITS": "5",
        "TQ_VALUE_BITS": "4",
        "TQ_RING_CAPACITY": "256",
        "TQ_INITIAL_LAYERS": "2",
        "SERVED_MODEL_NAME": "qwen",
        "VLLM_API_KEY": "secret",
    }
    assert environ.keys() == CONTAINER_NAMES.keys()
    config = merge_with_container({}, None, environ | {"ENABLE_TURBOQUANT": "1"})
    engine = config.engine
    assert (engine.model, engine.drafter, engine.spec) == ("/models/target", "z-lab/x", "15")
    assert (engine.max_model_len, engine.max_seqs, engine.max_step_tokens) == (65536, 16, 32768)
    assert (engine.memory_fraction, config.names, config.api_key) == (0.5, ["qwen"], "secret")
    assert (engine.tq_mode, engine.tq_key_bits, engine.tq_value_bits) == ("full_tq", 5, 4)
    assert (engine.tq_ring_capacity, engine.tq_initial_layers, engine.kv) == (256, 2, "turboquant")
    with pytest.raises(UserError, match="tq_mode is full_tq, but kv is exact"):
        merge_with_container({}, None, environ)
    switched_off = merge_with_container({}, None, environ | {"ENABLE_TURBOQUANT": "0"}).engine
    assert (switched_off.kv, switched_off.tq_mode) == ("exact", "hybrid")
    captured = merge_with_container({}, None, {"ENABLE_TURBOQUANT": "1", "TQ_MODE": "capture_only"}).engine
    assert (captured.kv, captured.tq_mode) == ("turboquant", "capture_only")
    assert merge_with_container({"kv": "fp8"}, None, {"ENABLE_TURBOQUANT": "1"}).engine.kv == "fp8"
    assert merge_with_container({}, None, {"ENABLE_TURBOQUANT": "0"}).engine.kv == "exact"
    with pytest.raises(UserError, match="ENABLE_TURBOQUANT is 'maybe'; it must be true or false"):
        merge_with_container({}, None, {"ENABLE_TURBOQUANT": "maybe"})
    assert "secret" not in repr(config)
    assert merge_with_container({}, None, {"SERVED_MODEL_NAME": "qwen", "SPARKDRAFT_SERVED_NAME": "a, b"}).names == [
        "a",
        "b",
    ]
    assert merge_with_container({}, None, {"VLLM_API_KEY": ""}).api_key == ""


def test_flags_of_vllm_in_a_container() -> None:
    environ = {"EXTRA_ARGS": "--kv-cache-dtype fp8 --max-num-seqs 8 --seed 3", "MAX_NUM_SEQS": "16"}
    config = merge_with_container({}, None, environ)
    assert (config.engine.kv, config.engine.max_seqs) == ("fp8", 8), "EXTRA_ARGS come last on a command line"
    assert merge_with_container({}, None, environ | {"SPARKDRAFT_MAX_SEQS": "4"}).engine.max_seqs == 4
    assert merge_with_container({"max_seqs": 2}, None, environ).engine.max_seqs == 2
    assert container_notes(environ) == ["EXTRA_ARGS: --seed: requests have seeds, the server has none"]
    with pytest.raises(UserError, match="--max-num-seqs: 'many' is not a whole number"):
        merge_with_container({}, None, {"EXTRA_ARGS": "--max-num-seqs many"})


def test_an_attention_backend_is_accepted_and_explained() -> None:
    assert merge_with_container({}, None, {"ATTENTION_BACKEND": "flash_attn"}) == ServerConfig()
    (note,) = container_notes({"ATTENTION_BACKEND": "flash_attn"})
    assert "accepted and not needed" in note


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MAX_NUM_SEQ", "MAX_NUM_SEQS"),
        ("DFLASH_NUM_SPECULATIVE_TOKENS", "DFLASH_NUM_SPEC_TOKENS"),
        ("TQ_KEYBITS", "TQ_KEY_BITS"),
        ("TQ_RING", "TQ_RING_CAPACITY"),
        ("SERVED_MODELNAME", "SERVED_MODEL_NAME"),
        ("GPU_MEMORY_UTILISATION", "GPU_MEMORY_UTILIZATION"),
        ("ENABLE_TURBOQUANTS", "ENABLE_TURBOQUANT"),
    ],
)
def test_a_misspelt_variable_is_reported(name: str, meant: str) -> None:
    assert container_notes({name: "1"}) == [f"{name} is not read; did you mean {meant}?"]
    assert not container_notes({name: ""})


def test_variables_of_other_programs_are_left_alone() -> None:
    others = (
        "PATH",
        "MODEL",
        "MAX_TOKENS",
        "VLLM_LOGGING_LEVEL",
        "OPENAI_API_KEY",
        "CUDA_VISIBLE_DEVICES",
        "GPU_COUNT",
    )
    assert not container_notes(dict.fromkeys([*others, *CONTAINER_NAMES, "ENABLE_TURBOQUANT"], "1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean port"),
        ("port = 'x'", "port in"),
        ("port = true", "whole number"),
        ("port = inf", "port in .* is inf; it must be a whole number"),
        ("max_seqs = 2.7", "max_seqs in .* is 2.7; it must be a whole number"),
        ("graphs = 3", "true or false"),
        ("port = ", "not valid TOML"),
        ("port = 70000", "between 0"),
        ('dtype = "int3"', "dtype is 'int3'"),
        ("[engine]\nmodel = 'x'", "unknown key 'engine'"),
    ],
)
def test_a_wrong_file_is_told_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        merge({}, path, {})


@pytest.mark.parametrize("host", ["a..b", "", "203.0.113.5"])  # the last is the address of another machine
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(UserError, match=f"host is '{host}', which is not an address of this machine; .* --host"):
        listen(ServerConfig(host=host, port=0, allow_public=True))


def test_a_port_that_is_taken() -> None:
    with listen(ServerConfig(port=0)) as taken, pytest.raises(UserError, match=r"in use.*choose another with --port"):
        listen(ServerConfig(port=taken.getsockname()[1]))


def test_a_missing_file_and_a_wrong_variable() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        merge({}, "no/such.toml", {})
    with pytest.raises(UserError, match="SPARKDRAFT_PORT is 'x'; it must be a whole number"):
        merge({}, None, {"SPARKDRAFT_PORT": "x"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", ""])
def test_the_world_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(UserError, match="allow-public"):
        ServerConfig(host=host)
    ServerConfig(host=host, api_key="k")
    ServerConfig(host=host, allow_public=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_neither(host: str) -> None:
    assert ServerConfig(host=host).is_local


def test_names(tmp_path: Path) -> None:
    assert merge({"model": "Qwen/Qwen3-8B"}, None, {}).names == ["Qwen/Qwen3-8B"]
    assert merge({"model": str(tmp_path)}, None, {}).names == [tmp_path.name, str(tmp_path)]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("SPARKDRAFT_DVICE", "SPARKDRAFT_DEVICE"), ("SPARKDRAFT_CASHE", "SPARKDRAFT_CACHE")],
)
def test_an_unknown_variable_is_an_error(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"variable {name} is not known; did you mean {meant}"):
        merge({}, None, {name: "x"})
    merge({}, None, {name: ""})  # containers pass on what nobody filled in


def test_every_variable_that_the_package_reads_is_known() -> None:
    package = Path(__file__).parents[2] / "sparkdraft"
    read = {name for path in package.rglob("*.py") for name in re.findall(r"\bSPARKDRAFT_[A-Z]\w+", path.read_text())}
    assert {"SPARKDRAFT_CACHE", "SPARKDRAFT_CXXFLAGS", "SPARKDRAFT_API_KEY"} <= read
    assert read <= {PREFIX + name.upper() for name in FIELDS} | set(OTHER_NAMES) | {"SPARKDRAFT_PLAIN"}  # of C++


def test_the_command_refuses_before_anything_is_loaded() -> None:
    command = [sys.executable, "-m", "sparkdraft.cli.main", "serve", "--host", "0.0.0.0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert result.returncode == 1 and "--allow-public" in result.stderr and len(result.stderr.splitlines()) == 1


def test_the_docs_have_the_flags_of_the_code() -> None:
    root = Path(__file__).parent.parent.parent
    table = runpy.run_path(str(root / "tools/flag_table.py"))["table"]()
    assert table in (root / "docs/api.md").read_text(encoding="utf-8"), "run tools/flag_table.py"


@pytest.mark.parametrize("command", ["generate --prompt x", "chat", "demo", "serve", "bench accept"])
def test_commands_take_the_same_engine_flags(command: str) -> None:
    given = {name: True if isinstance(each.default, bool) else each.default for name, each in ENGINE_FIELDS.items()}
    if command in ("demo", "bench accept"):  # whose figures do not hang on a profile
        del given["profile"]
    args = command.split()
    for name, value in given.items():
        args += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    found = vars(parser().parse_args(args))
    assert {name: found[name] for name in given} == given
