"""What Ollama's clients are told of models."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

from deltic.chat.infill import Infill
from deltic.chat.markers import THINK
from deltic.errors import RequestError
from deltic.llm import LLM
from deltic.server.embeddings.service import EmbeddingService
from deltic.server.model_registry import ModelEntry
from deltic.server.ollama.formatting import stamp
from deltic.server.served_model import ServedModel

Json = dict[str, Any]
TAG: Final = ":latest"
"""What Ollama calls the version of a model that is named without one."""
_NEVER: Final = "2318-01-01T00:00:00Z"
"""When models expire that stay."""
_BYTES: Final = {"float32": 4}


def tagged(name: str) -> str:
    """A name with a version."""
    return name if ":" in name else name + TAG


def listed(entry: ModelEntry, llm: LLM | None) -> Json:
    """A model as /api/tags lists it. llm: where it is loaded."""
    return _named(entry.name, entry.created, _size(llm)) | {"details": details(llm)}


def listed_encoder(service: EmbeddingService) -> Json:
    return _named(service.name, service.created, 0) | {"details": details(None)}


def running(entry: ModelEntry, llm: LLM) -> Json:
    """A model as /api/ps lists it."""
    size = _size(llm)
    on_card = size if llm.runtime.device.type != "cpu" else 0
    return listed(entry, llm) | {"expires_at": _NEVER, "size_vram": on_card, "context_length": entry.context}


def shown(entry: ModelEntry, served: ServedModel | None) -> Json:
    """A model as /api/show describes it; of one that is not loaded there is little to say."""
    llm = served.llm if served else None
    found: Json = {"modified_at": stamp(entry.created), "details": details(llm), "model_info": {},
                   "capabilities": ["completion"], "template": "", "parameters": "",
                   "modelfile": f"FROM {entry.name}\n"}
    if served is None or llm is None:
        return found
    config, processor = llm.runtime.config, served.processor
    kind = config.architecture
    return found | {
        "template": processor.source, "capabilities": _capabilities(served), "parameters": _parameters(llm),
        "model_info": {
            "general.architecture": kind, "general.basename": entry.name,
            "general.parameter_count": config.parameter_count, f"{kind}.context_length": entry.context,
            f"{kind}.embedding_length": config.hidden_size, f"{kind}.block_count": config.num_hidden_layers,
            f"{kind}.attention.head_count": config.num_attention_heads,
            f"{kind}.attention.head_count_kv": config.num_key_value_heads, f"{kind}.vocab_size": config.vocab_size}}


def shown_encoder(service: EmbeddingService) -> Json:
    encoder = service.encoder
    return {"modified_at": stamp(service.created), "details": details(None), "template": "", "parameters": "",
            "modelfile": f"FROM {service.name}\n", "capabilities": ["rerank" if encoder.scores else "embedding"],
            "model_info": {"general.basename": service.name, "bert.context_length": encoder.max_length,
                           "bert.embedding_length": encoder.dimension}}


def details(llm: LLM | None) -> Json:
    """What a model is."""
    if llm is None:
        return {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
                "quantization_level": ""}
    config, path = llm.runtime.config, llm.runtime.path
    form = "gguf" if path is not None and path.suffix == ".gguf" else "safetensors"
    return {"parent_model": "", "format": form, "family": config.architecture, "families": [config.architecture],
            "parameter_size": _spelled(config.parameter_count), "quantization_level": config.dtype.upper()}


def _named(name: str, created: int, size: int) -> Json:
    return {"name": tagged(name), "model": tagged(name), "modified_at": stamp(created), "size": size,
            "digest": sha256(name.encode("utf-8", "replace")).hexdigest()}


def _size(llm: LLM | None) -> int:
    """Bytes of a model's weights, about."""
    return llm.runtime.config.parameter_count * _BYTES.get(llm.runtime.config.dtype, 2) if llm else 0


def _spelled(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 100_000_000 else f"{count / 1e6:.1f}M"


def _parameters(llm: LLM) -> str:
    """How answers are chosen where a request says nothing."""
    generation = llm.runtime.generation
    found = {name: getattr(generation, name, None) for name in ("temperature", "top_k", "top_p", "min_p")}
    return "\n".join(f"{name} {value}" for name, value in found.items() if value is not None)


def _capabilities(served: ServedModel) -> list[str]:
    processor = served.processor
    found = {"completion": True, "tools": "tools" in processor.source, "vision": processor.sees,
             "thinking": THINK in processor.source, "insert": _inserts(served)}
    return [name for name, there in found.items() if there]


def _inserts(served: ServedModel) -> bool:
    try:
        Infill.of(served.processor.tokenizer.added)
    except RequestError:
        return False
    return True
