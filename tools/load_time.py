"""Times how long a published checkpoint takes to load, from a disk whose files the system still holds in memory.

A checkpoint of Qwen3-8B's shape is written with random numbers, a file per layer, as compressed-tensors would write it.
Then two processes of their own load it; where kernels have not been compiled yet, the first compiles them. Each says
what it took to read and place the weights, what to warm up, and what memory is taken beside the plan once prompts have
filled a step. It ends in a line of JSON.

    PYTHONPATH=. python tools/load_time.py                            INT4: 6 GB of files
    PYTHONPATH=. python tools/load_time.py --format bf16              16 GB of files
    PYTHONPATH=. python tools/load_time.py --layers 2 --device cpu    whether the script itself works
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTER, HEADS, KV_HEADS, DIM, VOCABULARY, GROUP = 4096, 12288, 32, 8, 128, 151936, 128
PROJECTIONS = {
    **{
        f"self_attn.{name}_proj": (count * DIM, HIDDEN)
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    },
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    **{f"mlp.{name}_proj": (INTER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INTER),
}
NORMS = {
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
    "self_attn.q_norm": DIM,
    "self_attn.k_norm": DIM,
}
STATED: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
}
STREAMS, ROWS = 16, 600  # of the prompts that fill the memory after loading: more than a step takes
FORMATS = {"int4": "pack-quantized", "fp8": "float-quantized"}


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)


def projection(form: str, name: str, out: int, in_: int) -> dict[str, Tensor]:
    """Tensors of one matrix, whose numbers have a deviation of 0.02."""
    if form == "int4":
        codes = torch.randint(-(2**31), 2**31, (out, in_ // 8), dtype=torch.int32)
        scale = torch.full((out, in_ // GROUP), 0.02 / 4.6, dtype=torch.bfloat16)
        shape = torch.tensor([out, in_])
        return {f"{name}.weight_packed": codes, f"{name}.weight_scale": scale, f"{name}.weight_shape": shape}
    if form == "fp8":
        scale = torch.full((out, 1), 0.02, dtype=torch.bfloat16)
        return {f"{name}.weight": normal(out, in_).mul_(50).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}
    return {f"{name}.weight": normal(out, in_)}


def write(folder: Path, form: str, layers: int) -> int:
    """Every layer has the same numbers. Returns the files' bytes."""
    from tests.models.tiny import byte_tokenizer

    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": layers, "head_dim": DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": 2,
    }  # fmt: skip
    if form in STATED:
        groups = {"group_0": {"targets": ["Linear"], "weights": STATED[form]}}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": FORMATS[form], "ignore": ["lm_head"],
            "config_groups": groups,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    one: dict[str, Tensor] = {f"{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in NORMS.items()}
    for name, size in PROJECTIONS.items():
        one |= projection(form, name, *size)
    ends = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "lm_head.weight": normal(VOCABULARY, HIDDEN)}
    ends["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    parts = [{f"model.layers.{n}.{name}": tensor for name, tensor in one.items()} for n in range(layers)] + [ends]
    places = {}
    for number, tensors in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, str(folder / file), {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def load(folder: str, device: str) -> dict[str, object]:
    """In a process of its own."""
    from sparkdraft import LLM, SamplingParams
    from sparkdraft.engine.engine import Engine

    warm_up, spent = Engine.warm_up, [0.0]

    def timed(self: Engine) -> None:
        begin = time.perf_counter()
        warm_up(self)
        spent[0] = time.perf_counter() - begin

    Engine.warm_up = timed  # type: ignore[method-assign]
    if device == "cuda":
        torch.cuda.init()  # the driver's own start is not a model's
    begin = time.perf_counter()
    llm = LLM(folder, device=device, max_seqs=STREAMS, max_model_len=4096, kv_tokens=16384)
    total, memory = time.perf_counter() - begin, llm.engine.plan.memory
    llm.generate([[3] * ROWS] * STREAMS, SamplingParams(4, ignore_eos=True))  # a step of as many rows as are planned
    found: dict[str, object] = {"load_s": round(total - spent[0], 2), "warm_up_s": round(spent[0], 2)}
    if device == "cuda":
        taken = torch.cuda.max_memory_reserved()
        found |= {"planned_gib": round(memory.total / 2**30, 2), "taken_gib": round(taken / 2**30, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--format", default="int4", choices=("bf16", *STATED))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load", default="", help=argparse.SUPPRESS)  # what the processes are told
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load(arguments.load, arguments.device)))
        return
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        size = write(Path(folder), arguments.format, arguments.layers)
        print(f"{size / 1e9:.2f} GB written in {time.perf_counter() - begin:.1f} s", flush=True)
        found = []
        for _ in range(2):
            command = [sys.executable, __file__, "--load", folder, "--device", arguments.device]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found.append(json.loads(said.splitlines()[-1]))
            print(found[-1], flush=True)
    print(
        json.dumps({"format": arguments.format, "layers": arguments.layers, "gb": round(size / 1e9, 2), "loads": found})
    )


if __name__ == "__main__":
    main()
