"""The canary: small requests with known answers, which show whether a server's text can still be trusted.

probes.py, needle.py and tool_call.py ask a backend (sparkdraft/backend.py) and run.py runs them all: before a server
takes its first request, and by `sparkdraft check`. remote.py asks any OpenAI-compatible server over HTTP. No torch.
"""
