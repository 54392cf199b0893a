"""Turns our configuration into a `vllm serve` command.

Every flag must be in the table of flags.py. What vLLM cannot do is refused or named in a note. A key is never written;
the command refers to a variable.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdraft.bridges.tables import Unread
from sparkdraft.bridges.vllm import broken
from sparkdraft.bridges.vllm.flags import CODED, CODED_KV, OWN_KV, REASONING, TOOLS, VLLM
from sparkdraft.bridges.vllm.targets import WINDOWED, Speculation, Target, find_target, speculate
from sparkdraft.config import parse_sampling
from sparkdraft.core import UserError
from sparkdraft.server.config import ServerConfig, default_of
from sparkdraft.text.chat import variables_of
from sparkdraft.text.families import AUTO, NONE
from sparkdraft.text.tools import by_marks

QWEN = ("qwen3", "hermes")
QWEN35 = ("qwen3", "qwen3_xml")
# family -> vLLM's parsers of reasoning and of tool calls
PARSERS = {
    "qwen3": QWEN,
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN,
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35,
    "gemma4": ("gemma4", "gemma4"),
    "gpt_oss": ("openai_gptoss", "openai"),
}
CPU = "cpu"
MACHINES = ("gb10", "other", CPU)
CPU_SHARE = 0.3  # of all memory, for weights and KV cache: vLLM exits if that much is not free or does not suffice
NOT_THERE = {  # our fields without a counterpart in vLLM, and what vLLM does instead
    "max_step_ms": "a prompt's chunks are limited by max_step_tokens alone",
    "max_body": "bodies have no limit",
    "allowed_hosts": "every Host header is answered",
    "threads": "set OMP_NUM_THREADS",
    "tq_ring_capacity": "the last tokens are not kept uncoded",
    "tq_initial_layers": "the first two and the last two layers stay exact in models without recurrent layers",
    "tq_centre": "keys are not centred",
    "device": "it runs on the device it was built for; a CPU needs its build for CPUs",
    "weights_cache": "weights are quantised at every load",
    "spec_depths": "the depth is fixed",
    "drafter_weights": "a drafter keeps the format of its file",
    "draft_vocab": "a drafter drafts among the ids of its file",
    "count_ids": "ids are not counted",
    "cut": "the depth is fixed",
    "profile": "the results of `sparkdraft tune` are not read",
    "repetition_limit": "no text is stopped for repetition, unless its request has repetition_detection",
    "canary": "no probes run at the start",
    "watchdog": "nothing watches the engine",
    "hang_seconds": "an engine that hangs is not noticed",
    "step_seconds": "an engine that hangs is not noticed",
    "allow_public": "other machines may always connect without a key",
    "cors_origins": "pages of other origins cannot read answers",
    "request_log": "its own log has no line with a request's counts and times",
    "log_prompts": "prompts and answers are not logged",
}

NO_PARSER = (
    "tools: no parser of vLLM is known for this model, so requests with tools get status 400 there; --tool-parser "
    "names one, such as hermes"
)
FRONT = ("max_body", "allowed_hosts", "allow_public", "canary")  # handled by our own front where it stands before vLLM
PART = "speculative-config."  # prefix of a single key that is handed on
SPEC_METRICS = (0, 29, 0)  # the first version with acceptance per request
QUEUE = (0, 32, 0)  # the first version known to limit waiting requests


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings of vLLM that are no fields of our configuration."""

    method: str = "auto"
    attention_backend: str = ""
    draft_attention_backend: str = ""
    chat_template: str = ""
    tensor_parallel: int = 1
    version: str = broken.NEWEST
    machine: str = "gb10"
    extra: tuple[Unread, ...] = ()  # flags handed on to vLLM; they beat the flags chosen here
    fixed: frozenset[str] = frozenset()  # our fields that beat those flags, because our own flags set them

    def __post_init__(self) -> None:
        if self.machine not in MACHINES:
            raise UserError(f"--machine is '{self.machine}'; it must be one of {', '.join(MACHINES)}")
        if self.tensor_parallel < 1:
            raise UserError(f"--tensor-parallel is {self.tensor_parallel}; it must be 1 or more")
        broken.parsed(self.version)


@dataclass(frozen=True, slots=True)
class VllmCommand:
    model: str
    flags: dict[str, Any]  # without dashes; True and False are switches, dicts are JSON
    secrets: dict[str, str] = field(repr=False)  # environment variables that must not be printed
    notes: list[str]
    extra: tuple[Unread, ...] = ()

    def words(self) -> list[str]:
        words = ["vllm", "serve", self.model]
        for name, value in self.flags.items():
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            else:
                words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return words + [word for each in self.extra for word in each.words]


def vllm_command(config: ServerConfig, choices: Choices, behind_front: bool = False) -> VllmCommand:
    """Raises UserError for what vLLM cannot do, or is known to do wrongly. behind_front: our own front answers
    clients."""
    target, engine, notes = find_target(config.engine.model), config.engine, []
    notes += [target.doubt] if target.doubt else []
    template = choices.chat_template
    if template and not any(sign in template for sign in "{}\n") and not Path(template).is_file():
        notes.append(f"--chat-template: there is no file {template} here; vLLM needs it where it runs")
    extra = [each for each in choices.extra if not choices.fixed.intersection(each.near)]
    named = {each.name.removeprefix("--"): each.value for each in extra}
    speculation = speculate(target, engine, choices.method, notes) if "speculative-config" not in named else None
    extra = [each for each in extra if speculation or not each.name.startswith(f"--{PART}")]
    kv = named.get("kv-cache-dtype") or _kv_type(config, notes)
    if config.api_keys_file:
        raise UserError("api_keys_file is for our own engine: vLLM knows no named keys; leave it out and set api_key")
    if not config.port:
        raise UserError("port is 0, any free one: vLLM must be told one, such as --port 8000")
    flags: dict[str, Any] = {"host": config.host, "port": config.port}
    flags |= {"served-model-name": config.names if config.served_name or config.names[0] != target.name else None}
    flags |= _budgets(config) | _queue(config, choices.version, notes)
    flags |= _on_cpu(config, notes) if choices.machine == CPU else {}
    flags |= {"kv-cache-dtype": kv} if kv != "auto" else {}
    if kv in CODED_KV and target.family in WINDOWED:
        flags["kv-cache-dtype-skip-layers"] = ["sliding_window"]
    flags |= _weights(config, notes, choices.machine == CPU and "dtype" not in named)
    flags |= {
        "attention-backend": choices.attention_backend.upper() or None,
        "chat-template": choices.chat_template or None,
    }
    flags |= {"tensor-parallel-size": choices.tensor_parallel} if choices.tensor_parallel > 1 else {}
    flags |= _parsers(config, target, named, notes) | _sampling(config)
    if speculation:
        flags["speculative-config"] = _speculative(speculation, config, choices, target, kv, notes) | {
            name.removeprefix(PART): json.loads(value) for name, value in named.items() if name.startswith(PART)
        }
    if (speculation or "speculative-config" in named) and broken.parsed(choices.version) >= SPEC_METRICS:
        flags["per-request-spec-decode-metrics"] = "summary"
    notes += broken.check(_facts(config, choices, target, speculation, kv), choices.version)
    missing = {name: text for name, text in NOT_THERE.items() if not (behind_front and name in FRONT)}
    notes += [f"{name}: not in vLLM: {text}" for name, text in missing.items() if _is_set(config, name)]
    notes += [f"handed on to vLLM: {shlex.join(each.words)}" for each in extra]
    notes += [
        f"not handed on to vLLM: {shlex.join(each.words)}: {_why_not(each, choices)}"
        for each in choices.extra
        if each not in extra
    ]
    flags = {name: value for name, value in flags.items() if value is not None and name not in named}
    unknown = [name for name in flags if VLLM.find(f"--{name}") is None]
    assert not unknown, unknown
    secrets = {"VLLM_API_KEY": config.api_key} if config.api_key else {}
    whole = tuple(each for each in extra if not each.name.startswith(f"--{PART}"))
    return VllmCommand(target.name, flags, secrets, notes, whole)


def _why_not(given: Unread, choices: Choices) -> str:
    beaten = ", ".join(name for name in given.near if name in choices.fixed)
    return f"{beaten} is set by a flag or a SPARKDRAFT_ variable" if beaten else "nothing is drafted"


def _facts(
    config: ServerConfig, choices: Choices, target: Target, speculation: Speculation | None, kv: str
) -> dict[str, Any]:
    """The facts that conditions in broken.json refer to."""
    return {
        "family": target.family,
        "hybrid": target.is_hybrid,
        "weights": target.weights or (config.engine.weights if config.engine.weights != AUTO else ""),
        "method": speculation.kind if speculation else "",
        "kv": kv.partition("_")[0],
        "graphs": config.engine.graphs,
        "prefix_cache": config.engine.prefix_cache,
        "backend": choices.attention_backend.upper(),
        "draft_backend": bool(choices.draft_attention_backend),
        "machine": choices.machine,
    }


def _budgets(config: ServerConfig) -> dict[str, Any]:
    engine = config.engine
    blocks = -(-engine.kv_tokens // engine.block_size) if engine.kv_tokens else None
    return {
        "max-model-len": engine.max_model_len or "auto",
        "max-num-seqs": engine.max_seqs or None,
        "max-num-batched-tokens": engine.max_step_tokens or None,
        "gpu-memory-utilization": engine.memory_fraction,
        "block-size": engine.block_size if _is_set(config, "block_size") or blocks else None,
        "num-gpu-blocks-override": blocks,
        "enable-prefix-caching": engine.prefix_cache,
        "enforce-eager": True if not engine.graphs else None,
        "shutdown-timeout": round(config.drain_seconds),
    }


def _queue(config: ServerConfig, version: str, notes: list[str]) -> dict[str, Any]:
    if not _is_set(config, "max_queue"):
        return {}
    if config.max_queue and broken.parsed(version) >= QUEUE:
        return {"max-num-queued-reqs": config.max_queue}
    known = "a limit of 0 is not known there" if broken.parsed(version) >= QUEUE else f"not in vLLM {version}"
    notes.append(f"max_queue: {known}: requests wait without limit")
    return {}


def _on_cpu(config: ServerConfig, notes: list[str]) -> dict[str, Any]:
    """Flags that mean something else in vLLM's build for CPUs."""
    if _is_set(config, "memory_fraction"):
        return {}
    notes.append(
        f"memory_fraction: on a CPU vLLM takes this share of all memory, weights included, even if others need it; "
        f"{CPU_SHARE} is set, and a larger model needs more"
    )
    return {"gpu-memory-utilization": CPU_SHARE}


def _kv_type(config: ServerConfig, notes: list[str]) -> str:
    """vLLM's name for the format of the KV cache. For coded ones, the smallest with at least as many bits."""
    engine = config.engine
    if engine.kv != CODED or engine.tq_mode == "off":
        return OWN_KV.get(engine.kv, "auto")
    if engine.tq_mode == "capture_only":
        raise UserError("tq_mode is capture_only, which vLLM does not have: measure here, or choose hybrid")
    if engine.tq_mode == "hybrid":
        notes.append("tq_mode: hybrid is not in vLLM: the last tokens are coded too")
    wanted = (engine.tq_key_bits, engine.tq_value_bits)
    enough = [name for name, bits in CODED_KV.items() if bits[0] >= wanted[0] and bits[1] >= wanted[1]]
    if not enough:
        raise UserError(f"tq_key_bits and tq_value_bits are {wanted}; vLLM has {sorted(CODED_KV.values())}")
    name = min(enough, key=lambda each: sum(CODED_KV[each]))
    if CODED_KV[name] != wanted:
        notes.append(
            f"kv: {name} has {CODED_KV[name][0]} and {CODED_KV[name][1]} bits, not {wanted[0]} and {wanted[1]}"
        )
    return name


def _weights(config: ServerConfig, notes: list[str], on_cpu: bool) -> dict[str, Any]:
    engine = config.engine
    if engine.weights not in (AUTO, "fp8"):
        raise UserError(
            f"weights is {engine.weights}: vLLM quantises only to fp8 when it loads; name a checkpoint that is "
            f"quantised already, or choose --weights fp8"
        )
    if engine.dtype == "quantised":
        notes.append("dtype: quantised is a form of this engine; vLLM computes in the type of the checkpoint")
    dtype = engine.dtype if engine.dtype in ("float32", "bfloat16") else None
    if dtype is None and on_cpu:
        dtype = "float32"
        notes.append("dtype: float32 is set, because vLLM crashes in 16 bits on CPUs without instructions for them")
    return {"quantization": "fp8" if engine.weights == "fp8" else None, "dtype": dtype}


def _parsers(config: ServerConfig, target: Target, named: Container[str], notes: list[str]) -> dict[str, Any]:
    """named: flags that the user hands on to vLLM."""
    reasoning, calls = QWEN35 if target.writes_code else PARSERS.get(target.family, ("", ""))
    reasoning = reasoning if target.thinks else ""
    if config.reasoning_parser != AUTO:
        reasoning = "" if config.reasoning_parser == NONE else REASONING[config.reasoning_parser]
        if reasoning == "qwen3" and not target.family.startswith("qwen"):
            reasoning = "deepseek_r1"
    if "tool-call-parser" in named:
        return {"reasoning-parser": reasoning or None, "enable-auto-tool-choice": True}
    if config.tool_parser != AUTO:
        calls = TOOLS.get(config.tool_parser, "")
    elif not calls:
        calls = _by_template(target, notes)
    if not calls:
        notes.append(NO_PARSER)
    found: dict[str, Any] = {"reasoning-parser": reasoning or None}
    return found | ({"enable-auto-tool-choice": True, "tool-call-parser": calls} if calls else {})


def _by_template(target: Target, notes: list[str]) -> str:
    """Finds the tool parser of a family that is not in PARSERS. Returns "" if the template is not at hand or shows
    calls of an unknown form. With the hermes parser vLLM makes any model write the calls that a request requires or
    names; without a parser it refuses all requests with tools."""
    if not target.template:
        return ""
    if found := TOOLS.get(by_marks(target.template)[0].name):
        return found
    known = variables_of(target.template)  # none if it cannot be parsed here, and then its text decides
    if "tools" in (known or target.template):
        return ""
    notes.append(
        "tools: the chat template does not show tools to the model: it writes the calls that a request requires or "
        "names, in hermes' form, and their arguments follow the schema if the tool is strict"
    )
    return TOOLS["hermes"]


def _sampling(config: ServerConfig) -> dict[str, Any]:
    base, values = parse_sampling(config.sampling_defaults)
    return {
        "generation-config": "vllm" if base == "openai" else None,
        "override-generation-config": dict(values) or None,
    }


def _speculative(
    speculation: Speculation, config: ServerConfig, choices: Choices, target: Target, kv: str, notes: list[str]
) -> dict[str, Any]:
    found = speculation.config()
    if choices.draft_attention_backend:
        found["attention_backend"] = choices.draft_attention_backend.upper()
    if kv in CODED_KV and speculation.kind != "mtp":
        found["kv_cache_dtype"] = "auto"  # a drafter with bidirectional attention cannot read TurboQuant codes
    if target.is_hybrid and config.engine.prefix_cache and broken.parsed(choices.version) >= (0, 30, 0):
        found["disable_eagle_block_drop"] = True
        notes.append(
            "disable_eagle_block_drop is set, without which cached prompts are not found; fewer drafts may be accepted"
        )
    return found


def _is_set(config: ServerConfig, name: str) -> bool:
    return bool(_value(config, name) != default_of(name))


def _value(config: ServerConfig, name: str) -> Any:
    return getattr(config.engine if hasattr(config.engine, name) else config, name)


def shell(command: VllmCommand) -> str:
    lines: list[str] = []
    for word in command.words()[3:]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    start = "".join(f'{name}="${name}" ' for name in command.secrets) + shlex.join(command.words()[:3])
    return " \\\n  ".join([start, *lines]) + "\n"
