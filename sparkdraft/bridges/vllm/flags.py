"""Flags of `vllm serve` (0.19 to 0.32) and their meaning here. Those without a counterpart are in without.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparkdraft.bridges.tables import (
    LIST,
    ON,
    SWITCH,
    Found,
    Server,
    Unread,
    always,
    field_of,
    first_key,
    flag,
    is_on,
    json_object,
    number,
    same,
    whole,
    without,
)
from sparkdraft.config import SAMPLING_KINDS
from sparkdraft.drafters import pairs
from sparkdraft.drafters.mtp import MAX_DEPTH, MTP
from sparkdraft.drafters.ngram import NGRAM_DEPTH

ONE_MACHINE = "one machine, one GPU; `sparkdraft cluster` runs vLLM on several (docs/cluster.md)"
WITHOUT = without(Path(__file__).with_name("without.json"))
REASONING = {"think": "qwen3", "gemma4": "gemma4", "harmony": "openai_gptoss"}  # our parser -> vLLM's
TOOLS = {"hermes": "hermes", "qwen3_xml": "qwen3_xml", "gemma4": "gemma4", "harmony": "openai"}
THEIR_REASONING = {theirs: ours for ours, theirs in REASONING.items()} | {"deepseek_r1": "think"}
THEIR_TOOLS = {theirs: ours for ours, theirs in TOOLS.items()} | {"qwen3_coder": "qwen3_xml"}
# vLLM's KV types by our formats, and ours by theirs
OWN_KV = {"exact": "auto", "fp8": "fp8"}
CODED = "turboquant"  # our format of the types in CODED_KV
KV = {"auto": "exact", "float16": "exact", "bfloat16": "exact", "fp8": "fp8", "fp8_e4m3": "fp8"}
# vLLM's types of coded caches, with their bits for keys and for values
CODED_KV = {
    "turboquant_3bit_nc": (3, 3),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k8v4": (8, 4),
}
MOST_BITS = 5  # of our TurboQuant codes
SPECULATIVE = "--speculative-config"
SHORTHANDS = {
    "--spec-method": f"{SPECULATIVE}.method",
    "--spec-model": f"{SPECULATIVE}.model",
    "--spec-tokens": f"{SPECULATIVE}.num_speculative_tokens",
}


def _speculative(text: str) -> Found:
    """Reads --speculative-config. Only method, model and number of drafts have counterparts."""
    config = json_object(text)
    method, model = str(config.pop("method", "")), str(config.pop("model", "") or "")
    count = whole(str(config.pop("num_speculative_tokens", 0) or 0))
    found = Found()
    for key, value in config.items():
        needless = ", and none is needed: one kernel runs both" if key == "attention_backend" else ""
        found.notes.append(f"{SPECULATIVE}: {key} has no counterpart{needless}")
        words = (f"{SPECULATIVE}.{key}", json.dumps(value))
        found.unread.append(Unread(*words, words, (found.notes[-1],), ("drafter",)))
    if method in ("ngram", "ngram_gpu"):
        found.values |= {"drafter": "none", "ngram": True}
        if count > NGRAM_DEPTH:
            own = "drafts from the request's own text"
            found.notes.append(f"--speculative-config: {own} go up to {NGRAM_DEPTH} per step, not {count}")
            count = NGRAM_DEPTH
        words = (f"{SPECULATIVE}.method", '"ngram"')
        # without it, our fields would mean no drafter to vLLM
        found.unread.append(Unread(*words, words, (), ("drafter", "ngram")))
    elif method == "mtp" or method.endswith("_mtp"):  # earlier releases: qwen3_next_mtp, gemma4_mtp ...
        found.values["drafter"] = model or MTP
        count, note = _within(model, count)
        found.notes += note
    elif method == "dflash" or (not method and "dflash" in model.lower()):
        found.values |= {"drafter": model} if model else {}
        note = ["--speculative-config: it names no model, so the known drafter chooses its own depth"]
        count, note = _within(model, count) if model else (0, note)
        found.notes += note
    else:
        named = f"the method {method or 'of ' + model} is not run here"
        named = named if method or model else "it names neither a method nor a model"
        found.notes.append(
            f"--speculative-config: {named}; drafts come from the drafter that is known for the model, "
            "if there is one (`sparkdraft models`), and from the request's own text"
        )
        found.unread.clear()  # the whole flag is unread
        found.near = ("drafter",)
        return found
    if count:
        found.values["spec"] = str(count)
        found.notes.append("--speculative-config: the depth is fixed as there; without --spec it is chosen every step")
    return found


def _within(repo: str, count: int) -> tuple[int, list[str]]:
    """Limits the depth to what the drafter makes: one less than its block size. repo: "" for an MTP head."""
    if not repo and count > MAX_DEPTH:
        return MAX_DEPTH, [f"--speculative-config: an MTP head makes {MAX_DEPTH} drafts at most, not {count}"]
    known = next((d for target in pairs.targets() for d in target.drafters if d.repo == repo != ""), None)
    if known is None or count < known.block:
        return count, []
    return known.block - 1, [f"--speculative-config: {repo} makes {known.block - 1} drafts at most, not {count}"]


def _kv(text: str) -> Found:
    if text in CODED_KV:
        keys, values = CODED_KV[text]
        found = Found({"kv": CODED, "tq_key_bits": min(keys, MOST_BITS), "tq_value_bits": values})
        found.notes += [f"--kv-cache-dtype {text}: keys have {MOST_BITS} bits at most"] if keys > MOST_BITS else []
        return found
    if text in KV:
        return Found({"kv": KV[text]}, near=("kv",) if text in ("float16", "bfloat16") else ())
    near = "fp8" if "8" in text else CODED
    return Found({"kv": near}, [f"--kv-cache-dtype {text}: the nearest is --kv {near}"], near=("kv",))


def _quantization(text: str) -> Found:
    if text == "fp8":
        return Found({"weights": "fp8"})
    note = f"--quantization {text}: the quantisation of a checkpoint is read from its files"
    return Found(notes=[note], near=("weights",))


def _dtype(text: str) -> Found:
    if text in ("auto", "bfloat16"):
        return Found({"dtype": text})
    if text in ("float", "float32"):
        return Found({"dtype": "float32"})
    return Found({"dtype": "bfloat16"}, [f"--dtype {text}: 16-bit floats are bfloat16 here"], near=("dtype",))


def _parser(name: str, known: dict[str, str]) -> Any:
    def read(text: str) -> Found:
        if text in known:
            return Found({name: known[text]})
        note = f"--{name.replace('_', '-')}: vLLM's {text} has no namesake; auto chooses by the model"
        return Found(notes=[note], near=(name,))

    return read


def _parallel(text: str) -> Found:
    return Found(notes=[] if whole(text) == 1 else [f"--tensor-parallel-size {text}: {ONE_MACHINE}"])


def _generation(text: str) -> Found:
    if text in ("auto", "vllm"):
        return Found({"sampling base": "model" if text == "auto" else "openai"})
    return Found(notes=[f"--generation-config {text}: the file is read from the model's own folder"])


def _sampling(text: str) -> Found:
    values = json_object(text)
    kept = {name: value for name, value in values.items() if name in SAMPLING_KINDS}
    notes = [f"--override-generation-config: {name} has no counterpart" for name in values if name not in kept]
    text = ",".join(f"{name}={value}" for name, value in kept.items())
    return Found({"sampling_defaults": text} if kept else {}, notes, near=("sampling_defaults",) if notes else ())


def _eager(text: str) -> Found:
    note = "--enforce-eager: capturing CUDA graphs takes seconds here, so leave --no-graphs out unless memory is short"
    return Found({"graphs": text != ON}, [note] if text == ON else [])


FLAGS = (
    same("--model --model-tag", "model"),
    same("--served-model-name", "served_name", str, "several names are separated by commas", LIST),
    same("--host", "host", str, "vLLM listens everywhere by default, we on 127.0.0.1"),
    same("--port", "port", whole),
    flag("--api-key", "`--api-key`", first_key, "one key; better as SPARKDRAFT_API_KEY", LIST),
    same("--max-model-len", "max_model_len", whole, "auto is 0"),
    same("--max-num-seqs", "max_seqs", whole),
    same("--max-num-batched-tokens", "max_step_tokens", whole),
    same(
        "--gpu-memory-utilization --device-memory-utilization",
        "memory_fraction",
        number,
        "vLLM's is a share of all memory (default 0.92), ours of the free memory (default 0.85)",
    ),
    flag("--kv-cache-dtype", "`--kv`", _kv, "turboquant_* also sets `--tq-key-bits` and `--tq-value-bits`"),
    flag("--num-gpu-blocks-override", "`--kv-tokens`", field_of("blocks", whole), "blocks times their size"),
    same("--block-size", "block_size", whole),
    same("--enable-prefix-caching", "prefix_cache", is_on, "", SWITCH),
    flag("--enforce-eager", "`--no-graphs`", _eager, "not needed: capturing CUDA graphs takes seconds", SWITCH),
    flag("--dtype", "`--dtype`", _dtype, "16-bit floats are bfloat16"),
    flag("--quantization -q", "`--weights fp8`", _quantization, "other methods are found from the files"),
    flag(
        f"--speculative-config -sc {' '.join(SHORTHANDS)}",
        "`--drafter`, `--spec`, `--ngram`",
        _speculative,
        "dflash, ngram and mtp (without a model: `--drafter mtp`); `--spec` is the number of drafts, and chosen every "
        "step where it is left out",
    ),
    flag(
        "--reasoning-parser", "`--reasoning-parser`", _parser("reasoning_parser", THEIR_REASONING), "found by the model"
    ),
    flag("--tool-call-parser", "`--tool-parser`", _parser("tool_parser", THEIR_TOOLS), "found by the model"),
    flag("--enable-auto-tool-choice", "always on", always, "", SWITCH),
    flag("--generation-config", "`--sampling-defaults`", _generation, "auto is model, vllm is openai"),
    flag("--override-generation-config", "`--sampling-defaults`", _sampling, "as temperature=0.7,top_p=0.9"),
    same("--shutdown-timeout", "drain_seconds", number),
    flag("--enable-chunked-prefill", "always on", always, "`--max-step-ms` limits a chunk", SWITCH),
    flag("--async-scheduling --enable-prompt-tokens-details", "always on", always, "", SWITCH),
    same("--max-num-queued-reqs", "max_queue", whole),
    flag("--tensor-parallel-size -tp", "nothing, if it is 1", _parallel, f"more: {ONE_MACHINE}"),
    *WITHOUT,
)
VLLM = Server("vLLM", FLAGS, field_of("model"), "VLLM_", host="0.0.0.0", shorthands=SHORTHANDS)
