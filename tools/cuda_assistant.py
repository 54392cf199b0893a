"""Checks a Gemma 4 assistant on a GPU, pass by pass against plain torch, and times drafting by depth.

The check runs targets of the published widths and six layers, with random weights, prompts longer than the window, in
each format of the cache that a GPU runs at these heads; it compares the logits of every pass with those of
kernels/reference on the same cache, and drafted texts with plain ones. The times are those of `bench depth` with an
acceptance that is given: tok/s by depth and streams, plain steps among them. It ends in a line of JSON.

    python tools/cuda_assistant.py                  both published shapes: 3 minutes on an H200, at most --limit seconds
    python tools/cuda_assistant.py --only 26b       one of them
    python tools/cuda_assistant.py --no-times       the check alone: half a minute
    python tools/cuda_assistant.py --dry            small shapes on a CPU: whether the script itself works
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import BorrowedLayer
from sparkdraft.cache.windows import WindowLayer
from sparkdraft.cli.main import main as sparkdraft
from sparkdraft.config import EngineConfig
from sparkdraft.core import SamplingParams
from sparkdraft.drafters.assistant import Assistant
from sparkdraft.drafters.base import Anchors, Pick, Score
from sparkdraft.engine.engine import Engine
from sparkdraft.kernels import reference
from sparkdraft.models.common.sandwich import DenseSublayer
from sparkdraft.operate.bench import shapes
from sparkdraft.operate.bench.random_model import random_engine

DRY = "--dry" in sys.argv
SHAPES = {"31b": "gemma4-31b", "26b": "gemma4-26b-a4b"}
FORMATS = ("exact", "fp8")
LAYERS, DEPTH, TOKENS = 6, 3, 8
CLOSE = 1e-3 if DRY else 0.05  # of the logits' standard deviation; bfloat16 rounds each layer's result
LENGTH = 5.3  # tokens per step with 7 drafts, each with a chance of 0.88: about what others report of the 26B


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """The published config with six layers; with --dry, narrow ones."""
    text = dict(config["text_config"])
    if text["num_hidden_layers"] > LAYERS:
        text |= {"num_hidden_layers": LAYERS, "layer_types": text["layer_types"][-LAYERS:]}
    if DRY:
        small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 256, "num_experts": 8, "sliding_window": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
        sizes = {"head_dim": 32, "global_head_dim": 64, "moe_intermediate_size": 32, "max_position_embeddings": 512}
        text |= {key: value for key, value in (small | heads | sizes).items() if key in text}
    outer = {"backbone_hidden_size": 64} if DRY and "backbone_hidden_size" in config else {}
    return {**config, **outer, "text_config": text}


def make(name: str, kv: str, spec: str) -> Engine:
    """Without recordings, so that every pass can be looked at."""
    targets, drafters = shapes.TARGET_FILES, shapes.DRAFTER_FILES
    short, drafter = f"{name}-{LAYERS}", f"{name}-assistant-{LAYERS}"
    targets[short], drafters[drafter] = cut(targets[name]), cut(drafters[f"{name}-assistant"])
    config = EngineConfig(
        model=short, kv=kv, spec=spec, graphs=False, max_seqs=4, kv_tokens=16384 if not DRY else 2048, ngram=False,
        prefix_cache=False, dtype="float32" if DRY else "auto",
    )  # fmt: skip
    return random_engine(config, shapes.drafter_shape(drafter, shapes.shape(short)))


def on_reference(drafter: Assistant) -> Assistant:
    """The same drafter on the same cache and in the same buffers, by plain torch."""

    def other(thing: Any) -> Any:
        twin = copy.copy(thing)
        twin.ops = reference
        return twin

    def reader(part: Any) -> Any:
        if isinstance(part, WindowLayer):
            return replace(part, inner=reader(part.inner))
        assert isinstance(part, BorrowedLayer), part
        return BorrowedLayer(replace(part.owner, ops=reference), reference)  # type: ignore[type-var]

    twin = other(drafter)
    twin.target = other(drafter.target)
    twin.layers = [
        replace(layer, ops=reference, attention=other(layer.attention), mlp=DenseSublayer(other(layer.mlp.mlp)))
        for layer in drafter.layers
    ]
    twin.reader = copy.copy(drafter.reader)
    twin.reader.layers = [reader(part) for part in drafter.reader.layers]
    made: Assistant = twin
    return made


class Compared:
    """Compares every pass of an engine's assistant, from now on."""

    def __init__(self, engine: Engine) -> None:
        assert engine.drafting.proposer
        drafter = engine.drafting.proposer.drafter
        assert isinstance(drafter, Assistant)
        self.drafter, self.twin, self._propose = drafter, on_reference(drafter), drafter.propose
        self.worst, self.passes, self.longest = 0.0, 0, 0
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, anchors: Anchors, depth: int, pick: Pick) -> Tensor:
        seqs = len(anchors.ids)
        self.longest = max(self.longest, int(anchors.length.max()))

        def compared(score: Score, each: int, drafted: int = 0, ids: Tensor | None = None) -> Tensor:
            state = self.drafter.joined.clone()
            wanted = partial(self.twin._score, anchors, seqs)(False).float()
            self.drafter.joined.copy_(state)
            found = score(False)
            off = (found.float() - wanted).abs().max() / wanted.std()
            self.worst, self.passes = max(self.worst, float(off)), self.passes + 1
            return pick(lambda likeliest: found.argmax(-1) if likeliest else found, each, drafted, ids)

        return self._propose(anchors, depth, compared)


def texts(engine: Engine, prompts: list[list[int]], depth: int) -> list[list[int]]:
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(max_tokens=TOKENS, num_draft=depth, ignore_eos=True), str(i))
    while engine.has_work:
        for piece in engine.step():
            found[piece.request_id] += piece.ids
    return list(found.values())


def check(name: str, kv: str) -> dict[str, Any]:
    engine = make(name, kv, str(DEPTH))
    vocab = engine.sampler.vocab_size
    lengths = (20, 100, 200) if DRY else (60, 1100, 3000)
    numbers = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocab, (length,), generator=numbers).tolist() for length in lengths]
    plain = [texts(engine, [prompt], 0)[0] for prompt in prompts]
    compared = Compared(engine)
    drafted = [texts(engine, [prompt], DEPTH)[0] for prompt in prompts]
    texts(engine, prompts, DEPTH)  # side by side
    found = {"shape": name, "kv": kv, "passes": compared.passes, "worst": round(compared.worst, 5)}
    found |= {"same_text": plain == drafted, "longest": compared.longest}
    print(found, flush=True)
    assert compared.passes > 3 * DEPTH and compared.worst < CLOSE, "the passes differ from plain torch"
    assert plain == drafted, "drafts changed a text"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SHAPES), help="shapes, a list (default all)")
    parser.add_argument("--no-times", action="store_true", help="only check")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which no timing is begun")
    parser.add_argument("--dry", action="store_true", help="small shapes on a CPU")
    args = parser.parse_args()
    begin, chosen = time.monotonic(), [SHAPES[key] for key in args.only.split(",")]
    checked = [check(name, kv) for name in chosen for kv in FORMATS]
    times = []
    for name in chosen:
        if args.no_times or args.dry or time.monotonic() - begin > args.limit:
            continue
        torch.cuda.empty_cache()
        flags = ["--shape", name, "--drafter-shape", f"{name}-assistant", "--synthetic-acceptance", str(LENGTH)]
        flags += ["--depths", "0,1,2,3,4,5,7", "--concurrency", "1,4", "--output-len", "128"]
        times.append({"shape": name, "status": sparkdraft(["bench", "depth", *flags])})
    print(json.dumps({"tool": "cuda_assistant", "checked": checked, "times": times}))


if __name__ == "__main__":
    main()
