"""Flags of llama.cpp's `llama-server` and their meaning here. Those without a counterpart are in
llama_cpp_without.json.
"""

from __future__ import annotations

from pathlib import Path

from sparkdraft.bridges.tables import (
    SWITCH,
    Flag,
    Found,
    Server,
    always,
    field_of,
    first_key,
    flag,
    is_on,
    number,
    same,
    whole,
    without,
)
from sparkdraft.core import UserError

ONE_GPU = "a model runs on one GPU, or on the CPU, as a whole"
WITHOUT = without(Path(__file__).with_name("llama_cpp_without.json"))
KV = {"f32": "exact", "f16": "exact", "bf16": "exact", "q8_0": "fp8"}  # the others have 4 or 5 bits
ALL_LAYERS = 99  # people write 99 or more for all
DRAFTERS = "DFlash drafters, MTP heads and Gemma 4's assistants"
GGUF_HEAD = "the head in a GGUF file is not read: `--drafter` with the hub id of the original model takes its head"
VARIABLES = (
    ("LLAMA_ARG_MODEL", "--model"),
    ("LLAMA_ARG_HF_REPO", "--hf-repo"),
    ("LLAMA_ARG_HF_FILE", "--hf-file"),
    ("LLAMA_ARG_CTX_SIZE", "--ctx-size"),
    ("LLAMA_ARG_N_PARALLEL", "--parallel"),
    ("LLAMA_ARG_BATCH", "--batch-size"),
    ("LLAMA_ARG_THREADS", "--threads"),
    ("LLAMA_ARG_N_GPU_LAYERS", "--n-gpu-layers"),
    ("LLAMA_ARG_HOST", "--host"),
    ("LLAMA_ARG_PORT", "--port"),
    ("LLAMA_ARG_ALIAS", "--alias"),
    ("LLAMA_API_KEY", "--api-key"),
)


def _kv(text: str) -> Found:
    near = KV.get(text, "turboquant")
    return Found({"kv": near}, [] if text in KV else [f"--cache-type-k {text}: the nearest is --kv turboquant"])


def _values(text: str) -> Found:
    """Keys and values share one flag here, which --cache-type-k sets."""
    return Found(notes=[] if text in KV else ["--cache-type-v: keys and values have one format here, --kv"])


def _layers(text: str) -> Found:
    if text in ("auto", "all", "-1") or (text.isdecimal() and int(text) >= ALL_LAYERS):
        return Found({"device": "auto"})
    if text == "0":
        return Found({"device": "cpu"})
    return Found(notes=[f"--n-gpu-layers {text}: {ONE_GPU}"])


def _hub(text: str) -> Found:
    repo, _, quant = text.partition(":")
    note = f"--hf-repo: name the file too, as in --model {repo}:FILE.gguf (of {quant or 'Q4_K_M'})"
    return Found({"model": repo}, [note])


def _default(name: str) -> Flag:
    """A flag such as --gpt-oss-20b-default, for the published model."""
    repo = f"openai/{name}"
    return flag(f"--{name}-default", f"`--model {repo}`", lambda text: Found({"model": repo}), "", SWITCH)


def _sampling(name: str) -> Flag:
    spelled = {"temperature": "--temp --temperature", "repetition_penalty": "--repeat-penalty"}
    read = field_of(f"sampling {name}", number)
    names = spelled.get(name, f"--{name.replace('_', '-')}")
    return flag(names, f"`--sampling-defaults {name}=X`", read, "where a request names none")


def _spec_type(text: str) -> Found:
    found = Found()
    for kind in text.split(","):
        if kind == "none":
            found.values["drafter"] = "none"
        elif kind.startswith("ngram"):
            found.values["ngram"] = True
        elif "mtp" in kind:
            found.notes.append(f"--spec-type {kind}: {GGUF_HEAD}")
        elif kind != "draft-dflash":
            found.notes.append(f"--spec-type {kind}: drafts come from {DRAFTERS} and from the request's own text")
    return found


def _draft_model(text: str) -> Found:
    if text.endswith(".gguf"):
        note = f"a drafter in GGUF is not read: name one of {DRAFTERS} with --drafter, or leave it to auto"
        return Found(notes=[f"--model-draft {text}: {note}"])
    return Found({"drafter": text})


def _draft_max(text: str) -> Found:
    """A maximum there. As a fixed depth here, a drafter that makes fewer drafts would refuse it."""
    if text == "0":
        return Found({"spec": "off"})
    whole(text)
    return Found(notes=[f"--draft-max {text}: the depth is chosen every step, up to what the drafter makes"])


def _reasoning(text: str) -> Found:
    return Found({"reasoning_parser": "none" if text == "none" else "auto"})


def _cache_ram(text: str) -> Found:
    if text == "0":
        return Found({"prefix_cache": False})
    return Found(notes=["--cache-ram: prompts are kept in the KV cache itself; `--kv-tokens` sets its size"])


def _no_words(text: str) -> Found:
    raise UserError(f"'{text}' follows no flag of llama.cpp")


FLAGS = (
    same("--model -m", "model"),
    flag("--hf-repo -hf -hfr", "`--model`", _hub, "as repo:FILE.gguf; the file is not chosen for you"),
    flag("--hf-file -hff", "`--model`", field_of("hub file"), "as repo:FILE.gguf"),
    *(_default(name) for name in ("gpt-oss-20b", "gpt-oss-120b")),
    same("--alias -a", "served_name"),
    same("--host", "host"),
    same("--port", "port", whole, "our default is 8000"),
    flag("--api-key", "`--api-key`", first_key, "one key; better as SPARKDRAFT_API_KEY"),
    flag(
        "--ctx-size -c",
        "`--kv-tokens`, `--max-model-len`",
        field_of("context", whole),
        "shared by the slots there: each gets a part",
    ),
    same("--kv-unified-per-slot", "max_model_len", whole),
    same("--parallel -np", "max_seqs", whole),
    same("--batch-size -b", "max_step_tokens", whole),
    same("--threads -t", "threads", whole),
    flag("--n-gpu-layers --gpu-layers -ngl", "`--device`", _layers, f"all or none: {ONE_GPU}"),
    flag("--cache-type-k -ctk", "`--kv`", _kv, "q8_0 is fp8; fewer bits are turboquant"),
    flag("--cache-type-v -ctv", "`--kv`", _values, "keys and values have one format"),
    same("--cache-prompt", "prefix_cache", is_on, "", SWITCH),
    flag(
        "--cache-ram -cram", "`--prefix-cache`", _cache_ram, "0 turns it off; prompts are kept in the KV cache itself"
    ),
    flag("--spec-draft-model --model-draft -md", "`--drafter`", _draft_model, f"of {DRAFTERS}; not a GGUF file"),
    flag("--spec-draft-hf --hf-repo-draft -hfd -hfrd", "`--drafter`", _draft_model, "a hub id"),
    flag(
        "--spec-draft-n-max --draft-max --draft --draft-n",
        "`--spec off` for 0",
        _draft_max,
        "a maximum; the depth is chosen every step, up to what the drafter makes",
    ),
    flag("--spec-type", "`--drafter`, `--ngram`", _spec_type, f"draft-dflash and ngram-*; of MTP, {GGUF_HEAD}"),
    flag("--reasoning-format", "`--reasoning-parser`", _reasoning, "none, or by the model"),
    *(_sampling(name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
    flag("--cont-batching -cb -nocb --jinja --metrics --warmup", "always on", always, "", SWITCH),
    flag("--ui --webui", "always on", always, "a chat page at /", SWITCH),
    flag("--kv-unified -kvu -no-kvu", "always on", always, "", SWITCH),
    flag("--flash-attn -fa", "always on", always),
    flag("--no-mmproj", "always so", always, "messages are text here", SWITCH),
    *WITHOUT,
)
LLAMA_CPP = Server("llama.cpp", FLAGS, _no_words, "LLAMA_", VARIABLES, "127.0.0.1")
