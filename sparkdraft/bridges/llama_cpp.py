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
    flag_of,
    number,
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
    return Flag((f"--{name}-default",), f"`--model {repo}`", "", SWITCH, lambda text: Found({"model": repo}))


def _sampling(name: str) -> Flag:
    flag = {"temperature": "--temp", "repetition_penalty": "--repeat-penalty"}.get(name, f"--{name.replace('_', '-')}")
    names = (flag, "--temperature") if name == "temperature" else (flag,)
    ours = f"`--sampling-defaults {name}=X`"
    return Flag(names, ours, "where a request names none", read=lambda text: Found({f"sampling {name}": number(text)}))


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
    Flag(("--model", "-m"), "`--model`", "", read=field_of("model")),
    Flag(("--hf-repo", "-hf", "-hfr"), "`--model`", "as repo:FILE.gguf; the file is not chosen for you", read=_hub),
    Flag(("--hf-file", "-hff"), "`--model`", "as repo:FILE.gguf", read=field_of("hub file")),
    *(_default(name) for name in ("gpt-oss-20b", "gpt-oss-120b")),
    Flag(("--alias", "-a"), "`--served-name`", "", read=field_of("served_name")),
    Flag(("--host",), "`--host`", "", read=field_of("host")),
    Flag(("--port",), "`--port`", "our default is 8000", read=field_of("port", whole)),
    Flag(("--api-key",), "`--api-key`", "one key; better as SPARKDRAFT_API_KEY", read=first_key),
    Flag(
        ("--ctx-size", "-c"),
        "`--kv-tokens`, `--max-model-len`",
        "shared by the slots there: each gets a part",
        read=field_of("context", whole),
    ),
    Flag(("--kv-unified-per-slot",), "`--max-model-len`", "", read=field_of("max_model_len", whole)),
    Flag(("--parallel", "-np"), "`--max-seqs`", "", read=field_of("max_seqs", whole)),
    Flag(("--batch-size", "-b"), "`--max-step-tokens`", "", read=field_of("max_step_tokens", whole)),
    Flag(("--threads", "-t"), "`--threads`", "", read=field_of("threads", whole)),
    Flag(("--n-gpu-layers", "--gpu-layers", "-ngl"), "`--device`", f"all or none: {ONE_GPU}", read=_layers),
    Flag(("--cache-type-k", "-ctk"), "`--kv`", "q8_0 is fp8; fewer bits are turboquant", read=_kv),
    Flag(("--cache-type-v", "-ctv"), "`--kv`", "keys and values have one format", read=_values),
    Flag(("--cache-prompt",), "`--prefix-cache`", "", SWITCH, flag_of("prefix_cache")),
    Flag(
        ("--cache-ram", "-cram"),
        "`--prefix-cache`",
        "0 turns it off; prompts are kept in the KV cache itself",
        read=_cache_ram,
    ),
    Flag(
        ("--spec-draft-model", "--model-draft", "-md"),
        "`--drafter`",
        f"of {DRAFTERS}; not a GGUF file",
        read=_draft_model,
    ),
    Flag(("--spec-draft-hf", "--hf-repo-draft", "-hfd", "-hfrd"), "`--drafter`", "a hub id", read=_draft_model),
    Flag(
        ("--spec-draft-n-max", "--draft-max", "--draft", "--draft-n"),
        "`--spec off` for 0",
        "a maximum; the depth is chosen every step, up to what the drafter makes",
        read=_draft_max,
    ),
    Flag(("--spec-type",), "`--drafter`, `--ngram`", f"draft-dflash and ngram-*; of MTP, {GGUF_HEAD}", read=_spec_type),
    Flag(("--reasoning-format",), "`--reasoning-parser`", "none, or by the model", read=_reasoning),
    *(_sampling(name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
    Flag(("--cont-batching", "-cb", "-nocb"), "always on", "", SWITCH, always),
    Flag(("--jinja",), "always on", "", SWITCH, always),
    Flag(("--metrics",), "always on", "", SWITCH, always),
    Flag(("--warmup",), "always on", "", SWITCH, always),
    Flag(("--ui", "--webui"), "always on", "a chat page at /", SWITCH, always),
    Flag(("--kv-unified", "-kvu", "-no-kvu"), "always on", "", SWITCH, always),
    Flag(("--flash-attn", "-fa"), "always on", "", read=always),
    Flag(("--no-mmproj",), "always so", "messages are text here", SWITCH, always),
    *WITHOUT,
)
LLAMA_CPP = Server("llama.cpp", FLAGS, _no_words, "LLAMA_", VARIABLES, "127.0.0.1")
