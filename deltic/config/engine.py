"""How to run a model. The command line and its page in the docs are generated from these fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any, Final, get_type_hints

from deltic.config.limits import Limits
from deltic.config.machine import available_cores, parse_bytes
from deltic.config.speculation import parse_speculation
from deltic.errors import ConfigError, show
from deltic.params import Draft, Speculation

_RANGES: Final = {
    "threads": (1, 1024),
    "max_context": (1, 1 << 31),
    "max_batch": (1, 4096),
    "token_budget": (1, 1 << 20),
    "max_stall_ms": (1, 1 << 31),
    "draft_vocab": (0, 1 << 31),
    "max_repeat": (0, 1 << 31),
    "expert_cap": (1, 4096),
    "expert_refresh": (1, 1 << 31),
}
AUTO: Final = "auto"
"""The device that a machine has; `engine.options.settled` says which one. Until then nobody knows how many tokens a
step aims at, or whether all options suit the device."""
_ALONE: Final = 64
"""Tokens that a step aims at where each is computed by itself: as many as a long step has time for."""
_CACHED_PARAMETERS: Final = 8_000_000
_PACKED: Final = ("auto", "on", "off")
_QUANTS: Final = ("none", "q8_0", "q4_k", "fp8")
_CPU_LEVELS: Final = ("auto", "portable", "avx2", "avx512", "vnni", "bf16")
_DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES: Final = ("auto", "fp8")
_STATE_DTYPES: Final = ("float32", "bfloat16")
_PATHS: Final = ("cache_dir", "aot_dir", "mmproj", "expert_profile", "params", "tokenizer", "tokenizer_config")
"""Options that callers from Python may give as a `Path`, too."""
_DIRECTORIES: Final = ("cache_dir", "aot_dir")
_COMPUTES: Final = ("auto", "card", "host")
_KINDS: Final[Mapping[Any, str]] = {str: "text", str | None: "text or None", bool: "True or False",
                                    Limits: "Limits(...)"}
"""Types of options, and what values of them are called. Numbers have checks of their own."""


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of the engine; a value that an option cannot have raises ConfigError naming the option."""

    device: str = _option("auto", "where to run: cpu, cuda or cuda:N. auto: on an NVIDIA GPU of compute capability 8.0 "
                          "or later, if there is one")
    dtype: str = _option("auto", "dtype of weights and activations; auto: the checkpoint's", choices=_DTYPES)
    threads: int | None = _option(None, "CPU threads (default: the physical cores the container may use)")
    memory: str | None = _option(None, "memory for the cache, such as 4GiB (default: half of what is free; on a "
                                "GPU see --gpu-memory-utilization)")
    gpu_memory_utilization: float | None = _option(
        None, "share of a GPU's memory that weights, cache and what a step works in take together, such as 0.8 "
        "(default: 0.9)")
    kv_dtype: str = _option("auto", "keys and values in the cache. auto: as activations; fp8: on a GPU, in half of the "
                            "memory of bfloat16, as float8 (e4m3) numbers, which round coarsely", choices=_KV_DTYPES)
    state_dtype: str = _option("float32", "states of recurrent layers in the cache. bfloat16: in half of the memory, "
                               "rounded whenever they are written, so that answers may depend on when that is; on a "
                               "CPU torch computes these layers then, which is slower", choices=_STATE_DTYPES)
    max_context: int | None = _option(None, "longest prompt plus answer in tokens (default: the model's own)")
    max_batch: int = _option(16, "most sequences that run at the same time")
    token_budget: int = _option(None, "tokens that one step aims at; longer prompts are read in chunks (default: 512, "
                                "with --expert-memory 768, on a GPU 8192)")
    batch_invariant: bool = _option(False, "compute every token by itself, at most 16 at a time, so that on a GPU, "
                                    "too, no answer depends by a bit on what else runs, how a prompt is cut or what "
                                    "is kept: for evaluations. Prompts are read as slowly as answers are written; no "
                                    "drafts, no pictures, no vectors")
    max_stall_ms: int | None = _option(None, "milliseconds that a step with prompts takes at most while an answer "
                                             "waits for it; prompts are read in smaller chunks then and take longer "
                                             "(default: 30, or 4 times a step without prompts)")
    prefix_cache: bool = _option(True, "keep the states of prompts and answers, and resume where a prompt repeats them")
    host_memory: str | None = _option(None, "host memory for prefixes for which the device has no room, such as 16GiB; "
                                            "0: none (default: with a GPU a quarter of what is free, else none)")
    cache_dir: str | None = _option(None, "directory in which to keep conversations, so that they are known after a "
                                          "restart (default: none)")
    cache_disk_gb: float = _option(10.0, "gigabytes that --cache-dir may take")
    aot_dir: str | None = _option(None, "directory in which to keep the packed weights that --quant makes, so that the "
                                        "next start of the same model on such a machine reads them (default: none)")
    vision: bool = _option(True, "read pictures, if the model can; else its vision tower is not loaded")
    allow_image_urls: bool = _option(False, "fetch pictures that requests name by http(s) URLs, from public addresses")
    mmproj: str | None = _option(None, "the vision tower of a model that is a GGUF file: another GGUF file (default: "
                                       "the one beside it whose name has mmproj in it)")
    params: str | None = _option(None, "for a program (.pte) of ExecuTorch's own exporter: its params.json, or the "
                                       "model's config.json")
    tokenizer: str | None = _option(None, "for such a program: its tokenizer.json")
    tokenizer_config: str | None = _option(None, "for such a program: the tokenizer_config.json with the chat "
                                                 "template (default: in the folder of --tokenizer)")
    packed_weights: str = _option("auto", "keep the quantized weights of a GGUF file as they are in memory, too; auto: "
                                          "types such as Q4_K, and large files", choices=_PACKED)
    quant: str = _option("none", "quantize an unquantized model while it is loaded: to 8 bits, to about 4.8 as in "
                         "Q4_K_M files, or on a GPU to float8", choices=_QUANTS)
    expert_memory: str | None = _option(None, "memory for the experts of a mixture, such as 8GiB; the others stay in "
                                        "the model's files, and are read when a token wants them; on a GPU: memory of "
                                        "the card, the others are in that of the host. auto: what is free, less "
                                        "--expert-reserve (default: all are in memory)")
    expert_cap: int | None = _option(None, "most experts of a layer that are in memory (default: what --expert-memory "
                                     "holds)")
    expert_reserve: str = _option("1.5GiB", "what --expert-memory auto leaves free, for the cache among others")
    expert_refresh: int = _option(1, "exchange experts in memory for those that are wanted more often in every Nth "
                                  "step")
    expert_predict: bool = _option(False, "read experts ahead that the next layer's router would choose now")
    expert_compute: str = _option("auto", "on a GPU, who computes experts that are not on the card where few tokens "
                                  "want them. card: it reads them from the host's memory; host: the host's cores do; "
                                  "auto: both, each as many as it was measured to be fast; quantized ones: the card",
                                  choices=_COMPUTES)
    expert_profile: str | None = _option(None, "file that says which experts are wanted often: read at the start, if "
                                         "it is there, and written at the end")
    cpu_level: str = _option("auto", "instructions that the CPU kernels use; auto: the best that the processor has",
                             choices=_CPU_LEVELS)
    speculate: str = _option("auto", "draft tokens that the model verifies several at a time, which changes the speed "
                             "alone: mtp[:N], ngram[:N], draft:MODEL[:N], off; auto: mtp, if there is a head")
    draft_vocab: int = _option(32_000, "the draft head drafts among N likely tokens and N/8 that occurred; 0: among "
                               "all, which costs more for each draft")
    max_repeat: int = _option(0, "end an answer that goes round in circles: whose end is the same group of up to 128 "
                              "tokens N times in a row (8*N tokens for groups of fewer than 8); requests may say "
                              "otherwise (default: 0, never)")
    ops: tuple[str, ...] = _option((), "who serves an op: OP=BACKEND such as mlp=reference, or BACKEND for all")
    debug_layers: bool = _option(False, "log statistics of every layer's output in every step (slow)")
    limits: Limits = field(default_factory=Limits, metadata={"help": "what one client may ask for"})

    def __post_init__(self) -> None:
        if self.token_budget is None and self.device != AUTO:  # a GPU needs thousands to be busy
            mine = 768 if self.offloads_experts else 512  # a chunk reads all experts that are not in memory
            mine = mine if self.device == "cpu" else 8192
            object.__setattr__(self, "token_budget", _ALONE if self.batch_invariant else mine)
        for name in _PATHS:
            if isinstance(path := getattr(self, name), PurePath):
                object.__setattr__(self, name, str(path))
        self._check_types()
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} must be from {low} to {high}, not {show(value)}", name)
        if self.max_repeat == 1:
            raise ConfigError("max_repeat must be at least 2, or 0 for off: everything is there once", "max_repeat")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}", "device")
        if self.kv_dtype == "fp8" and self.device == "cpu":
            raise ConfigError("kv_dtype=fp8 is for NVIDIA GPUs: leave it out, or give device cuda", "kv_dtype")
        if self.quant == "fp8" and self.device == "cpu":
            raise ConfigError("quant=fp8 is for NVIDIA GPUs: take q8_0, which is as large and more precise, or give "
                              "device cuda", "quant")
        if self.aot_dir is not None and self.quant == "none":
            raise ConfigError("aot_dir is for the packed weights that `quant` makes: give that, or leave it out",
                              "aot_dir")
        if self.memory is not None:
            parse_bytes(self.memory, "memory")
        self._check_utilization()
        parse_speculation(self.speculate)
        if self.mmproj is not None and not self.vision:
            raise ConfigError("mmproj is the file of a vision tower: leave out `vision=False`", "mmproj")
        if self.params is None and (self.tokenizer or self.tokenizer_config):
            name = "tokenizer" if self.tokenizer else "tokenizer_config"
            raise ConfigError(f"{name} is for a program (.pte) of ExecuTorch's own exporter: give `params` too, or "
                              "leave it out", name)
        if self.tokenizer_config is not None and self.tokenizer is None:
            raise ConfigError("tokenizer_config goes with the file of a tokenizer: give `tokenizer` too",
                              "tokenizer_config")
        self._check_tiers()
        self._check_experts()
        self._check_ops()
        self._check_invariant()

    def _check_invariant(self) -> None:
        if not self.batch_invariant:
            return
        if self.speculate not in ("auto", "off"):
            raise ConfigError(f"speculate={self.speculate} is not possible with batch_invariant, as drafts are "
                              "verified several at a time: leave one of them out", "speculate")
        if self.mmproj is not None:
            raise ConfigError("mmproj is not possible with batch_invariant, which reads no pictures: leave one of them "
                              "out", "mmproj")
        if self.offloads_experts and self.device.startswith("cuda") and self.expert_compute != "card":
            raise ConfigError("batch_invariant with experts beside a GPU needs expert_compute=card: the host's cores "
                              "round differently", "expert_compute")
        object.__setattr__(self, "vision", False)

    def _check_utilization(self) -> None:
        name, share = "gpu_memory_utilization", self.gpu_memory_utilization
        if share is None:
            return
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"{name} must be a number above 0 and at most 1, not {share!r}", name)
        if self.device == "cpu":
            raise ConfigError(f"{name} is for GPUs: leave it out, or give device cuda", name)
        if self.memory is not None:
            raise ConfigError(f"{name} and memory both say how large the cache is: leave one of them out", name)
        if isinstance(self.speculation, Draft):
            raise ConfigError(f"{name} is not possible with a draft model: say how large both caches are (memory)",
                              name)

    def _check_tiers(self) -> None:
        _ = self.host_memory_bytes
        size = self.cache_disk_gb
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size <= 1e6:
            raise ConfigError(f"cache_disk_gb must be a number above 0 and at most 1,000,000, not {size!r}",
                              "cache_disk_gb")
        if self.cache_dir is not None and not self.prefix_cache:
            raise ConfigError("cache_dir needs the prefix cache: leave out `prefix_cache=False`", "cache_dir")
        if self.cache_dir is None and self._differs("cache_disk_gb"):
            raise ConfigError("cache_disk_gb is what `cache_dir` may take: give that, or leave it out",
                              "cache_disk_gb")

    def _check_experts(self) -> None:
        if self.expert_memory not in (None, "auto"):
            parse_bytes(str(self.expert_memory), "expert_memory")
        parse_bytes(self.expert_reserve, "expert_reserve")
        for name in ("expert_predict", "expert_profile", "expert_refresh"):
            if self._differs(name) and not self.offloads_experts:
                raise ConfigError(f"{name} is for experts that are not all in memory: give `expert_memory`, or leave "
                                  "it out", name)
        if self.expert_memory != "auto" and self._differs("expert_reserve"):
            raise ConfigError("expert_reserve is what `expert_memory='auto'` leaves free: give that, or leave it out",
                              "expert_reserve")
        if self.expert_compute != "auto" and (self.device == "cpu" or not self.offloads_experts):
            raise ConfigError(f"expert_compute={self.expert_compute} is for experts that are not all on a GPU: leave "
                              "it out, or give `device='cuda'` and `expert_memory`", "expert_compute")
        if self.expert_predict and self.device.startswith("cuda"):
            raise ConfigError(f"expert_predict is for device cpu, not {self.device}; leave it out", "expert_predict")
        if self.offloads_experts and self.quant != "none" and self.device == "cpu":
            raise ConfigError(f"quant={self.quant} is not possible with expert_memory: experts are used as they lie in "
                              "the model's files; write a quantized file once (deltic convert), and run that", "quant")

    def _check_types(self) -> None:
        for name in _PATHS:
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty: name a file or directory, or leave it out", name)
        for name in _DIRECTORIES:
            path = Path(getattr(self, name) or ".").expanduser()
            found = next((place for place in (path, *path.parents) if place.exists()), path)
            if found.exists() and not found.is_dir():
                raise ConfigError(f"{name} {str(path)!r} cannot be used: {found} is a file; name a directory", name)
        for name in _RANGES:
            value = getattr(self, name)
            optional = name in ("threads", "max_context", "max_stall_ms", "expert_cap") or (
                name == "token_budget" and self.device == AUTO)
            if type(value) is not int and not (optional and value is None):
                raise ConfigError(f"{name} must be an integer, not {show(value)}", name)
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata.get("choices")
            if choices and not (isinstance(value, str) and value in choices):
                raise ConfigError(f"{option.name} must be one of {', '.join(choices)}, not {show(value)}", option.name)
        for name, kind in get_type_hints(type(self)).items():
            if kind in _KINDS and not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be {_KINDS[kind]}, not {show(getattr(self, name))}", name)

    def _check_ops(self) -> None:
        if not isinstance(self.ops, list | tuple) or not all(isinstance(item, str) for item in self.ops):
            raise ConfigError(f"ops must be a list of name=backend, not {show(self.ops)}", "ops")
        object.__setattr__(self, "ops", tuple(self.ops))
        for item in self.ops:
            if not re.fullmatch(r"([a-z_]+=)?[a-z_0-9]+", item):
                raise ConfigError("ops takes OP=BACKEND, such as attention_mixer=reference, or a BACKEND for all, "
                                  f"not {item!r}", "ops")
        names = [item.rpartition("=")[0] for item in self.ops]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"ops names {', '.join(sorted(twice))} twice; give one backend", "ops")

    def _differs(self, name: str) -> bool:
        """Whether an option is another than where nobody gives it."""
        return bool(getattr(self, name) != option_defaults()[name])

    @property
    def memory_bytes(self) -> int | None:
        """The cache budget in bytes, `None` when it is to be chosen."""
        return None if self.memory is None else parse_bytes(self.memory, "memory")

    @property
    def host_memory_bytes(self) -> int | None:
        """The budget of the tier in host memory in bytes, 0 for none, `None` when it is to be chosen."""
        if self.host_memory is None:
            return None
        return 0 if str(self.host_memory).strip() == "0" else parse_bytes(self.host_memory, "host_memory")

    @property
    def offloads_experts(self) -> bool:
        """Whether experts may stay in the model's files."""
        return self.expert_memory is not None or self.expert_cap is not None

    @property
    def expert_bytes(self) -> int | None:
        """The budget of experts in bytes, `None` where there is none or it is to be chosen."""
        return None if self.expert_memory in (None, "auto") else parse_bytes(str(self.expert_memory), "expert_memory")

    @property
    def speculation(self) -> Speculation:
        """What `speculate` says."""
        return None if self.batch_invariant else parse_speculation(self.speculate)

    def threads_for(self, parameters: int) -> int:
        """`threads`, or else the physical cores that this process may use; for a model of so few parameters that
        they stay in a core's cache, one: more would only wait for each other."""
        return self.threads or (1 if parameters < _CACHED_PARAMETERS else available_cores())


def option_defaults() -> dict[str, Any]:
    """What the options are where nobody gives them; those that are made for each model anew are left out."""
    return {option.name: option.default for option in fields(EngineConfig) if option.default is not MISSING}
