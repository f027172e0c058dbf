"""Options and commands of other engines, and what they are called here: for hints, and for docs/migrate.md."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

_ALWAYS, _DEFAULT = "needs no option: it is always so", "is the default"
_ONE = "no option: a model runs on one device; start a server for each device"

_LAYERS: Final = "needs no option: all layers run on --device, which is cpu, cuda or cuda:N"

FOREIGN: Final[Mapping[str, Mapping[str, str]]] = {
    "vLLM": {
        "--max-model-len": "--max-context",
        "--max-num-seqs": "--max-batch",
        "--max-num-batched-tokens": "--token-budget",
        "--tensor-parallel-size": _ONE,
        "-tp": _ONE,
        "--pipeline-parallel-size": _ONE,
        "-pp": _ONE,
        "--data-parallel-size": _ONE,
        "-dp": _ONE,
        "--enable-expert-parallel": _ONE,
        "--enable-prefix-caching": f"{_DEFAULT}; --no-prefix-cache switches it off",
        "--no-enable-prefix-caching": "--no-prefix-cache",
        "--kv-cache-dtype": "--kv-dtype",
        "--quantization": "--quant",
        "-q": "--quant",
        "--served-model-name": "--served-name",
        "--speculative-config": "--speculate",
        "--enable-auto-tool-choice": _ALWAYS,
        "--enable-chunked-prefill": _ALWAYS,
        "--reasoning-parser": "needs no option: the chat template defines the think block",
        "--trust-remote-code": "needs no option: no code of a repository is run",
        "--enforce-eager": "no option; --debug-layers logs the output of each layer",
        "--swap-space": "--host-memory",
        "--cpu-offload-gb": "--expert-memory",
        "--limit-mm-per-prompt": "--max-pictures",
        "--download-dir": "the variable HF_HOME",
        "--ssl-certfile": "--tls-certificate",
        "--ssl-keyfile": "--tls-key",
        "--allowed-origins": "--cors-origin",
        "--uds": "--unix-socket",
        "--mamba-ssm-cache-dtype": "--state-dtype",
        "--runner": "--task",
        "--convert": "--task",
        "--hf-overrides": "no option: change the model's config.json"},
    "SGLang": {
        "--model-path": "MODEL",
        "--context-length": "--max-context",
        "--mem-fraction-static": "--gpu-memory-utilization",
        "--max-running-requests": "--max-batch",
        "--chunked-prefill-size": "--token-budget",
        "--tp": _ONE,
        "--tp-size": _ONE,
        "--disable-radix-cache": "--no-prefix-cache",
        "--speculative-algorithm": "--speculate",
        "--mamba-scheduler-strategy": _ALWAYS,
        "--enable-deterministic-inference": "--batch-invariant",
        "--enable-hierarchical-cache": "--host-memory"},
    "llama.cpp": {
        "-m": "MODEL",
        "--ctx-size": "--max-context",
        "-c": "--max-context",
        "-ngl": _LAYERS,
        "--n-gpu-layers": _LAYERS,
        "--gpu-layers": _LAYERS,
        "--parallel": "--max-batch",
        "-np": "--max-batch",
        "--batch-size": "--token-budget",
        "-b": "--token-budget",
        "--ubatch-size": "--token-budget",
        "-ub": "--token-budget",
        "-t": "--threads",
        "--threads-batch": "--threads",
        "-tb": "--threads",
        "--cache-type-k": "--kv-dtype",
        "--cache-type-v": "--kv-dtype",
        "-ctk": "--kv-dtype",
        "-ctv": "--kv-dtype",
        "--flash-attn": _ALWAYS,
        "-fa": _ALWAYS,
        "--model-draft": "--speculate",
        "-md": "--speculate",
        "--draft-max": "--speculate",
        "-hf": "MODEL",
        "--hf-repo": "MODEL",
        "-hfr": "MODEL",
        "--jinja": _ALWAYS,
        "--chat-template-file": "--chat-template",
        "--reasoning-budget": "--thinking-budget",
        "--reasoning-format": "needs no option: thinking comes as reasoning_content",
        "--cpu-moe": "--expert-memory",
        "-cmoe": "--expert-memory",
        "--n-cpu-moe": "--expert-memory",
        "-ncmoe": "--expert-memory",
        "--mlock": "no option: weights are in memory, but not locked there",
        "--no-mmap": "needs no option: weights are read into memory",
        "--n-predict": "--max-tokens",
        "--predict": "--max-tokens",
        "-n": "--max-tokens",
        "--temp": "--temperature",
        "-p": "PROMPT",
        "--prompt": "PROMPT",
        "--system-prompt": "--system",
        "-sys": "--system",
        "-cnv": "the command deltic chat",
        "--conversation": "the command deltic chat",
        "-i": "the command deltic chat",
        "--interactive": "the command deltic chat",
        "--json-schema": "--schema",
        "-j": "--schema",
        "--grammar-file": "no option: a request has structured_outputs",
        "--repeat-penalty": "--repetition-penalty",
        "--cache-ram": "--host-memory",
        "--slot-save-path": "--cache-dir",
        "--embedding": "--task",
        "--embeddings": "--task",
        "--reranking": "--task",
        "--rerank": "--task",
        "--ssl-key-file": "--tls-key",
        "--ssl-cert-file": "--tls-certificate",
        "--alias": "--served-name",
        "-a": "--served-name",
        "--metrics": "needs no option: they are at /metrics",
        "-s": "--seed",
        "--models-max": "--models-memory",
        "--sleep-idle-seconds": "--idle-unload"},
    "Ollama": {
        "OLLAMA_HOST": "--host",
        "OLLAMA_CONTEXT_LENGTH": "--max-context",
        "num_ctx": "--max-context",
        "OLLAMA_NUM_PARALLEL": "--max-batch",
        "OLLAMA_KEEP_ALIVE": "--idle-unload",
        "--keepalive": "--idle-unload",
        "OLLAMA_MAX_LOADED_MODELS": "--models-memory",
        "OLLAMA_KV_CACHE_TYPE": "--kv-dtype",
        "OLLAMA_ORIGINS": "--cors-origin",
        "OLLAMA_MODELS": "the variable HF_HOME",
        "OLLAMA_MAX_QUEUE": "--max-waiting",
        "OLLAMA_FLASH_ATTENTION": _ALWAYS,
        "--format": "--schema",
        "num_predict": "--max-tokens",
        "num_thread": "--threads",
        "num_gpu": "--device",
        "--hidethinking": "--no-thinking-output"},
    "vllm-mlx": {
        "--enable-mtp": "--speculate",
        "--continuous-batching": _ALWAYS,
        "--use-paged-cache": _ALWAYS,
        "--cache-memory-mb": "--memory",
        "--cache-memory-percent": "--memory",
        "--mllm": "--vision",
        "--mcp-config": "no option: tools are run by the client",
        "--stream-interval": "no option: every token is sent"},
    "RLX": {
        "enable_mtp": "--speculate",
        "fast_mtp": "--speculate",
        "max_seq": "--max-context",
        "RLX_QWEN35_DEBUG_LAYERS": "--debug-layers",
        "qwen35.rlx.toml": "--aot-dir"},
    "ExecuTorch": {
        "--model_path": "MODEL",
        "--tokenizer_path": "--tokenizer",
        "--seq_len": "--max-tokens",
        "--max_new_tokens": "--max-tokens",
        "--cpu_threads": "--threads",
        "--num_bos": "needs no option: the tokenizer decides",
        "--warmup": _ALWAYS},
    "ailoy": {
        "LangModel.new_local": "LLM",
        "Agent.run": "LLM.chat",
        "model download": "the command deltic pull",
        "model list": "the command deltic ls",
        "model remove": "the command deltic rm",
        "AILOY_CACHE_ROOT": "the variable HF_HOME"},
}
"""Engine -> its option, variable or call -> ours, or what is so without one."""
COMMANDS: Final[Mapping[str, str]] = {
    "generate": "run", "complete": "run", "start": "serve", "server": "serve", "api_server": "serve",
    "create": "convert", "quantize": "convert", "download": "pull", "search": "pull", "delete": "rm", "remove": "rm",
    "info": "inspect", "benchmark": "bench", "embeddings": "embed"}
"""Commands of other engines -> ours. Those of ALIASES work as they are."""
ALIASES: Final[Mapping[str, str]] = {"list": "ls", "show": "inspect"}
"""Commands of Ollama that do what ours does."""
_WORDS: Final[Mapping[str, str]] = {
    "stop": "a server ends with Ctrl-C; --idle-unload SECONDS unloads a model that nobody uses",
    "push": "models are not uploaded: use the program hf", "cp": "serve --served-name NAME gives a model another name",
    "launch": "deltic connect writes the settings of clients", "signin": "set HF_TOKEN for the Hugging Face hub"}


def option_hint(given: str, known: Iterable[str]) -> str | None:
    """What an option that is not known is called here, if that is known."""
    name = given.partition("=")[0]
    for engine, table in FOREIGN.items():
        if ours := table.get(name) or table.get(name.replace("_", "-")):
            return f"{name} of {engine} is {ours} here" if ours[0] in "-M" or ours == "PROMPT" else f"{name}: {ours}"
    close = difflib.get_close_matches(name, [option for option in known if len(option) > 2], n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else None


def command_hint(given: str, known: Iterable[str]) -> str | None:
    """What a command that is not known is called here."""
    if given in _WORDS:
        return _WORDS[given]
    close = [COMMANDS[given]] if given in COMMANDS else difflib.get_close_matches(given, list(known), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else None


_PAGE = """# Coming from another engine

Options, variables and calls of other engines, and their names in deltic. Generated by `python -m deltic.cli.docs` from
the table behind the hints of the command line; do not edit. `deltic serve --help` explains deltic's options, and
[server.md](server.md) lists the fields of other servers that requests may have.

Ollama's commands `list`, `show` and `ps` work unchanged; `run MODEL` without a prompt begins a chat. Short names such
as `qwen3.5:0.8b` work, too ([models.md](models.md)).
"""


def page() -> str:
    """docs/migrate.md."""
    parts = [_PAGE]
    for engine, table in FOREIGN.items():
        rows = "\n".join(f"| `{theirs}` | {_shown(ours)} |" for theirs, ours in table.items())
        parts.append(f"\n## {engine}\n\n| there | here |\n|---|---|\n{rows}\n")
    rows = "\n".join(f"| `{theirs}` | `deltic {ours}` |" for theirs, ours in {**ALIASES, **COMMANDS}.items())
    parts.append(f"\n## Commands\n\n| there | here |\n|---|---|\n{rows}\n")
    return "".join(parts)


def _shown(ours: str) -> str:
    return f"`{ours}`" if " " not in ours else ours
