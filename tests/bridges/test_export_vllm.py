"""Our configuration as a `vllm serve` command: what is in it, what is refused, and by which version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.bridges.vllm import broken
from sparkdraft.bridges.vllm.command import Choices, VllmCommand, vllm_command
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.server.config import FIELDS, ServerConfig, merge
from tests.drafters.test_assistant_config import published

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
    engine = {"max_model_len": 16384, "max_seqs": 4, "max_step_tokens": 8192, "memory_fraction": 0.8, "weights": "fp8"}
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
        ("Qwen/Qwen3-4B-Instruct-2507", (None, "hermes")),
        ("Qwen/Qwen3-4B-Thinking-2507", ("qwen3", "hermes")),
        ("openai/gpt-oss-120b", ("openai_gptoss", "openai")),
    ],
)
def test_parsers_are_those_of_the_family(model: str, parsers: tuple[str | None, str]) -> None:
    flags = exported(model=model).flags
    assert (flags.get("reasoning-parser"), flags["tool-call-parser"]) == parsers and flags["enable-auto-tool-choice"]


def test_reasoning_is_parsed_only_where_a_model_writes_it(tmp_path: Path) -> None:
    """vLLM's parser takes all text for reasoning until its end mark."""
    for title, template, parser in (
        ("mine", "{{ messages }}<think>", "qwen3"),
        ("mine", "{{ messages }}", None),
        ("Qwen3-4B-Instruct-2507", "{{ messages }}<think>", None),
    ):
        folder = tmp_path / "coder" / title  # a folder above says nothing of the model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(TINY))
        (folder / "chat_template.jinja").write_text(template)
        flags = exported(model=str(folder)).flags
        assert (flags.get("reasoning-parser"), flags["tool-call-parser"]) == (parser, "hermes"), (title, template)
    assert exported(model=str(folder), server={"reasoning_parser": "think"}).flags["reasoning-parser"] == "qwen3"


@pytest.mark.parametrize(
    ("template", "parser", "said"),
    [
        ("{{ messages }}", "hermes", "tools: the chat template does not show tools"),
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
    assert "no MTP head is known for Qwen/Qwen3-8B" in refusal(Choices(), model="Qwen/Qwen3-8B", drafter="mtp")
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


def test_as_many_requests_wait_there_where_that_has_a_limit() -> None:
    def limited(max_queue: int, version: str = "0.32.0") -> tuple[int | None, bool]:
        command = exported(Choices(version=version), {"max_queue": max_queue}, model="Qwen/Qwen3-8B")
        says = any(note.startswith("max_queue:") and "wait without limit" in note for note in command.notes)
        return command.flags.get("max-num-queued-reqs"), says

    assert limited(3) == (3, False) and limited(256) == (None, False)
    assert limited(3, "0.31.0") == (None, True) and limited(0) == (None, True)


def test_what_our_front_does_is_not_noted_as_missing() -> None:
    config = ServerConfig(EngineConfig(model=QWEN), max_body=2048, allowed_hosts="a.example")
    alone, behind = (vllm_command(config, Choices(), behind_front=front).notes for front in (False, True))
    assert {note.split(":")[0] for note in set(alone) - set(behind)} == {"max_body", "allowed_hosts"}


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
    command = exported(server={"max_body": 2048}, model=QWEN, max_step_ms=20)
    assert {"max_body", "max_step_ms"} <= {note.split(":")[0] for note in command.notes}
    with pytest.raises(UserError, match="api_keys_file is for our own engine"):  # it would serve everybody
        exported(server={"api_keys_file": "keys.toml"}, model=QWEN)
    with pytest.raises(UserError, match="port is 0"):
        exported(server={"port": 0}, model=QWEN)


OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    **{"host": ("0.0.0.0",), "port": (9,), "api_key": ("k",), "served_name": ("n",), "allow_public": (True,)},
    **{"allowed_hosts": ("a",), "max_queue": (3,), "max_body": (9999,), "sampling_defaults": ("openai",)},
    **{"reasoning_parser": ("none",), "tool_parser": ("generic",), "drain_seconds": (1.0,), "canary": (False,)},
    **{"hang_seconds": (9.0,), "step_seconds": (9.0,)},
    **{"watchdog": (False,), "model": (GEMMA,), "device": ("cpu",), "dtype": ("quantised", "float32", "bfloat16")},
    **{"weights": ("fp8", "int4"), "weights_cache": (False,), "max_model_len": (512,), "max_seqs": (3,)},
    **{
        "max_step_tokens": (64,),
        "max_step_ms": (9,),
        "kv": ("exact", "fp8"),
        "tq_mode": ("off", "full_tq", "capture_only"),
    },
    **{"tq_key_bits": (3,), "tq_value_bits": (4,), "tq_ring_capacity": (9,), "tq_initial_layers": (1,)},
    **{"tq_centre": (False,), "kv_tokens": (512,), "memory_fraction": (0.5,), "block_size": (32,)},
    **{"prefix_cache": (False,), "graphs": (True,), "threads": (3,), "spec": ("off", "3"), "spec_depths": ("0,3",)},
    **{"drafter": ("none", "mtp"), "ngram": (False,), "profile": ("none",), "drafter_weights": ("fp8",)},
    **{"draft_vocab": ("ids.txt",), "count_ids": ("counts.txt",), "cut": ("off",)},
    **{"repetition_limit": (0,), "api_keys_file": ("keys.toml",), "cors_origins": ("https://a.example",)},
    **{"request_log": ("json",), "log_prompts": (9,)},
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
