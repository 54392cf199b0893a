"""The routes, one file per API. A route checks what can be known at once; a `Reply` (stream.py) does the rest while the
answer is sent."""

from sparkdraft.server.routes import about, anthropic, ollama, openai, responses

ROUTERS = (openai.router, responses.router, ollama.router, anthropic.router, about.router)
