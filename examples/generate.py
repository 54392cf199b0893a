"""A batch of prompts: they are run together, and each writes what it would write alone."""

from sparkdraft import LLM, SamplingParams

llm = LLM("smollm2")
prompts = ["The sea is", "The three primary colours are", "def fibonacci(n):"]
for prompt, result in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=24)), strict=True):
    print(prompt + result.text, end="\n\n")
