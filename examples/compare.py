"""Drafting changes the speed of a text, never the text."""

from sparkdraft import LLM, SamplingParams

llm = LLM("smollm2")
ids = llm.chat_ids([{"role": "user", "content": "Write a Python function that reverses a list."}])
plain, drafted = (llm.generate([ids], SamplingParams(max_tokens=64, num_draft=n))[0].completions[0] for n in (0, 7))
assert plain.ids == drafted.ids
steps = drafted.speculation["num_spec_steps"] if drafted.speculation else 0
print(f"{drafted.text}\n\nthe same {len(plain.ids)} tokens both ways; {steps} steps drafted")
