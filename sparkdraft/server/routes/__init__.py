"""The routes, one small file per group."""

from sparkdraft.server.routes import chat, completions, health, models, page, tokens

ROUTERS = [module.router for module in (chat, completions, models, health, tokens, page)]
