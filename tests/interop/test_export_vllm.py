"""Our configuration as a `vllm serve` command: what is in it, what is refused and by which version, and its forms."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkdraft.cli.main import main
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.interop import broken
from sparkdraft.interop.importing import read
from sparkdraft.interop.vllm_command import Choices, VllmCommand, vllm_command
from sparkdraft.interop.written import as_yaml, shell, systemd
from sparkdraft.server.config import FIELDS, ServerConfig, merge
from tests.spec.test_assistant_config import published

GEMMA, QWEN, CODER = "google/gemma-4-31B-it", "Qwen/Qwen3.5-27B", "saricles/Qwen3-Coder-Next-NVFP4-GB10"
TINY = {
    **{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 259},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
}
REDHAT = "RedHatAI/gemma-4-31B-it-speculator.dflash"


def exported(choices: Choices | None = None, server: dict[str, Any] | None = None, **engine: Any) -> VllmCommand:
    return vllm_command(ServerConfig(EngineConfig(**engine), **(server or {})), choices or Choices())


def refusal(choices: Choices, **engine: Any) -> str:
    with pytest.raises(UserError) as error:
        exported(choices, **engine)
    return str(error.value)


def test_a_whole_configuration() -> None:
    server = {"host": "0.0.0.0", "port": 8888, "api_key": "secret", "served_name": "a,b", "drain_seconds": 5.0}
    server |= {"sampling_defaults": "openai,temperature=0.7"}
    choices = Choices(attention_backend="triton_attn", draft_attention_backend="flash_attn", chat_template="t.jinja")
    engine = {"max_model_len": 16384, "max_seqs": 4, "max_rows": 8192, "memory_fraction": 0.8, "weights": "fp8"}
    command = exported(choices, server, model=GEMMA, drafter=REDHAT, kv="fp8", spec="6", **engine)
    assert command.model == GEMMA and command.secrets == {"VLLM_API_KEY": "secret"}
    assert command.flags == {
        "host": "0.0.0.0",
        "port": 8888,
        "served-model-name": ["a", "b"],
        "max-model-len": 16384,
        "max-num-seqs": 4,
        "max-num-batched-tokens": 8192,
        "gpu-memory-utilization": 0.8,
        "enable-prefix-caching": True,
        "shutdown-timeout": 5,
        "kv-cache-dtype": "fp8",
        "quantization": "fp8",
        "attention-backend": "TRITON_ATTN",
        "chat-template": "t.jinja",
        "reasoning-parser": "gemma4",
        "enable-auto-tool-choice": True,
        "tool-call-parser": "gemma4",
        "generation-config": "vllm",
        "override-generation-config": {"temperature": 0.7},
        "speculative-config": {
            "method": "dflash",
            "model": REDHAT,
            "num_speculative_tokens": 6,
            "attention_backend": "FLASH_ATTN",
        },
        "per-request-spec-decode-metrics": "summary",
    }
    assert "secret" not in repr(command) and not any("secret" in word for word in command.words())


@pytest.mark.parametrize(
    ("model", "parsers"),
    [
        (QWEN, ("qwen3", "qwen3_xml")),
        ("Qwen/Qwen3-8B", ("qwen3", "hermes")),
        (CODER, (None, "qwen3_xml")),
        ("openai/gpt-oss-120b", ("openai_gptoss", "openai")),
    ],
)
def test_parsers_are_those_of_the_family(model: str, parsers: tuple[str | None, str]) -> None:
    flags = exported(model=model).flags
    assert (flags.get("reasoning-parser"), flags["tool-call-parser"]) == parsers and flags["enable-auto-tool-choice"]


@pytest.mark.parametrize(
    ("template", "parser", "said"),
    [
        ("{{ messages }}", "hermes", "tools: the chat template knows none"),
        ("{{ tools }}<tool_call>{{ messages[0].arguments }}", "hermes", ""),
        ("{{ tools }}<function=x><parameter=y>", "qwen3_xml", ""),
        ("{{ tools }}[AVAILABLE_TOOLS]", None, "tools: no parser of vLLM is known"),
        ("{% unheard_of %}{{ tools }}", None, "tools: no parser of vLLM is known"),
        (None, None, "tools: no parser of vLLM is known"),
    ],
)
def test_the_template_of_an_unknown_family_decides_how_calls_are_read(
    template: str | None, parser: str | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "unheard_of"}))
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    command = exported(model=str(tmp_path))
    assert command.flags.get("tool-call-parser") == parser
    assert command.flags.get("enable-auto-tool-choice") is (True if parser else None)
    notes = [note for note in command.notes if note.startswith("tools:")]
    assert [said in note for note in notes] == ([True] if said else [])
    assert exported(model=str(tmp_path), server={"tool_parser": "hermes"}).flags["tool-call-parser"] == "hermes"


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"chat_template.jinja cannot be read as text .*: fetch it again"):
        exported(model=str(tmp_path))


def test_the_drafter_and_its_depth() -> None:
    assert exported(model=QWEN).flags["speculative-config"] == {
        "method": "dflash",
        "model": "z-lab/Qwen3.5-27B-DFlash",
        "num_speculative_tokens": 15,
        "disable_eagle_block_drop": True,
    }
    head = exported(Choices(method="mtp"), model=QWEN, prefix_cache=False).flags["speculative-config"]
    assert head == {"method": "mtp", "num_speculative_tokens": 4}
    assistant = exported(Choices(method="mtp"), model="google/gemma-4-26B-A4B-it", spec="3").flags["speculative-config"]
    assert assistant == {"method": "mtp", "model": "google/gemma-4-26B-A4B-it-assistant", "num_speculative_tokens": 3}
    named = exported(model=QWEN, drafter="mtp", prefix_cache=False).flags["speculative-config"]
    assert named == head
    for options in ({"spec": "off"}, {"drafter": "none"}):
        assert "speculative-config" not in exported(model=QWEN, **options).flags
    assert "makes 7 drafts at most" in refusal(Choices(), model=GEMMA, drafter=REDHAT, spec="8")
    assert "has no MTP head that is known" in refusal(Choices(), model="Qwen/Qwen3-8B", drafter="mtp")
    assert "no mtp drafter is known" in refusal(Choices(method="mtp"), model="Qwen/Qwen3-8B")


def test_a_build_for_cpus_gets_what_it_can_run() -> None:
    command = exported(Choices(machine="cpu"), model="Qwen/Qwen3-8B")
    assert command.flags["gpu-memory-utilization"] == 0.3 and command.flags["dtype"] == "float32"
    assert any(note.startswith("memory_fraction: on a CPU") for note in command.notes)
    given = exported(Choices(machine="cpu"), model="Qwen/Qwen3-8B", memory_fraction=0.5, dtype="bfloat16")
    assert given.flags["gpu-memory-utilization"] == 0.5 and given.flags["dtype"] == "bfloat16"
    assert not any(note.startswith(("memory_fraction", "dtype")) for note in given.notes)


def test_acceptance_per_request_is_asked_for_where_there_is_such_a_flag() -> None:
    flag = "per-request-spec-decode-metrics"
    assert flag not in exported(Choices(version="0.28.0"), model=QWEN, prefix_cache=False).flags
    assert flag not in exported(model=QWEN, spec="off").flags  # vLLM refuses it without a drafter
    assert exported(Choices(version="0.29.0"), model=QWEN, prefix_cache=False).flags[flag] == "summary"


def test_what_our_front_does_is_not_noted_as_missing() -> None:
    config = ServerConfig(EngineConfig(model=QWEN), max_body=2048, allowed_hosts="a.example", max_queue=3)
    alone, behind = (vllm_command(config, Choices(), behind_front=front).notes for front in (False, True))
    assert {note.split(":")[0] for note in set(alone) - set(behind)} == {"max_body", "allowed_hosts"}
    assert any(note.startswith("max_queue: not in vLLM") for note in behind)


def test_a_folder_is_read_and_named_by_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    command = exported(model=str(folder))
    assert command.model == str(folder) and command.flags["served-model-name"][0] == "mine"
    assert command.flags["tool-call-parser"] == "hermes" and any("no" in n and "drafter" in n for n in command.notes)


def test_a_drafter_in_a_folder_is_known_by_its_config(tmp_path: Path) -> None:
    """An assistant, and another file of the target whose head is used."""
    for config in (published(), {"model_type": "qwen3_5"}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = exported(model=GEMMA, drafter=str(tmp_path)).flags["speculative-config"]
        assert found == {"method": "mtp", "model": str(tmp_path), "num_speculative_tokens": 4}


def test_turboquant_becomes_the_smallest_type_that_holds_as_many_bits() -> None:
    def kind(**bits: int) -> Any:
        return exported(model=QWEN, kv="turboquant", spec="off", **bits).flags["kv-cache-dtype"]

    assert kind() == "turboquant_4bit_nc" and kind(tq_key_bits=5) == "turboquant_k8v4"
    assert kind(tq_key_bits=3) == "turboquant_3bit_nc" and kind(tq_key_bits=3, tq_value_bits=4) == "turboquant_k3v4_nc"
    gemma = exported(model=GEMMA, kv="turboquant", spec="off")
    assert gemma.flags["kv-cache-dtype-skip-layers"] == ["sliding_window"]
    eager = exported(model=GEMMA, kv="turboquant", graphs=False).flags
    assert eager["enforce-eager"] and eager["speculative-config"]["kv_cache_dtype"] == "auto"
    assert "capture_only" in refusal(Choices(), model=QWEN, kv="turboquant", tq_mode="capture_only")
    assert "vLLM has [(3, 3)" in refusal(Choices(), model=QWEN, kv="turboquant", tq_value_bits=5, spec="off")


# ---- pairs that are known to be broken


@pytest.mark.parametrize(
    ("name", "options", "broken_in", "mended"),
    [
        ("TurboQuant with drafting", {"model": QWEN, "kv": "turboquant"}, "0.32.0", ""),
        (
            "TurboQuant with attention sinks",
            {"model": "openai/gpt-oss-20b", "kv": "turboquant", "spec": "off"},
            "0.32.0",
            "",
        ),
        ("prefix caching, drafting and recurrent", {"model": QWEN}, "0.29.0", "0.30"),
        ("INT4 weights", {"model": "Intel/Qwen3-8B-int4-AutoRound"}, "0.20.2", "0.21"),
        ("DFlash drafters", {"model": "Qwen/Qwen3-8B"}, "0.19.2rc1.dev21+g893611813", "0.20"),
        ("Gemma 4 with a DFlash", {"model": GEMMA}, "0.23.0", "0.24"),
        ("Qwen3-Next", {"model": CODER, "prefix_cache": False}, "0.23.0", "0.24"),
        ("FP8 weights on a GB10", {"model": "Qwen/Qwen3-8B", "weights": "fp8"}, "0.21.0", "0.22"),
    ],
)
def test_a_broken_pair_is_refused_by_version(name: str, options: dict[str, Any], broken_in: str, mended: str) -> None:
    text = refusal(Choices(version=broken_in), **options)
    assert text.startswith(name) and f"in vLLM {broken_in}" in text
    if mended:
        assert f"{mended} mends it" in text
        exported(Choices(version=mended), **{"prefix_cache": False, **options} if mended != "0.30" else options)
    else:
        assert "no release up to 0.32.0 mends it" in text


def test_what_is_broken_on_one_gpu_is_refused_there_alone() -> None:
    options = Choices(attention_backend="FLASH_ATTN")
    assert "Gemma 4 on FlashAttention" in refusal(options, model=GEMMA)
    assert exported(replace(options, machine="other"), model=GEMMA).flags["attention-backend"] == "FLASH_ATTN"


def test_every_entry_has_its_sources_and_conditions_that_are_looked_at() -> None:
    facts = {
        "family",
        "hybrid",
        "weights",
        "method",
        "kv",
        "graphs",
        "prefix_cache",
        "backend",
        "draft_backend",
        "machine",
    }
    for entry in broken.entries():
        assert entry.sources and entry.why and entry.instead and entry.when.keys() <= facts, entry.name
        assert entry.level in (broken.REFUSE, broken.NOTE)
        assert not entry.until or broken.parsed(entry.since or "0") < broken.parsed(entry.until)


def test_what_vllm_cannot_do_is_refused_or_said() -> None:
    assert "vLLM quantises only to fp8" in refusal(Choices(), model=QWEN, weights="int4")
    with pytest.raises(UserError, match="it must be one of gb10, other"):
        Choices(machine="b200")
    command = exported(server={"max_queue": 3}, model=QWEN, max_step_ms=20)
    assert {"max_queue", "max_step_ms"} <= {note.split(":")[0] for note in command.notes}
    with pytest.raises(UserError, match="port is 0"):
        exported(server={"port": 0}, model=QWEN)


OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    **{"host": ("0.0.0.0",), "port": (9,), "api_key": ("k",), "served_name": ("n",), "allow_public": (True,)},
    **{"allowed_hosts": ("a",), "max_queue": (3,), "max_body": (9999,), "sampling_defaults": ("openai",)},
    **{"reasoning_parser": ("none",), "tool_parser": ("generic",), "drain_seconds": (1.0,), "canary": (False,)},
    **{"watchdog": (False,), "model": (GEMMA,), "device": ("cpu",), "dtype": ("quantised", "float32", "bfloat16")},
    **{"weights": ("fp8", "int4"), "weights_cache": (False,), "max_model_len": (512,), "max_seqs": (3,)},
    **{"max_rows": (64,), "max_step_ms": (9,), "kv": ("exact", "fp8"), "tq_mode": ("off", "full_tq", "capture_only")},
    **{"tq_key_bits": (3,), "tq_value_bits": (4,), "tq_ring_capacity": (9,), "tq_initial_layers": (1,)},
    **{"tq_centre": (False,), "kv_tokens": (512,), "memory_fraction": (0.5,), "block_size": (32,)},
    **{"prefix_cache": (False,), "graphs": (True,), "threads": (3,), "spec": ("off", "3"), "spec_depths": ("0,3",)},
    **{"drafter": ("none", "mtp"), "ngram": (False,), "profile": ("none",), "drafter_weights": ("fp8",)},
    **{"draft_vocab": ("ids.txt",), "count_ids": ("counts.txt",), "cut": ("off",)},
}


def test_every_field_is_in_the_command_or_in_a_note_or_refused() -> None:
    def seen(**change: Any) -> Any:
        given = {"model": QWEN, "kv": "turboquant", "graphs": False, **change}
        given |= {"api_key": "k"} if "host" in change else {}
        try:
            command = vllm_command(merge(given, None, {}), Choices())
        except UserError as error:
            return str(error)
        return command.words(), command.notes, command.secrets

    assert OTHER_VALUES.keys() == FIELDS.keys()
    plain = seen()
    assert not isinstance(plain, str)
    silent = [
        (name, value) for name, values in OTHER_VALUES.items() for value in values if seen(**{name: value}) == plain
    ]
    assert not silent


def test_what_extra_args_say_to_vllm_alone_is_handed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = """--seed=3 -tp 2 --max-num-seqs 4 -cc.mode=3 --reasoning-parser x --no-enable-lora --attention-backend a"""
    monkeypatch.setenv("EXTRA_ARGS", own)
    monkeypatch.setenv("ATTENTION_BACKEND", "b")
    monkeypatch.setenv("MAX_NUM_SEQ", "9")
    assert main(["export", "vllm", "--model", QWEN]) == 0
    out, notes = capsys.readouterr()
    words = shlex.split(out.replace("\\\n", " "))
    assert words[-6:] == ["--seed=3", "--reasoning-parser", "x", "--no-enable-lora", "-cc", '{"mode": 3}']
    assert words[words.index("--tensor-parallel-size") + 1] == "2" and words[words.index("--max-num-seqs") + 1] == "4"
    assert words[words.index("--attention-backend") + 1] == "A" and words.count("--reasoning-parser") == 1
    assert "handed on to vLLM: --seed=3" in notes and "did you mean MAX_NUM_SEQS?" in notes
    assert "one machine" not in notes
    assert main(["export", "vllm", "--model", QWEN, "--form", "yaml", "--tensor-parallel", "4"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["tensor-parallel-size"] == 4 and found["seed"] == "3" and found["no-enable-lora"] is True
    assert found["compilation-config"] == {"mode": 3} and found["reasoning-parser"] == "x"
    monkeypatch.setenv("EXTRA_ARGS", """--speculative-config '{"method": "eagle3", "model": "e"}'""")
    assert main(["export", "vllm", "--model", QWEN]) == 0
    out = capsys.readouterr().out
    assert out.count("--speculative-config") == 1 and "eagle3" in out


# ---- its forms


def test_the_three_forms_say_the_same() -> None:
    command = exported(server={"api_key": "se%cret"}, model=GEMMA, drafter=REDHAT, weights="fp8")
    text = shell(command)
    assert text.startswith('VLLM_API_KEY="$VLLM_API_KEY" vllm serve')
    assert shlex.split(text.replace("\\\n", " "))[1:] == command.words()
    loaded = yaml.safe_load(as_yaml(command))
    assert loaded == {"model": GEMMA, **command.flags}
    unit = systemd(command)
    (start,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert shlex.split(start.removeprefix("ExecStart=/usr/bin/env ")) == command.words()
    assert "TimeoutStopSec=60" in unit and "EnvironmentFile=" in unit
    assert not any("se%cret" in form for form in (text, as_yaml(command), unit))


def test_a_misspelt_backend_is_refused_and_an_unknown_one_is_named() -> None:
    with pytest.raises(UserError, match=r"--attention-backend is 'FLASHATTN', .*; did you mean FLASH_ATTN\?"):
        Choices(attention_backend="flashattn")
    with pytest.raises(UserError, match=r"--draft-attention-backend is 'TRITON_ATT', .*; did you mean TRITON_ATTN\?"):
        Choices(draft_attention_backend="triton_att")
    own = exported(Choices(attention_backend="of_a_plugin"), model="Qwen/Qwen3-8B")
    assert own.flags["attention-backend"] == "OF_A_PLUGIN"
    assert any("OF_A_PLUGIN is none of the backends of vLLM 0.32.0" in note for note in own.notes)
    known = exported(Choices(attention_backend="flash_attn"), model="Qwen/Qwen3-8B")
    assert not any("backends" in note for note in known.notes)


def test_a_template_that_is_not_here_and_a_version_that_is_not_known(tmp_path: Path) -> None:
    def says(words: str, **choices: Any) -> bool:
        return any(words in note for note in exported(Choices(**choices), model="Qwen/Qwen3-8B").notes)

    (tmp_path / "there.jinja").touch()
    missing = "--chat-template: there is no file /nowhere.jinja here"
    assert says(missing, chat_template="/nowhere.jinja")
    assert not says("--chat-template", chat_template=str(tmp_path / "there.jinja"))
    assert not says("--chat-template", chat_template="{{ messages }}")
    assert says("vLLM 0.33.1 is newer than 0.32.0", version="0.33.1") and not says("is newer", version="0.32.0")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    command = exported(Choices(chat_template='a "b" $HOME 100%.jinja'), model=GEMMA)
    path = tmp_path / "vllm.service"
    path.write_text(systemd(command))
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert "vllm.service" not in result.stderr, result.stderr
    assert '"a \\"b\\" $$HOME 100%%.jinja"' in path.read_text()


def test_what_is_exported_can_be_imported() -> None:
    engine = {
        "model": QWEN,
        "kv": "fp8",
        "max_model_len": 65536,
        "max_seqs": 16,
        "max_rows": 32768,
        "kv_tokens": 131072,
    }
    engine |= {"spec": "15", "drafter": "z-lab/Qwen3.5-27B-DFlash", "memory_fraction": 0.7, "weights": "fp8"}
    server = {"port": 9000, "sampling_defaults": "temperature=0.5", "drain_seconds": 5.0}
    back = read(shell(exported(server=server, **engine))).values
    parsers = {"reasoning_parser": "think", "tool_parser": "qwen3_xml"}
    assert back == engine | server | parsers


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    flags = ["export", "vllm", "--model", GEMMA, "--form", "yaml", "--out", str(tmp_path / "v.yaml"), "--port", "9000"]
    result = subprocess.run([sys.executable, "-m", "sparkdraft.cli.main", *flags], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == "" and "note: spec: the depth is fixed" in result.stderr
    assert yaml.safe_load((tmp_path / "v.yaml").read_text())["port"] == 9000
