"""An answer that must match a JSON schema. Start `sparkdraft serve` first; the address may be given as an argument."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"]}
answer = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "What is the capital of Italy?"}],
    response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    max_tokens=64,
)
print(json.loads(answer.choices[0].message.content or ""))
