"""Text as it is written. A step that verified drafts brings several tokens at once."""

from sparkdraft import LLM, SamplingParams

llm = LLM("smollm2")
ids = llm.chat_ids([{"role": "user", "content": "Write the numbers from 1 to 12 as a JSON list."}])
for piece in llm.stream(ids, SamplingParams(max_tokens=48)):
    print(f"{piece.text}[{len(piece.ids)}]", end="", flush=True)
print()
