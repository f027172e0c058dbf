"""The models of vectors and scores that a server has, by the names that clients know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from deltic.encoders.encoder import Encoder, sound
from deltic.encoders.items import Item, Vectors
from deltic.errors import show
from deltic.server.body import Intake
from deltic.server.http import Problem, ProblemError, while_connected


@dataclass(frozen=True, slots=True)
class EmbeddingService:
    """An encoder and what clients call it."""

    name: str
    encoder: Encoder
    created: int = field(default_factory=lambda: int(time.time()))

    async def run(self, request: Request, items: Sequence[Item]) -> list[Vectors]:
        """What the model gives for the items, unless the client goes away meanwhile; then no more of them are run."""
        job = await asyncio.to_thread(self.encoder.submit, items)
        try:
            return sound(await while_connected(request.receive, _done(asyncio.wrap_future(job.future))))
        finally:
            job.future.cancel()


async def _done(future: asyncio.Future[list[Vectors]]) -> list[Vectors]:
    return await future


@dataclass(frozen=True, slots=True)
class Services:
    """intake: reads bodies within the server's limits."""

    services: tuple[EmbeddingService, ...]
    intake: Intake

    def find(self, model: str | None) -> EmbeddingService:
        """The one that is meant, the first without a name or by `default`; a problem with status 404 if none is."""
        if model in (None, "default"):
            return self.services[0]
        for service in self.services:
            if model in (service.name, service.encoder.name):
                return service
        names = ", ".join(repr(service.name) for service in self.services)
        raise ProblemError(Problem(404, f"the model {show(model)} does not exist, or gives no vectors: this server has "
                                        f"{names}", "model", "model_not_found"))
