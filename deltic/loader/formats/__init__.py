"""Formats of quantized weights in safetensors files: which tensors of a file make up a weight, and how to read them.

A format is a `WeightFormat` (deltic/loader/tensors.py), listed in FORMATS. To add one:

1. Name its tensors (`roles`). A role lists possible ends of a tensor's name, and its dtypes. `weight_packed` in the
   role `codes` makes `X.weight_packed` the codes of the weight `X.weight`; for experts in one tensor,
   `experts.gate_up_proj`, the codes are `experts.gate_up_proj_packed` or `experts.gate_up_proj_weight_packed`. Names
   and dtypes of required tensors distinguish formats; where they do not, `methods` lists the `quant_method`s.
2. `plan(tensors, quantization, module)` returns the shape of the weight and settings for `read`, from shapes, dtypes
   and the config (`Quantization.settings`; `module` is the weight's name without `.weight`). It reads no data. It
   raises ValueError with the reason if a shape or setting does not fit. Experts in one tensor are passed one by
   one: a format handles single matrices only.
3. `read(tensor, first, end)` returns the entries [first, end) of the first axis as a `PackedRows`: its fields are the
   codes and scales, for kernels that compute with them, and `numbers()` computes the values, float32, in the order of
   operations of the format's own tool, so that they are equal bit for bit. `tensor.tensors[role].rows(first, end)
   .read()` reads rows of a stored tensor. The caller requests some millions of values at a time; temporaries stay
   near the size of the result.
   If rows of the weight are not rows of the stored tensors (GPTQ), `by_rows=False`: the tensors are then in memory
   before the first `read`, and reading them costs nothing.
4. Make config/quantization.py accept the method.

A format may also claim tensors that are not quantized but stored in another layout, with any number of axes
(`matrices=False`).

The rest of the loader treats a `PackedTensor` like a plain tensor: parts for devices, stacks of experts, the draft
head, the vision tower, GGUF conversion, `--quant`. The tensors in a file determine how a weight is stored, so that
exclude lists and per-layer formats need no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from deltic.config.quantization import Quantization
from deltic.errors import ModelError
from deltic.loader.formats import bitsandbytes, fp4, fp8, integers, mlx
from deltic.loader.tensors import PackedTensor, Role, Source, Stack, StoredTensor, WeightFormat

FORMATS: Final[tuple[WeightFormat, ...]] = (
    *fp4.FORMATS, *fp8.FORMATS, *integers.FORMATS, *mlx.FORMATS, *bitsandbytes.FORMATS)
"""Formats by priority, highest first."""
_WEIGHT: Final = "weight"
_EXPERTS: Final = re.compile(r"\.experts\.(gate_up|gate|up|down)_proj$")
_MAX_EXPERTS: Final = 1 << 14
_SINGLE: Final = ((), (1,))


def combine(tensors: Mapping[str, StoredTensor], quantization: Quantization, problems: list[str] | None = None
            ) -> dict[str, Source]:
    """Combines the tensors of each quantized weight into one, at the position of its codes. Other tensors stay. Tensors
    of MLX get the names and the layout of Hugging Face.

    problems: if given, receives the message about each weight that cannot be read, instead of an error about the first.
    Raises ModelError naming a weight with missing or unsupported tensors, or a weight that is stored twice.
    """
    known = _by_dtype(quantization.method)
    weights, used = dict[str, tuple[str, Source]](), set[str]()
    for name, stored in tensors.items():
        candidates = [(format, weight) for format in known.get(stored.dtype, ())
                      if (weight := _weight_of(name, format.roles["codes"]))]
        for format, weight in candidates:
            if names := _names_of(format, weight, tensors):
                parts = {role: tensors[own] for role, own in names.items()}
                with _reported(problems):
                    weights[name] = weight, _packed(format, weight, parts, quantization)
                    used.update(names.values())
                break
        else:
            if candidates:
                with _reported(problems):
                    raise _incomplete(candidates, tensors)
    found = dict[str, Source]()
    for name, stored in tensors.items():
        weight, source = weights.get(name, (name, stored))
        if weight in found or (weight != name and weight in tensors):
            raise ModelError(f"tensor {weight[:200]!r} is given twice, quantized and plain; keep the files of one "
                             "revision")
        if name in weights or name not in used:
            found[weight] = source
    return mlx.from_mlx(found)


@contextmanager
def _reported(problems: list[str] | None) -> Iterator[None]:
    """Appends the message of a ModelError to `problems` instead of raising it, if there is such a list."""
    try:
        yield
    except ModelError as error:
        if problems is None:
            raise
        problems.append(str(error))


def stored_tensors(weight: str, source: Source) -> dict[str, StoredTensor | Stack]:
    """Returns the tensors of a weight under the names by which `combine` finds them, without a config.

    Raises ModelError for a format that needs a config.
    """
    parts = [part for part in source.parts if isinstance(part, PackedTensor)]
    if not parts:
        assert not isinstance(source, PackedTensor)
        return {weight: source}
    if parts[0].format.methods:
        raise ModelError(f"tensor {weight[:200]!r} is stored as {parts[0].dtype}, which only the config of its model "
                         "describes; take the head of the unquantized model")
    found = dict[str, StoredTensor | Stack]()
    for role in parts[0].tensors:
        name, own = next(_names(weight, parts[0].format.roles[role])), tuple(part.tensors[role] for part in parts)
        found[name] = Stack(own) if isinstance(source, Stack) else own[0]
    return found


def _by_dtype(method: str) -> dict[str, list[WeightFormat]]:
    """Returns the formats by the dtype of their codes. method: quant_method of the checkpoint."""
    found = dict[str, list[WeightFormat]]()
    for format in FORMATS:
        if not format.methods or method in format.methods:
            for dtype in format.roles["codes"].dtypes:
                found.setdefault(dtype, []).append(format)
    return found


def _weight_of(name: str, codes: Role) -> str | None:
    """Returns the name of the weight whose codes this tensor holds; None if the name has no suffix of `codes`."""
    for suffix in codes.suffixes:
        end = suffix.removeprefix(_WEIGHT)
        if name.endswith(f".{suffix}"):
            return name.removesuffix(suffix) + _WEIGHT
        if suffix.startswith(_WEIGHT) and _EXPERTS.search(name.removesuffix(end)) and name.endswith(end):
            return name.removesuffix(end)
    return None


def _names(weight: str, role: Role) -> Iterator[str]:
    """Yields the names that a weight's tensor may have."""
    for suffix in role.suffixes:
        if weight.endswith(f".{_WEIGHT}"):
            yield weight.removesuffix(_WEIGHT) + suffix
            continue
        if suffix.startswith(_WEIGHT):
            yield weight + suffix.removeprefix(_WEIGHT)
        yield f"{weight}_{suffix}"


def _names_of(format: WeightFormat, weight: str, tensors: Mapping[str, StoredTensor]) -> dict[str, str] | None:
    """Returns the names of a weight's tensors by role; None if a required tensor is absent or of another dtype."""
    found = _present(format, weight, tensors)
    return found if all(key in found for key, role in format.roles.items() if role.required) else None


def _present(format: WeightFormat, weight: str, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Returns the names, by role, of the weight's tensors that exist with a dtype of their role."""
    found = dict[str, str]()
    for key, role in format.roles.items():
        for name in _names(weight, role):
            if name in tensors and tensors[name].dtype in role.dtypes:
                found.setdefault(key, name)
    return found


def _incomplete(candidates: Sequence[tuple[WeightFormat, str]], tensors: Mapping[str, StoredTensor]) -> ModelError:
    """Returns the error about the first required tensor that a weight lacks, in the format that fits best."""
    format, weight = max(reversed(candidates), key=lambda each: len(_present(each[0], each[1], tensors)))
    for key, role in format.roles.items():
        names = [*_names(weight, role)]
        given = [tensors[name] for name in names if name in tensors]
        if role.required and not any(stored.dtype in role.dtypes for stored in given):
            wrong = f"with {key} of dtype {given[0].dtype[:20]}" if given else (
                f"without {key} ({' or '.join(name[:200] for name in names)})")
            return ModelError(f"tensor {weight[:200]!r} is stored as {format.name} {wrong}; take a complete "
                              "checkpoint, or the unquantized one")
    raise AssertionError(weight)


def _packed(format: WeightFormat, weight: str, parts: Mapping[str, StoredTensor], quantization: Quantization
            ) -> Source:
    """Returns the weight of these tensors, or a stack of the experts in them."""
    module, shape = weight.removesuffix(f".{_WEIGHT}"), parts["codes"].shape

    def matrix(own: Mapping[str, StoredTensor]) -> PackedTensor:
        size, settings = format.plan(own, quantization, module)
        return PackedTensor(format, size, own, settings)

    try:
        if not 0 < len(shape) < 8 or 0 in shape:
            raise ValueError(f"codes of shape {list(shape)}")
        if not (format.matrices and len(shape) == 3):
            return matrix(parts)
        if shape[0] > _MAX_EXPERTS:
            raise ValueError(f"codes of {shape[0]} experts")
        return Stack(tuple(matrix(own) for own in _experts(parts, shape[0])))
    except ValueError as error:
        raise ModelError(f"tensor {weight[:200]!r} is stored as {format.name} with {error}, so use the unquantized "
                         "checkpoint") from error


def _experts(parts: Mapping[str, StoredTensor], count: int) -> Iterator[dict[str, StoredTensor]]:
    """Yields the tensors of each expert. Tensors of a single number, and a common shape, are shared by all experts."""
    shared = {role: stored for role, stored in parts.items() if stored.shape in _SINGLE or role == "shape"}
    for role, stored in parts.items():
        if role not in shared and stored.shape[0] != count:
            raise ValueError(f"{role} of shape {list(stored.shape)} for {count} experts")
    for index in range(count):
        yield {role: shared.get(role) or _entry(stored, index) for role, stored in parts.items()}


def _entry(stored: StoredTensor, index: int) -> StoredTensor:
    found = stored.rows(index, index + 1)
    return replace(found, shape=stored.shape[1:], data=None if found.data is None else found.data[0])
