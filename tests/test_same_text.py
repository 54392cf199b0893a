"""Recorded runs, to the bit: a change of structure must not change one id, nor one bit of a log-probability.

Each case is a short run of an engine: plain, drafted, sampled, batched, preempted, with a TurboQuant cache. Bits depend
on the processor (its vector width, its fused operations), so there is a record per processor, and elsewhere the test is
skipped. After a change that is meant to change bits, `python -m tests.test_same_text` makes this processor's record
anew; delete the changed cases from the others.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.llm import Completion
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.models.tiny import write_tiny

RECORD = Path(__file__).parent / "same_text.json"
PROMPTS = ["The capital of France is", "def fibonacci(n):", '{"name": "Ada", "age":', "Once upon a time", "1, 1, 2, 3,"]
IDS = [list(range(5, 45)), list(range(60, 75)), [7, 8, 9] * 9]
Run = dict[str, Any]


def written(completion: Completion) -> Run:
    """Ids, and the log-probability of each, in hexadecimal: every bit counts."""
    return {"ids": completion.ids, "logprobs": [row.logprob.hex() for row in completion.logprobs or ()]}


def runs(llm: LLM, prompts: list[Any], **params: Any) -> list[Run]:
    settings = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "logprobs": 0, **params})
    return [written(result.completions[0]) for result in llm.generate(prompts, settings)]


def tiny(folder: Path, variant: str, **options: Any) -> LLM:
    target = write_tiny(folder / variant, variant)
    return LLM(str(target), dtype="float32", threads=1, ngram=False, **options)


def tiny_plain(folder: Path) -> dict[str, list[Run]]:
    return {variant: runs(tiny(folder, variant), IDS) for variant in ("llama", "llama-yarn", "qwen3")}


def tiny_drafted(folder: Path) -> dict[str, list[Run]]:
    drafter = write_drafter(folder / "drafter", zlab(body("sf", window=6)), random_tensors(body("sf", window=6)))
    llm = tiny(folder, "qwen3", drafter=str(drafter))
    greedy = runs(llm, IDS, num_draft=5)
    return {"greedy": greedy, "sampled": runs(llm, IDS, num_draft=3, temperature=0.9, top_p=0.9, seed=4)}


def tiny_coded(folder: Path) -> dict[str, list[Run]]:
    modes = ("hybrid", "full_tq")
    return {mode: runs(tiny(folder / mode, "qwen3", kv="turboquant", tq_mode=mode), IDS) for mode in modes}


def embedded(_: Path) -> dict[str, list[Run]]:
    llm = LLM("smollm2", device="cpu")
    return {
        "plain": runs(llm, PROMPTS[:2], num_draft=0),
        "drafted": runs(llm, PROMPTS[:2], num_draft=3),
        "sampled": runs(llm, PROMPTS[:3], num_draft=7, temperature=0.7, top_k=40, seed=9),
        "batched": runs(llm, PROMPTS, num_draft=1, max_tokens=12),
    }


def preempted(folder: Path) -> dict[str, list[Run]]:
    """Five requests of 40 ids or more, and room for about two."""
    llm = tiny(folder, "llama", kv_tokens=128, max_model_len=96)
    found = runs(llm, [[*range(3 + n, 43 + n)] for n in range(5)], max_tokens=40)
    assert llm.engine.scheduler.num_preempted > 0
    return {"preempted": found}


CASES: dict[str, Callable[[Path], dict[str, list[Run]]]] = {
    case.__name__: case for case in (tiny_plain, tiny_drafted, tiny_coded, embedded, preempted)
}


def processor() -> str:
    """What bits depend on: on x86 also the model, by which libraries choose their kernels."""
    name = f"{platform.system()} {platform.machine()}"
    if platform.machine() != "x86_64":
        return name
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.split("\t")[0] == "model"), "")
    return f"{name} model {model} {torch.backends.cpu.get_cpu_capability()}"


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_as_it_was_recorded(case: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text()).get(processor(), {})
    if case not in recorded:
        pytest.skip(f"not recorded on {processor()}")
    assert CASES[case](tmp_path) == recorded[case]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: case(Path(scratch) / name) for name, case in CASES.items()}
    RECORD.write_text(json.dumps(json.loads(RECORD.read_text()) | {processor(): found}) + "\n")


if __name__ == "__main__":
    main()
