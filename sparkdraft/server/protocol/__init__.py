"""The HTTP bodies: OpenAI's requests and answers, and how they are checked. No torch, no engine."""
