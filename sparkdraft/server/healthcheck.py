"""`python -m sparkdraft.server.healthcheck`: tells whether the server of this container would answer a request now.

It asks /health at the address that the variables and the file of `sparkdraft serve` name, so an image needs no curl. A
port that is only a flag of `serve` is not seen here: use SPARKDRAFT_PORT.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

from sparkdraft.bridges.container_env import merge_with_container
from sparkdraft.core import UserError
from sparkdraft.server.config import ServerConfig

TIMEOUT = 5.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def url_of(config: ServerConfig) -> str:
    """The address of /health, from within the machine or container."""
    host = EVERYWHERE.get(config.host, config.host)
    return f"http://[{host}]:{config.port}/health" if ":" in host else f"http://{host}:{config.port}/health"


def check(environ: Mapping[str, str]) -> str:
    """Ask /health. Returns what is wrong, or an empty text."""
    try:
        # A key that is a flag of `serve` is not seen here, so the address may seem to be open to everyone.
        url = url_of(merge_with_container({"allow_public": True}, environ.get("SPARKDRAFT_CONFIG"), environ))
    except UserError as error:
        return str(error)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}: {error.read().decode(errors='replace')[:500]}"
    except OSError as error:
        return f"{url} does not answer: {error}"


if __name__ == "__main__":
    sys.exit(check(os.environ) or 0)  # a text goes to standard error, and the status is 1
