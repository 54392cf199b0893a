"""The official OpenAI client. Start `sparkdraft serve` first; the address may be given as an argument."""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
messages = [{"role": "user", "content": "Name the planets of the solar system."}]
for chunk in client.chat.completions.create(model="smollm2", messages=messages, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
