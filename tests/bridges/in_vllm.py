"""Runs in an environment with vLLM, as a program: greedy texts of one model, decoded plainly, drafted, and drafted with
our scheduler; one line of JSON at the end. It imports nothing of the tests.

    python in_vllm.py MODEL DRAFTER DEPTH TOKENS PROMPTS.json

PROMPTS.json is a list of lists of ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this process: half the time to start
SCHEDULER = "sparkdraft.bridges.vllm.plugin.scheduler.DepthScheduler"


def texts(model: str, prompts: list[list[int]], tokens: int, **options: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,  # a share of the memory would have to hold the weights too
        disable_log_stats=False,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    counts = {
        metric.name.removeprefix("vllm:spec_decode_num_"): getattr(metric, "value", None)
        or getattr(metric, "values", 0)
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    ids = [list(answer.outputs[0].token_ids) for answer in answers]
    llm.llm_engine.engine_core.shutdown()
    return {"ids": ids, **counts}


def main() -> None:
    model, drafter, depth, tokens, file = sys.argv[1:]
    prompts = json.loads(Path(file).read_text(encoding="utf-8"))
    drafting = {"speculative_config": {"method": "dflash", "model": drafter, "num_speculative_tokens": int(depth)}}
    found: dict[str, Any] = {
        "plain": texts(model, prompts, int(tokens)),
        "drafted": texts(model, prompts, int(tokens), **drafting),
        "chosen": texts(model, prompts, int(tokens), scheduler_cls=SCHEDULER, **drafting),
    }
    from sparkdraft.bridges.vllm.plugin import states

    print(json.dumps(found | {"patches": states()}))


if __name__ == "__main__":
    main()
