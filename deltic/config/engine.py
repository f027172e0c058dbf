"""Defines the options of the engine. The command line and docs/cli.md are generated from these fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Final, get_type_hints

from deltic.config.limits import Limits
from deltic.config.machine import available_cores, parse_bytes
from deltic.config.rope import parse_scaling
from deltic.errors import ConfigError, show
from deltic.params import MAX_DRAFTS, Auto, Draft, Head, Mtp, Ngram, Speculation

AUTO: Final = "auto"
"""Device that `engine.arguments.settled` detects. Until then token_budget and device rules are open."""
_ON_GPU: Final = {AUTO: None, "cpu": False, "mlx": False, "cuda": True}
CPU_LEVELS: Final = ("auto", "portable", "avx2", "avx512", "vnni", "bf16", "amx", "dotprod", "i8mm")
_CPU_BUDGET: Final = 512
_OFFLOAD_BUDGET: Final = 768
"""Larger than _CPU_BUDGET, because each chunk of a prompt reads all offloaded experts."""
GPU_TOKEN_BUDGET: Final = 8192
_INVARIANT_BUDGET: Final = 64
_CACHED_PARAMETERS: Final = 8_000_000
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
_MAX_SPLIT_ROWS: Final = 1024
"""Maximum number of rows in a step over several GPUs."""
_OPTIONAL: Final = ("threads", "max_context", "max_stall_ms", "expert_cap")
_PATHS: Final = ("cache_dir", "aot_dir", "mmproj", "expert_profile", "params", "tokenizer", "tokenizer_config")
"""Options that also accept a `Path`."""
_DIRECTORIES: Final = ("cache_dir", "aot_dir")
_TYPE_NAMES: Final[Mapping[Any, str]] = {
    str: "text", str | None: "text or None", bool: "True or False", Limits: "Limits(...)"}
"""Names of types in messages. Numbers are checked with _RANGES instead."""
_SPECULATION_FORMS: Final = "auto, off, mtp[:N], ngram[:N], draft:MODEL[:N] or head[:N]"

Rules = Iterator[tuple[bool, str, str]]
"""Rules for options that exclude or require each other, as (violated, option, message)."""


def _option(section: str, default: Any, help: str, **metadata: Any) -> Any:
    """Declares an option. section: title of its section in the help."""
    return field(default=default, metadata={"section": section, "help": help, **metadata})


_device = partial(_option, "device and numbers")
_memory = partial(_option, "memory and cache")
_scheduling = partial(_option, "scheduling and speculative decoding")
_weights = partial(_option, "weights and vision")
_experts = partial(_option, "offloaded experts")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of the engine. An invalid value raises ConfigError with the option's name."""

    device: str = _device(
        "auto", "where to run: cpu, mlx (Apple's GPUs, with the extra `mlx`), cuda, cuda:N, or neighbouring GPUs such "
        "as cuda:0,1, which sets --tp. auto: an NVIDIA GPU of compute capability 8.0 or later, or mlx on a Mac where "
        "it is installed, else cpu")
    dtype: str = _device(
        "auto", "dtype of weights and activations; auto: the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"))
    threads: int | None = _device(None, "CPU threads (default: the physical cores the container may use)")
    cpu_level: str = _device(
        "auto", "instruction set of the CPU kernels; auto: the best that the processor has", choices=CPU_LEVELS)
    kv_dtype: str = _device(
        "auto", "dtype of the KV cache. auto: that of activations; fp8: on a GPU, float8 (e4m3), half the memory of "
        "bfloat16 at low precision; int8: on a CPU, half the memory of bfloat16 and faster over long contexts; int4: "
        "rotated heads in 4.5 bits a number, 3.5 times smaller than bfloat16",
        choices=("auto", "fp8", "int8", "int4"))
    state_dtype: str = _device(
        "float32", "dtype of recurrent states in the cache. bfloat16: half the memory, rounded at every write, so that "
        "answers may depend on scheduling; on a CPU, torch computes these layers then, which is slower",
        choices=("float32", "bfloat16"))
    batch_invariant: bool = _device(
        False, "compute every token alone, at most 16 at a time, so that on a GPU, too, no bit of an answer depends on "
        "other requests, chunking or the cache: for evaluations. Prefill is as slow as decode; no drafts, pictures or "
        "embeddings")
    tp: int | str = _device(
        "auto", "tensor parallel: devices over which the model is split, GPUs with neighbouring numbers from that of "
        "--device on; answers have the same bits with any number (on GPUs those of decode steps of up to 16 rows, and "
        "all with --batch-invariant). On a CPU the devices are virtual, to test and study that: the memory for weights "
        "and cache stays the same, and steps take longer. auto: with --device cuda the fewest GPUs that hold the "
        "weights and a context of --max-context, otherwise 1", choices=("auto", "1", "2", "4", "8"))
    ops: tuple[str, ...] = _device(
        (), "backend of an op: OP=BACKEND such as mlp=reference, or BACKEND for all")
    debug_layers: bool = _device(False, "log statistics of every layer's output in every step (slow)")

    memory: str | None = _memory(
        None, "memory for the cache, such as 4GiB (default: half of what is free; on a GPU see --gpu-memory)")
    gpu_memory: str | None = _memory(
        None, "most memory of a GPU for weights, cache and temporaries together, such as 24GiB: the model runs as on a "
        "card of that size (default: see --gpu-memory-utilization)")
    gpu_memory_utilization: float | None = _memory(
        None, "the same as a share of the GPU's memory, such as 0.8 (default: 0.9)")
    prefix_cache: bool = _memory(True, "keep the states of prompts and answers, and resume where a prompt repeats them")
    host_memory: str | None = _memory(
        None, "host memory for prefixes evicted from the device, such as 16GiB; 0: none (default: with a GPU a quarter "
        "of what is free, else none)")
    cache_dir: str | None = _memory(
        None, "directory that keeps the states of conversations across restarts (default: none)")
    cache_disk_gb: float = _memory(10.0, "gigabytes that --cache-dir may take")

    max_context: int | None = _scheduling(None, "longest prompt plus answer in tokens (default: the model's own)")
    rope_scaling: str | None = _scheduling(
        None, "lengthen the context: yarn:FACTOR, from the context that the model was trained with, or "
        "yarn:FACTOR:ORIGINAL; none: without the scaling of the model's config. Answers to short prompts change, too "
        "(default: as in the config)")
    max_batch: int = _scheduling(16, "most sequences that run at the same time")
    token_budget: int = _scheduling(
        None, "target number of tokens of a step; longer prompts are prefilled in chunks (default: 512, with "
        "--expert-memory 768, on a GPU 8192)")
    max_stall_ms: int | None = _scheduling(
        None, "upper bound in ms for a step that mixes prefill and decode; smaller bounds make prefill slower "
        "(default: 30, 120 in a burst, 4 times a decode step, or twice the fixed cost of a step with prompts)")
    max_repeat: int = _scheduling(
        0, "end an answer that repeats the same group of up to 128 tokens N times in a row (8*N tokens for groups of "
        "fewer than 8); requests may override it (default: 0, never)")
    speculate: str = _scheduling(
        "auto", "speculative decoding, which changes the speed alone: mtp[:N], ngram[:N], draft:MODEL[:N], head[:N], "
        "off; auto: mtp if the model has a draft head")
    draft_vocab: int = _scheduling(
        32_000, "the draft head chooses among N likely tokens and N/8 that occurred; 0: among all, which makes each "
        "draft slower")

    quant: str = _weights(
        "none", "quantize an unquantized model while loading: to 8 bits, to about 4.8 as in Q4_K_M files (or with "
        "NVFP4 or integers of 4 bits instead of Q4_K), or on a GPU to float8",
        choices=("none", "q8_0", "q4_k", "nvfp4", "int4", "fp8"))
    packed_weights: str = _weights(
        "auto", "keep quantized weights of a file quantized in memory; auto: types such as Q4_K, large GGUF files, "
        "NVFP4, MXFP4 and integers of 4 bits, and float8 on a GPU",
        choices=("auto", "on", "off"))
    aot_dir: str | None = _weights(
        None, "directory that keeps the packed weights of --quant, so that the next start on such a machine is fast "
        "(default: none)")
    vision: bool = _weights(True, "read pictures if the model can; else its vision tower is not loaded")
    allow_image_urls: bool = _weights(False, "fetch pictures of http(s) URLs in requests, from public addresses")
    mmproj: str | None = _weights(
        None, "GGUF file of the vision tower of a GGUF model (default: a file in its folder with mmproj in its name)")
    params: str | None = _weights(
        None, "for a program (.pte) of ExecuTorch's own exporter: its params.json, or the model's config.json")
    tokenizer: str | None = _weights(None, "for such a program: its tokenizer.json")
    tokenizer_config: str | None = _weights(
        None, "for such a program: the tokenizer_config.json with the chat template (default: in the folder of "
        "--tokenizer)")

    expert_memory: str | None = _experts(
        None, "memory for the experts of a mixture, such as 8GiB; the others are read from the model's files on "
        "demand; on a GPU: GPU memory, and the others stay in host memory. auto: what is free, less --expert-reserve "
        "(default: all experts stay in memory)")
    expert_cap: int | None = _experts(
        None, "most experts of a layer in memory (default: what --expert-memory holds)")
    expert_reserve: str = _experts("1.5GiB", "memory that --expert-memory auto leaves free, for the cache among others")
    expert_refresh: int = _experts(1, "swap experts in memory for more frequently used ones every Nth step")
    expert_predict: bool = _experts(False, "read experts ahead that the next layer's router would choose now")
    expert_compute: str = _experts(
        "auto", "on a GPU, what computes offloaded experts, or feed-forwards of a dense model, for few tokens. card: "
        "the GPU, reading host memory; host: the host's cores; auto: both, by measured speed (quantized experts: the "
        "GPU)",
        choices=("auto", "card", "host"))
    expert_profile: str | None = _experts(
        None, "file with usage counts of experts: read at the start if it exists, written at the end")
    limits: Limits = field(default_factory=Limits, metadata={"help": "bounds of a server and of each request"})

    def __post_init__(self) -> None:
        if self.token_budget is None and self.device != AUTO:
            object.__setattr__(self, "token_budget", self._default_token_budget())
        for name in _PATHS:
            if isinstance(path := getattr(self, name), PurePath):
                object.__setattr__(self, name, str(path))
        self._check_types()
        self._split_device()
        self._check_ranges()
        self._check_paths()
        self._check_sizes()
        self._check_ops()
        if self.tp != AUTO:
            object.__setattr__(self, "tp", int(self.tp))
        parse_speculation(self.speculate)
        if self.rope_scaling is not None:
            parse_scaling(self.rope_scaling)
        for rules in (self._device_rules, self._dependency_rules, self._expert_rules, self._invariant_rules):
            for violated, option, message in rules():
                if violated:
                    raise ConfigError(message, option)
        if self.batch_invariant:
            object.__setattr__(self, "vision", False)

    def _default_token_budget(self) -> int:
        if self.batch_invariant:
            return _INVARIANT_BUDGET
        if self.on_gpu is not False:
            return GPU_TOKEN_BUDGET
        return _OFFLOAD_BUDGET if self.offloads_experts else _CPU_BUDGET

    def _check_types(self) -> None:
        hints = get_type_hints(type(self))
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            choices = option.metadata.get("choices")
            if choices and not (type(value) in (str, int) and str(value) in choices):
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {show(value)}", name)
            kind = hints[name]
            if kind in _TYPE_NAMES and not isinstance(value, kind):
                raise ConfigError(f"{name} must be {_TYPE_NAMES[kind]}, not {show(value)}", name)

    def _check_ranges(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            optional = name in _OPTIONAL or (name == "token_budget" and self.device == AUTO)
            if value is None and optional:
                continue
            if type(value) is not int:
                raise ConfigError(f"{name} must be an integer, not {show(value)}", name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be from {low} to {high}, not {show(value)}", name)
        if self.max_repeat == 1:
            raise ConfigError("max_repeat must be 0 (off) or at least 2", "max_repeat")
        if not re.fullmatch(r"auto|cpu|mlx|cuda(:\d{1,3})?", self.device):
            raise ConfigError("device must be auto, cpu, mlx, cuda, cuda:N or a list such as cuda:0,1, not "
                              f"{self.device!r}", "device")

    def _split_device(self) -> None:
        """Sets `device` to the first of a list of GPUs, and `tp` to their number."""
        if not re.fullmatch(r"cuda:\d{1,3}(,\d{1,3})+", self.device):
            return
        numbers = [int(number) for number in self.device.removeprefix("cuda:").split(",")]
        if numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
            raise ConfigError(f"the GPUs of device={self.device} must have neighbouring numbers in their order, such "
                              "as cuda:0,1: choose GPUs and their order by CUDA_VISIBLE_DEVICES", "device")
        if len(numbers) not in (2, 4, 8):
            raise ConfigError(f"device={self.device} has {len(numbers)} GPUs: a model is split over 2, 4 or 8",
                              "device")
        if str(self.tp) not in (AUTO, str(len(numbers))):
            raise ConfigError(f"tp={self.tp} is not the number of GPUs of device={self.device}: leave it out", "tp")
        object.__setattr__(self, "device", f"cuda:{numbers[0]}")
        object.__setattr__(self, "tp", len(numbers))

    def _check_paths(self) -> None:
        for name in _PATHS:
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty: name a file or directory, or leave it out", name)
        for name in _DIRECTORIES:
            path = Path(getattr(self, name) or ".").expanduser()
            existing = next((place for place in (path, *path.parents) if place.exists()), None)
            if existing and not existing.is_dir():
                raise ConfigError(f"{name} {str(path)!r} cannot be used: {existing} is a file; name a directory", name)

    def _check_sizes(self) -> None:
        if self.memory is not None:
            parse_bytes(self.memory, "memory")
        _ = self.host_memory_bytes, self.gpu_memory_bytes
        _ = self.expert_bytes
        parse_bytes(self.expert_reserve, "expert_reserve")
        share = self.gpu_memory_utilization
        if share is not None and not (_is_number(share) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization must be a number above 0 and at most 1, not {share!r}",
                              "gpu_memory_utilization")
        size = self.cache_disk_gb
        if not (_is_number(size) and 0 < size <= 1e6):
            raise ConfigError(f"cache_disk_gb must be a number above 0 and at most 1,000,000, not {size!r}",
                              "cache_disk_gb")

    def _check_ops(self) -> None:
        if not isinstance(self.ops, list | tuple) or not all(isinstance(item, str) for item in self.ops):
            raise ConfigError(f"ops must be a list of name=backend, not {show(self.ops)}", "ops")
        object.__setattr__(self, "ops", tuple(self.ops))
        for item in self.ops:
            if not re.fullmatch(r"([a-z_]+=)?[a-z_0-9]+", item):
                raise ConfigError("ops takes OP=BACKEND, such as attention_mixer=reference, or a BACKEND for all, "
                                  f"not {item!r}", "ops")
        counts = Counter(item.rpartition("=")[0] for item in self.ops)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ConfigError(f"ops names {', '.join(twice)} twice; give one backend", "ops")

    def _device_rules(self) -> Rules:
        cpu = self.on_gpu is False
        shares = [name for name in ("gpu_memory", "gpu_memory_utilization") if getattr(self, name) is not None]
        yield (len(shares) > 1, "gpu_memory",
               "gpu_memory and gpu_memory_utilization both limit the memory of the GPU: leave one of them out")
        for share in shares:
            yield (cpu, share, f"{share} is for GPUs: leave it out, or give device cuda")
            yield (self.memory is not None, share,
                   f"{share} and memory both set the size of the cache: leave one of them out")
            yield (isinstance(self.speculation, Draft), share,
                   f"{share} is not possible with a draft model: give the size of both caches (memory)")
        yield (self.kv_dtype == "fp8" and cpu, "kv_dtype",
               "kv_dtype=fp8 is for NVIDIA GPUs: use int8 or int4, leave it out, or give device cuda")
        yield (self.kv_dtype == "int8" and bool(self.on_gpu), "kv_dtype",
               "kv_dtype=int8 is for CPUs: use fp8, which has the same size, int4, or leave it out")
        yield (self.quant == "fp8" and cpu, "quant",
               "quant=fp8 is for NVIDIA GPUs: use q8_0, which has the same size and is more precise, or give device "
               "cuda")

        several = self.shards > 1
        elsewhere = bool(self.on_gpu) or self.device == "mlx" or several
        yield (isinstance(self.speculation, Head) and elsewhere, "speculate",
               f"speculate={self.speculate} is for one device, a CPU: use mtp, ngram or off")
        yield from self._mlx_rules()
        yield (several and bool(self.on_gpu) and (self.debug_layers or bool(self.ops)), "tp",
               f"tp={self.tp} is not possible on GPUs with debug_layers or ops, which compute layers by torch: leave "
               "one of them out")
        yield (several and bool(self.on_gpu) and self.max_batch > _MAX_SPLIT_ROWS, "max_batch",
               f"max_batch={self.max_batch} is not possible with tp={self.tp} on GPUs: use at most {_MAX_SPLIT_ROWS}")
        yield (several and self.offloads_experts, "tp",
               f"tp={self.tp} is not possible with expert_memory or expert_cap: leave one of them out")

    def _mlx_rules(self) -> Rules:
        """Yields rules for options that the MLX backend does not support."""
        for name in ("kv_dtype", "batch_invariant", "aot_dir", "expert_memory", "expert_cap"):
            yield (self.device == "mlx" and self._is_set(name), name,
                   f"{name} is not possible with device mlx: leave it out, or use device cpu")
        yield (self.device == "mlx" and self.shards > 1, "tp",
               f"tp={self.tp} is not possible with device mlx, which is one device: leave it out")

    def _dependency_rules(self) -> Rules:
        """Yields rules for options that require another option."""
        tokenizer = "tokenizer" if self.tokenizer else "tokenizer_config"
        yield (self.aot_dir is not None and self.quant == "none", "aot_dir",
               "aot_dir stores the packed weights that `quant` makes: give that, or leave it out")
        yield (self.mmproj is not None and not self.vision, "mmproj",
               "mmproj is the file of a vision tower: leave out `vision=False`")
        yield (self.params is None and bool(self.tokenizer or self.tokenizer_config), tokenizer,
               f"{tokenizer} is for a program (.pte) of ExecuTorch's own exporter: give `params` too, or leave it out")
        yield (self.tokenizer_config is not None and self.tokenizer is None, "tokenizer_config",
               "tokenizer_config belongs to a tokenizer file: give `tokenizer` too")
        yield (self.cache_dir is not None and not self.prefix_cache, "cache_dir",
               "cache_dir needs the prefix cache: leave out `prefix_cache=False`")
        yield (self.cache_dir is None and self._is_set("cache_disk_gb"), "cache_disk_gb",
               "cache_disk_gb limits the size of `cache_dir`: give that, or leave it out")

    def _expert_rules(self) -> Rules:
        offloads, cpu = self.offloads_experts, self.on_gpu is False
        for name in ("expert_predict", "expert_profile", "expert_refresh"):
            yield (self._is_set(name) and not offloads, name,
                   f"{name} needs offloaded experts: give `expert_memory`, or leave it out")
        yield (self.expert_memory != "auto" and self._is_set("expert_reserve"), "expert_reserve",
               "expert_reserve is what `expert_memory='auto'` leaves free: give that, or leave it out")
        yield (self.expert_compute != "auto" and cpu, "expert_compute",
               f"expert_compute={self.expert_compute} needs weights offloaded from a GPU: leave it out, or give "
               "`device='cuda'`")
        yield (self.expert_predict and bool(self.on_gpu), "expert_predict",
               f"expert_predict is for device cpu, not {self.device}; leave it out")
        yield (offloads and self.quant != "none" and cpu, "quant",
               f"quant={self.quant} is not possible with expert_memory, which reads experts from the model's files as "
               "they are; write a quantized file once (deltic convert), and run that")

    def _invariant_rules(self) -> Rules:
        if not self.batch_invariant:
            return
        yield (self.speculate not in ("auto", "off"), "speculate",
               f"speculate={self.speculate} is not possible with batch_invariant, as several drafts are verified in "
               "one step: leave one of them out")
        yield (self.mmproj is not None, "mmproj",
               "mmproj is not possible with batch_invariant, which reads no pictures: leave one of them out")
        yield (self.offloads_experts and bool(self.on_gpu) and self.expert_compute != "card",
               "expert_compute",
               "batch_invariant with offloaded experts needs expert_compute=card: the host's cores round differently")

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != option_defaults()[name])

    @property
    def on_gpu(self) -> bool | None:
        """True if the device is a GPU; None if it is not detected yet."""
        return _ON_GPU.get(str(self.device).partition(":")[0])

    @property
    def shards(self) -> int:
        """The number of devices over which the model is split."""
        return 1 if self.tp == AUTO else int(self.tp)

    @property
    def devices(self) -> list[str]:
        """The torch device of each shard: the same CPU for all, or GPUs with neighbouring numbers, `device` first."""
        if not self.on_gpu:
            return ["cpu"] * self.shards
        if self.shards == 1:
            return [self.device]
        kind, _, number = self.device.partition(":")
        return [f"{kind}:{int(number or 0) + shard}" for shard in range(self.shards)]

    @property
    def memory_bytes(self) -> int | None:
        """The cache budget in bytes; `None`: selected automatically."""
        return None if self.memory is None else parse_bytes(self.memory, "memory")

    @property
    def asks_for_context(self) -> bool:
        """True if max_context is given and max_batch is the default."""
        return self.max_context is not None and not self._is_set("max_batch")

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Maximum GPU memory in bytes; `None`: a share of the GPU's memory."""
        return None if self.gpu_memory is None else parse_bytes(self.gpu_memory, "gpu_memory")

    @property
    def host_memory_bytes(self) -> int | None:
        """The budget of the host memory tier in bytes; 0: no tier; `None`: selected automatically."""
        if self.host_memory is None:
            return None
        return 0 if str(self.host_memory).strip() == "0" else parse_bytes(self.host_memory, "host_memory")

    @property
    def offloads_experts(self) -> bool:
        return self.expert_memory is not None or self.expert_cap is not None

    @property
    def expert_bytes(self) -> int | None:
        """The memory budget of experts in bytes; `None`: not set, or selected automatically."""
        return None if self.expert_memory in (None, "auto") else parse_bytes(str(self.expert_memory), "expert_memory")

    @property
    def speculation(self) -> Speculation:
        return None if self.batch_invariant else parse_speculation(self.speculate)

    def threads_for(self, parameters: int) -> int:
        """Returns `threads`, by default all physical cores. By default a model that fits a core's cache gets one
        thread, because several threads would mostly wait for each other."""
        if self.threads:
            return self.threads
        return 1 if parameters < _CACHED_PARAMETERS else available_cores()


def option_defaults() -> dict[str, Any]:
    """Returns the defaults of all options with a constant default."""
    return {option.name: option.default for option in fields(EngineConfig) if option.default is not MISSING}


def parse_speculation(text: object) -> Speculation:
    """Parses `auto`, `off`, `mtp[:N]`, `ngram[:N]`, `draft:MODEL[:N]` or `head[:N]`; raises ConfigError."""
    if not isinstance(text, str):
        raise ConfigError(f"speculate must be {_SPECULATION_FORMS}, not {show(text)}", "speculate")
    if text == "off":
        return None
    if text == "auto":
        return Auto()
    kind, colon, rest = text.partition(":")
    if kind == "draft":
        return _parse_draft(text, rest)
    methods: dict[str, type[Mtp | Ngram | Head]] = {"mtp": Mtp, "ngram": Ngram, "head": Head}
    if kind not in methods:
        raise ConfigError(f"speculate must be {_SPECULATION_FORMS}, not {show(text)}", "speculate")
    return methods[kind](_parse_draft_count(text, rest)) if colon else methods[kind]()


def _parse_draft(text: str, rest: str) -> Draft:
    """Parses MODEL[:N]. The model's name may contain colons; the last part is N only if it is a number."""
    model, colon, count = rest.rpartition(":")
    if not colon or not count.lstrip("-").isdigit():
        model, count = rest, ""
    if not model:
        raise ConfigError(f"speculate={text} names no model: write draft:MODEL or draft:MODEL:4", "speculate")
    return Draft(model, _parse_draft_count(text, count)) if count else Draft(model)


def _parse_draft_count(text: str, number: str) -> int:
    count = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else -1
    if count == 0:
        raise ConfigError(f"speculate={text} drafts nothing: write speculate=off", "speculate")
    if not 1 <= count <= MAX_DRAFTS:
        raise ConfigError(f"speculate={text[:80]}: the number of drafts must be from 1 to {MAX_DRAFTS}, the capacity "
                          "of a sequence's state delta log", "speculate")
    return count


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
