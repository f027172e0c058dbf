"""Shows a model's files for `deltic inspect`: weights by kind, their form and bytes on each device, warnings."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from deltic.cli import options
from deltic.cli.inspect import activation_dtype, config_facts, memory_facts, plan_cache, rounded_mib
from deltic.cli.output import grid, table
from deltic.cli.parser import as_typed, clipped
from deltic.config import DTYPE_BYTES, DType, EngineConfig, available_memory
from deltic.errors import ConfigError

if TYPE_CHECKING:
    from deltic.loader.model_files import ModelFiles
    from deltic.loader.survey import Survey, WeightGroup

Facts = dict[str, Any]

_MAX_ROWS: Final = 100
_MAX_NAMES: Final = 6
_MAX_NAME: Final = 40
_NO_ROOM: Final = "the weights leave no room for a cache"


def survey_facts(found: Survey, args: argparse.Namespace) -> Facts:
    """Returns the facts of a model from its headers and configs, without reading its weights."""
    from deltic.ops import explain, select
    from deltic.ops.capabilities import gpu_kernels

    engines = _engines(args)
    engine, files = engines[0], found.files
    facts: Facts = {"model": str(found.place), "path": str(found.place) if found.place.exists() else None}
    if found.config:
        config = found.config.with_rope_scaling(engine.rope_scaling)
        facts["config"] = config_facts(config)
        files = files and replace(files, config=config)
    facts["weights"] = {"parameters": _parameters(found.groups), "mib": _stored_mib(found.groups)}
    if files:
        memory = [_device_facts(files, found.groups, each) for each in engines]
        facts |= {"memory": memory[0], "other_devices": {one.pop("device"): one for one in memory[1:]},
                  "gpu_kernels": gpu_kernels(engine.device), "ops": explain(select(engine.ops))}
    facts["tokenizer"] = {"tokenizer": found.tokenizer, "chat_template": found.chat_template}
    facts["refused"] = found.refusal and clipped(as_typed(found.refusal))
    return facts | group_facts(found, args)


def group_facts(found: Survey, args: argparse.Namespace) -> Facts:
    """Returns a row for each group of weights of one kind that are stored alike, and warnings."""
    engines, files, groups = _engines(args), found.files, found.groups[:_MAX_ROWS]
    forms = {engine.device: _forms(groups, files, engine) for engine in engines} if files else {}
    rows = []
    for index, group in enumerate(groups):
        bits = None if group.bits is None else round(group.bits, 2)
        row = {"kind": group.kind, "layers": group.layers or None, "stored_as": clipped(group.storage), "bits": bits,
               "parameters": group.parameters, "mib": rounded_mib(group.nbytes)}
        row |= {f"on_{device}": found[index] for device, found in forms.items()}
        rows.append({**row, "weights": [clipped(name[:_MAX_NAME]) for name in group.names[:_MAX_ROWS]]})
    return {"layers": rows, "warnings": [clipped(as_typed(warning)) for warning in found.warnings]}


def print_survey(facts: Facts, as_json: bool) -> None:
    """Prints facts, with the rows of `group_facts` as a grid."""
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    print(table({name: value for name, value in facts.items() if name not in ("layers", "warnings")}))
    if rows := facts["layers"]:
        print(f"\n{grid([{**row, 'weights': _short(row['weights'])} for row in rows])}")
    for warning in facts["warnings"]:
        print(f"\nwarning: {warning}")


def _short(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _engines(args: argparse.Namespace) -> list[EngineConfig]:
    """Returns the options with the device that would serve the model, and with the other device if this machine has it
    and the options suit it."""
    from deltic.engine.arguments import settled
    from deltic.ops.capabilities import find_device

    given = options.engine_options(args)
    engine = settled(EngineConfig(**given))
    other = "cpu" if engine.on_gpu else find_device()
    if other == engine.device:
        return [engine]
    try:
        return [engine, EngineConfig(**{**given, "device": other})]
    except ConfigError:
        return [engine]


def _forms(groups: list[WeightGroup], files: ModelFiles, engine: EngineConfig) -> list[str]:
    """Returns the form in which a device keeps the weights of each group in memory."""
    from deltic.loader.survey import MTP_HEAD, NORMS, VISION
    from deltic.runner.weights import packed_storages

    dtype = activation_dtype(files.config, engine)
    kept, packs_head = packed_storages(files, engine, dtype), files.gguf is not None and not engine.on_gpu
    found = []
    for group in groups:
        apart = group.kind == VISION or (group.kind == MTP_HEAD and not packs_head)
        packed = {(group.storage, columns) in kept and not apart for columns in group.columns}
        plain = dtype if engine.quant == "none" or apart or group.kind == NORMS else engine.quant
        found.append({(True,): "packed", (False, True): f"packed or {plain}"}.get(tuple(sorted(packed)), plain))
    return found


def _device_facts(files: ModelFiles, groups: list[WeightGroup], engine: EngineConfig) -> Facts:
    """Returns the bytes of weights and cache on a device."""
    from deltic.runner.weights import served_sizes

    config, dtype = files.config, activation_dtype(files.config, engine)
    sizes = served_sizes(files, engine, dtype)
    forms = _forms(groups, files, engine)
    others = sum(_other_bytes(group, form, dtype) for group, form in zip(groups, forms, strict=True))
    facts: Facts = {"device": engine.device, "weights_mib": rounded_mib(sum(sizes.values()) + others)}
    if not engine.on_gpu:
        facts["available_mib"] = rounded_mib(available_memory())
    plan = plan_cache(config, engine, sizes, others)
    return facts | (memory_facts(config, engine, *plan) if plan else {"max_context": 0, "warnings": [_NO_ROOM]})


def _other_bytes(group: WeightGroup, form: str, dtype: DType) -> int:
    """Returns the bytes of a draft head or a vision tower in memory."""
    from deltic.loader.survey import MTP_HEAD, VISION

    if group.kind not in (MTP_HEAD, VISION):
        return 0
    return group.nbytes if form == "packed" else (group.parameters or 0) * DTYPE_BYTES[dtype]


def _parameters(groups: list[WeightGroup]) -> int | None:
    counts = [group.parameters for group in groups]
    return None if None in counts else sum(count or 0 for count in counts)


def _stored_mib(groups: list[WeightGroup]) -> float:
    return rounded_mib(sum(group.nbytes for group in groups))
