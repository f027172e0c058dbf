"""Requests that no endpoint sees: of hosts that are not meant, and of web pages that are not allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from ipaddress import ip_address

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deltic.errors import show
from deltic.server.anthropic import formatting as anthropic
from deltic.server.http import Problem
from deltic.server.ollama import formatting as ollama
from deltic.server.openai import formatting as openai

LOCAL_NAMES = ("localhost", "*.localhost", "*.docker.internal", "*.containers.internal", "*.lima.internal")
"""What a machine calls itself, and what containers on it call it."""


class HostCheck:
    """Refuses requests whose Host is not allowed, and those of web pages from elsewhere."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        """hosts: names; `*.name` has all below a name, `*` is everything. Addresses are always allowed: a page from
        elsewhere whose name is made to lead here (DNS rebinding) sends its name. origins: of web pages besides the
        server's own; `*` is everything."""
        self._app, self._hosts = app, tuple(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope["headers"]) if scope["type"] == "http" else None
        if problem:
            await refusal(scope, problem, {"connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: Iterable[tuple[bytes, bytes]]) -> Problem | None:
        sent: dict[bytes, list[str]] = {}
        for name, value in headers:
            sent.setdefault(name, []).append(value.decode("latin-1").strip())
        hosts = sent.get(b"host", [])
        for host in hosts:
            if not self._allows(_name_of(host)):
                return Problem(403, f"the host {show(_name_of(host))} is not allowed: ask by address, or start the "
                                    "server with --allowed-host", code="host_not_allowed")
        if sent.get(b"sec-fetch-site") == ["same-origin"]:  # of a browser; a proxy on the way may have its own Host
            return None
        for origin in sent.get(b"origin", ()):
            if not self._allows_page(origin, hosts):
                return Problem(403, f"a web page of the origin {show(origin)} may not use this server: start it with "
                                    "--cors-origin and the origin", code="origin_not_allowed")
        return None

    def _allows(self, host: str) -> bool:
        if any(name == "*" or host == name or (name.startswith("*.") and host.endswith(name[1:]))
               for name in self._hosts):
            return True
        try:
            return bool(ip_address(host))
        except ValueError:
            return False

    def _allows_page(self, origin: str, hosts: Sequence[str]) -> bool:
        own = origin.lower().partition("://")[2] in [host.lower() for host in hosts]
        return own or not self._origins.isdisjoint(("*", origin))


def refusal(scope: Scope, problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """A problem in the form of the clients that use this path. The log has it, too."""
    record = scope["state"]["record"]
    record.problem = {"param": problem.param, "code": problem.code}
    response: Response
    # some servers have OpenAI's API below /api/v1, which their clients put there
    if scope["path"].startswith(ollama.PATH) and not scope["path"].startswith("/api/v1/"):
        response = ollama.error_response(problem)
        response.headers.update(headers or {})
        return response
    if scope["path"].startswith(anthropic.PATH):
        response = anthropic.error_response(replace(problem, request_id=record.id))
        response.headers.update(headers or {})
        return response
    return openai.error_response(problem, headers)


def _name_of(host: str) -> str:
    """Without a port, and a dot at the end."""
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
