"""The canary: small requests with known answers, which show whether a server's text can be trusted. No torch.

probes.py asks a backend (sparkdraft/backend.py); run.py runs the probes before a server takes its first request, and
for `sparkdraft check`. remote.py asks any OpenAI-compatible server over HTTP.
"""
