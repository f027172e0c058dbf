"""Requests that no endpoint sees: of hosts that are not meant, and with two ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deltic.errors import show
from deltic.server.anthropic import shapes as anthropic
from deltic.server.http import Problem
from deltic.server.ollama import shapes as ollama
from deltic.server.openai import shapes as openai

LOCAL_NAMES = ("localhost", "*.localhost")
"""What a machine calls itself."""


class Gate:
    """Refuses requests whose Host is not allowed, and those that say in two ways where they end: a proxy before the
    server may have believed the other."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """hosts: names; `*.name` has all below a name, `*` is everything. Addresses are always allowed: a page from
        elsewhere whose name is made to lead here (DNS rebinding) sends its name."""
        self._app, self._hosts = app, tuple(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem:
            await refusal(scope, problem, {"connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        names = {name for name, _ in scope["headers"]}
        if names.issuperset({b"content-length", b"transfer-encoding"}):
            return Problem(400, "the request has both Content-Length and Transfer-Encoding: send one of them")
        if "*" in self._hosts:
            return None
        for name, value in scope["headers"]:
            if name == b"host" and not self._allows(host := _name_of(value.decode("latin-1"))):
                return Problem(403, f"the host {show(host)} is not allowed: ask by address, or start the server with "
                                    "--allowed-host", code="host_not_allowed")
        return None

    def _allows(self, host: str) -> bool:
        if any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in self._hosts):
            return True
        try:
            return bool(ip_address(host))
        except ValueError:
            return False


def refusal(scope: Scope, problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """A problem in the form of the clients that use this path. The log has it, too."""
    record = scope["state"]["record"]
    record.problem = {"param": problem.param, "code": problem.code}
    response: Response
    if scope["path"].startswith(ollama.PATH):
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
