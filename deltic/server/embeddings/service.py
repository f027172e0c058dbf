"""The models of vectors and scores that a server has, by the names that clients know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request

from deltic.embeddings.batcher import EncodeJob
from deltic.embeddings.encoder import Encoder, sound
from deltic.embeddings.types import Item, Vectors
from deltic.errors import BusyError, UnavailableError, show
from deltic.server.body import BodyReader
from deltic.server.http import Problem, ProblemError, while_connected
from deltic.server.metrics import samples
from deltic.server.records import record_of, salt_of

ENDING = "the server is shutting down"
_LOOK = 0.02


@dataclass(frozen=True, slots=True)
class EmbeddingService:
    """An encoder and what clients call it."""

    name: str
    encoder: Encoder
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self) -> dict[str, object]:
        """As /v1/models lists it."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "deltic",
                "max_model_len": self.encoder.max_length}


@dataclass(slots=True)
class Services:
    """intake: reads bodies within the server's limits. draining: no more requests are taken."""

    services: tuple[EmbeddingService, ...]
    intake: BodyReader
    draining: bool = False
    _jobs: set[EncodeJob] = field(default_factory=set)
    _running: int = 0

    def __iter__(self) -> Iterator[EmbeddingService]:
        return iter(self.services)

    def find(self, model: str | None) -> EmbeddingService:
        """The one that is meant, the first without a name or by `default`; a problem with status 404 if none is."""
        found = self.services[0] if model in (None, "default") else self.named(model)
        if found is not None:
            return found
        names = ", ".join(repr(service.name) for service in self.services)
        raise ProblemError(Problem(404, f"the model {show(model)} does not exist, or gives no vectors: this server has "
                                        f"{names}", "model", "model_not_found"))

    def named(self, model: str | None) -> EmbeddingService | None:
        """The one of this name."""
        names = (model, (model or "").removesuffix(":latest"))  # as Ollama's clients write it
        return next((service for name in names for service in self.services
                     if name in (service.name, service.encoder.name)), None)

    async def run(self, service: EmbeddingService, request: Request, items: Sequence[Item], salt: str
                  ) -> list[Vectors]:
        """What the model gives for the items, unless the client goes away meanwhile; then no more of them are run.
        salt: of the request's body."""
        if self.draining:
            raise BusyError(f"{ENDING}: try again later, or elsewhere")
        job, self._running = None, self._running + 1
        try:
            record = record_of(request)
            salt = salt_of(record.prefix_owner, salt)
            job = await record.work(lambda: service.encoder.submit(
                [replace(item, cache_salt=salt) for item in items] if salt else items, client=record.client_id))
            self._jobs.add(job)
            return sound(await while_connected(request.receive, _done(asyncio.wrap_future(job.future))))
        finally:
            self._running -= 1
            if job is not None:
                self._jobs.discard(job)
                job.future.cancel()

    async def drain(self, grace: float) -> None:
        """Take no more requests, give the running ones `grace` seconds, then end them."""
        self.draining, end = True, time.monotonic() + grace
        while self._running and time.monotonic() < end:
            await asyncio.sleep(_LOOK)
        await self.stop()

    async def stop(self) -> None:
        """End them now."""
        self.draining = True
        for job in tuple(self._jobs):
            job.fail(UnavailableError(ENDING))

    def waiting(self) -> int:
        """Tokens that are not done."""
        return sum(service.encoder.batcher.waiting for service in self.services)

    def metrics(self) -> str:
        """A page of /metrics; empty without models."""
        counts = [(service.name, service.encoder.batcher) for service in self.services]
        return samples({
            "texts_total": ("counter", "Texts that were run.", [(name, each.texts) for name, each in counts]),
            "text_tokens_total": ("counter", "Their tokens.", [(name, each.tokens) for name, each in counts]),
            "text_batches_total": ("counter", "Batches that they came in.",
                                   [(name, each.batches) for name, each in counts]),
            "text_requests_displaced_total": ("counter", "Requests that gave their places to those of clients with "
                                              "fewer tokens.", [(name, each.displaced) for name, each in counts]),
            "text_tokens_waiting": ("gauge", "Tokens of texts that are not done.",
                                    [(name, each.waiting) for name, each in counts])}) if counts else ""


async def _done(future: asyncio.Future[list[Vectors]]) -> list[Vectors]:
    return await future
