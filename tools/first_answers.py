"""How near the default CPU path is to float32: answers of the embedded model to 100 plain questions (questions.txt).

    python tools/first_answers.py                   about three minutes on two quiet cores

float32 activations over the same file are the reference: it answers each question greedily. The default path then
answers by itself (how many of the first 16 tokens agree?) and reads the reference's answers (perplexity, the KL
divergence of its predictions, how often the likeliest token is the same). Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import takewhile
from pathlib import Path

import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.operate.bench.formats import Comparison, Reading

QUESTIONS = Path(__file__).with_name("questions.txt")
FIRST = 16


def answers(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, num_draft=0)
    return [result.completions[0].ids for result in llm.generate(prompts, params)]


def common(a: list[int], b: list[int]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def perplexity(readings: dict[str, Reading], lengths: dict[str, int]) -> float:
    """Over the answers alone, the last 'lengths' tokens of each text."""
    return math.exp(-torch.cat([each.logprobs[-lengths[name] :] for name, each in readings.items()]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=100, help="how many (default: all 100)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer (default 48)")
    args = parser.parse_args()
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()[: args.questions]

    exact = LLM("smollm2", device="cpu", dtype="float32", spec="off", max_seqs=8)
    prompts = [exact.chat_ids([{"role": "user", "content": question}]) for question in questions]
    reference = answers(exact, prompts, args.max_tokens)
    texts = {q: prompt + answer for q, prompt, answer in zip(questions, prompts, reference, strict=True)}
    lengths = {q: len(answer) for q, answer in zip(questions, reference, strict=True)}
    comparison = Comparison(texts)
    base = comparison.read(exact, lambda done, total: None)
    first = exact.tokenizer.decode(reference[0])
    del exact

    default = LLM("smollm2", device="cpu", spec="off", max_seqs=8)
    own = answers(default, prompts, FIRST)
    read = comparison.read(default, lambda done, total: None)
    agreed = [(common(a, b[:FIRST]), len(b[:FIRST])) for a, b in zip(own, reference, strict=True)]
    kl = torch.cat([reading.kl[-lengths[name] :] for name, reading in read.items()])
    found = {
        "questions": len(questions),
        "first_token_equal": sum(n > 0 for n, _ in agreed),
        "first_16_equal": sum(n == most for n, most in agreed),
        "mean_common_prefix": round(sum(n / most for n, most in agreed) / len(agreed), 3),
        "perplexity_float32": round(perplexity(base, lengths), 4),
        "perplexity_default": round(perplexity(read, lengths), 4),
        "mean_kl": round(float(kl.mean()), 6),
    }
    print(
        f"{questions[0]}\n  float32: {first.strip()[:70]}\n  default: {default.tokenizer.decode(own[0]).strip()[:70]}"
    )
    for name, value in found.items():
        print(f"{name.replace('_', ' '):22} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
