"""The adapters (LoRA) of a loaded model, by name. Any thread may load and unload them while requests run."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path
from typing import Any, Final

from deltic.engine.arguments import as_adapters
from deltic.errors import ConfigError, ModelError, RequestError, show
from deltic.loader.lora import check_served, open_lora, read_adapter
from deltic.ops.adapters import Adapter
from deltic.ops.types import GdnWeights
from deltic.runner.model_runner import Model, ModelRunner

log = logging.getLogger("deltic")

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.\-/]{0,199}")


class AdapterError(RequestError):
    """An adapter is not loaded, or cannot be used."""

    def __init__(self, message: str, param: str = "lora_name") -> None:
        super().__init__(message, param)


class AdapterSet:
    """The adapters of one model. A request holds the adapter that it began with, so that unloading ends no request: an
    adapter's memory is freed after its last request."""

    def __init__(self, runtime: Model) -> None:
        self._runtime, self._limits = runtime, runtime.options.limits
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._loaded: dict[str, Adapter] = {}
        self._times: dict[str, int] = {}

    def entries(self) -> list[tuple[str, int]]:
        """Returns each adapter's name and the time at which it was loaded."""
        with self._lock:
            return [*self._times.items()]

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def find(self, name: object) -> Adapter:
        """Returns an adapter. Raises AdapterError if there is none of this name."""
        with self._lock:
            found = self._loaded.get(name) if isinstance(name, str) else None
            names = ", ".join(map(repr, self._loaded)) or "none"
        if found is None:
            raise AdapterError(f"the adapter {show(name)} is not loaded; loaded are: {names}", "lora")
        return found

    def load(self, name: str, path: str | Path, replace: bool = False) -> Adapter:
        """Loads an adapter; concurrent calls load one after the other. replace: replace an adapter that has this name.
        Raises AdapterError or ModelError with the reason why it cannot be used; then nothing has changed."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise AdapterError(f"{show(name)} is no name for an adapter: up to 200 letters, digits and ._-/ that begin "
                               "with a letter or digit")
        if why := obstacle(self._runtime):
            raise AdapterError(f"this model takes no adapters: {why}")
        runtime = self._runtime
        assert isinstance(runtime, ModelRunner)
        with self._turn:
            self._check_number(name, replace)
            began, files = time.perf_counter(), open_lora(path, runtime.config)
            check_served(files)
            self._check_room(name, files.nbytes)
            tiled = any(isinstance(layer.mixer, GdnWeights) and layer.mixer.spec.tiled
                        for layer in runtime.decoder.weights.layers)
            adapter = read_adapter(files, name, runtime.decoder.dtype, runtime.device, tiled)
            self._check_room(name, adapter.nbytes)
            runtime.prepare_adapters()
            with self._lock:
                self._loaded[name], self._times[name] = adapter, int(time.time())
        log.info("the adapter %s is loaded: rank %d, %.1f MiB, in %.2f s", name, adapter.rank,
                 adapter.nbytes / (1 << 20), time.perf_counter() - began)
        return adapter

    def unload(self, name: str) -> None:
        """Removes an adapter. Requests that use it go on. Raises AdapterError if there is none of this name."""
        self.find(name)
        with self._lock:
            self._loaded.pop(name, None)
            self._times.pop(name, None)
        log.info("the adapter %s is unloaded", name)

    def _check_number(self, name: str, replace: bool) -> None:
        with self._lock:
            known, count = name in self._loaded, len(self._loaded)
        if known and not replace:
            raise AdapterError(f"the adapter {show(name)} has already been loaded: unload it first, or replace it "
                               "(load_inplace)")
        if not known and count >= self._limits.max_adapters:
            raise AdapterError(f"{count} adapters are loaded, the most that may be (max_adapters): unload one first")

    def _check_room(self, name: str, nbytes: int) -> None:
        with self._lock:
            others = sum(adapter.nbytes for other, adapter in self._loaded.items() if other != name)
        if others + nbytes > self._limits.max_adapters_mib << 20:
            raise AdapterError(f"the adapter {show(name)} takes {nbytes / (1 << 20):,.0f} MiB, which with the "
                               f"{others / (1 << 20):,.0f} MiB of the loaded ones is more than max_adapters_mib "
                               f"({self._limits.max_adapters_mib}) allows: unload some, or raise it")


def obstacle(runtime: Model) -> str | None:
    """Returns the reason why a model's steps cannot compute adapters; None if they can."""
    if not isinstance(runtime, ModelRunner):
        return "it is compiled"
    options = runtime.options
    if runtime.decoder.others:
        return "it is split over devices, so use tp=1, or merge the adapter (deltic convert --lora)"
    if options.debug_layers:
        return "debug_layers computes layers one by one, so leave it out"
    if options.on_gpu and options.batch_invariant:
        return "torch computes some of its steps on a GPU, and its sums depend on the batch: leave out batch_invariant"
    if options.on_gpu:
        return "some of its weights lie in host memory" if runtime.experts or runtime.layers else None
    return runtime.not_adapted


def open_adapters(runtime: Model, given: Any) -> AdapterSet:
    """Loads the given adapters, and returns the set of a model's adapters. Raises ConfigError with the name of an
    adapter that cannot be loaded. given: the directories by name."""
    found = AdapterSet(runtime)
    for name, path in as_adapters(given).items():
        try:
            found.load(name, path)
        except (ModelError, RequestError) as error:
            raise ConfigError(f"lora {show(name)}: {error}", "lora") from error
    return found
