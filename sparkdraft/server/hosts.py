"""The Host header: a server on this machine answers only under its own names.

A web page can let its own name point to 127.0.0.1 (DNS rebinding). For the browser this server is then part of that
page's site, and the page may read its answers. The browser still sends the page's name as Host, so such a name is
refused. A server that listens beyond this machine may have any name: it accepts all, unless a list is given.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from sparkdraft.server.config import ServerConfig
from sparkdraft.server.protocol.errors import ApiError


def accepted_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Accepted names beside those of this machine itself; None: every name."""
    given = frozenset(host_name(entry) for entry in config.allowed_hosts.split(",") if entry.strip())
    return None if "*" in given or not (given or config.is_local) else given


class Hosts:
    """Middleware: a request for a name that is neither this machine's own nor listed gets 403."""

    def __init__(self, app: ASGIApp, accepted: frozenset[str]) -> None:
        self.app, self.accepted = app, accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(next((value for name, value in scope["headers"] if name == b"host"), b""))
        await self.app(scope, receive, send)

    def _check(self, header: bytes) -> None:
        """A request without the header is let through: every browser sends one."""
        name = host_name(header.decode("latin-1"))
        if name and not is_this_machine(name) and name not in self.accepted:
            raise ApiError(
                403,
                f"The Host header names '{name[:100]}' and this server answers to localhost, 127.0.0.1, [::1] and the "
                "names given by --allowed-hosts; add it there, or use one of these.",
                code="host_not_allowed",
            )


def host_name(text: str) -> str:
    """'localhost' for 'LocalHost.:8000', '::1' for '[::1]:8000' and for '::1'."""
    host = text.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0].rstrip(".")


def is_this_machine(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
