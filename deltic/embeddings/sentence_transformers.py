"""Reads the files of sentence-transformers: pooling, prompts, normalisation, length limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from deltic.config.reading import flag
from deltic.errors import ModelError, RequestError, show
from deltic.loader.disk import open_plain, read_json

POOLINGS: Final = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
_FLAGS: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken"}
"""Flags of older files; if several flags are set, they apply in this order."""
_LENGTH_FILES: Final = tuple(f"sentence_{family}_config.json" for family in ("bert", "roberta", "xlm-roberta"))
"""Names that different versions of sentence-transformers give to the same file."""
_PROMPT_NAMES: Final = {"query": ("query",), "passage": ("passage", "document", "corpus"),
                        "document": ("document", "passage", "corpus")}
_MAX_LENGTH: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """Describes how texts become token sequences, and hidden states become vectors."""

    pooling: tuple[str, ...] = ("mean",)
    """Names from `POOLINGS`; if there are several, their vectors are concatenated."""
    normalize: bool = True
    with_prompt: bool = True
    """True if the prompt's tokens are pooled too."""
    dense: tuple[Path, ...] = ()
    """Directories of the layers after the pooling."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    """Name of the prompt for texts without a given kind."""
    max_length: int | None = None
    lower: bool = False
    """True if texts are converted to lower case."""

    def prompt(self, kind: str | None) -> str:
        """Returns the prompt for a kind of text; "" if the model has none. Raises RequestError for an unknown kind."""
        known = list(dict.fromkeys([*_PROMPT_NAMES, *self.prompts]))
        if kind is not None and kind not in known:
            raise RequestError(f"kind must be one of {', '.join(known)}, or None, not {show(kind)}", "kind")
        names = (self.default or "",) if kind is None else _PROMPT_NAMES.get(kind, (kind,))
        return next((self.prompts[name] for name in names if name in self.prompts), "")


def read_recipe(directory: Path, pooling: str = "mean") -> Recipe:
    """Reads a directory's files. pooling: used without modules.json; vectors are then normalised.

    Raises ModelError naming the file and key that cannot be used.
    """
    path = directory / "modules.json"
    recipe = _from_modules(directory, path) if path.is_file() else Recipe((pooling,))
    found = [directory / name for name in _LENGTH_FILES if (directory / name).is_file()]
    path = found[0] if found else directory / _LENGTH_FILES[0]
    config = _optional(path)
    length = config.get("max_seq_length")
    if length is not None and (type(length) is not int or not 1 <= length <= _MAX_LENGTH):
        raise ModelError(f"{path}: max_seq_length must be an integer from 1 to {_MAX_LENGTH}, not {show(length)}")
    prompts, default = _prompts(directory / "config_sentence_transformers.json")
    return replace(recipe, max_length=length or _tokenizer_length(directory), prompts=prompts, default=default,
                   lower=flag(config, "do_lower_case", False))


def _tokenizer_length(directory: Path) -> int | None:
    length = _optional(directory / "tokenizer_config.json").get("model_max_length")
    return length if type(length) is int and 1 <= length <= _MAX_LENGTH else None  # 1e30 means no limit


def _from_modules(directory: Path, path: Path) -> Recipe:
    recipe, dense = Recipe(("cls",), normalize=False), list[Path]()
    for number, (kind, place) in enumerate(_modules(path)):
        config = place / "config.json"
        if kind == "Transformer" and number == 0:
            continue
        if kind == "Pooling" and number == 1:
            pooling, with_prompt = _pooling(config)
            recipe = replace(recipe, pooling=pooling, with_prompt=with_prompt)
        elif kind == "Dense" and not recipe.normalize:
            dense.append(place)
        elif kind == "Normalize":
            check_module_names(config, _optional(config))
            recipe = replace(recipe, normalize=True)
        else:
            raise ModelError(f"{path}: the module {show(kind)} is not supported at place {number}: a model is a "
                             "Transformer, a Pooling, then Dense and Normalize")
    return replace(recipe, dense=tuple(dense))


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Returns the kind and the directory of each module."""
    try:
        with open_plain(path) as file:
            entries = json.load(file)
        modules = [(str(entry["type"]).rpartition(".")[2], Path(str(entry["path"]))) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path} is no list of modules with type and path ({error}); download it again") from error
    for _, place in modules:
        if place.is_absolute() or ".." in place.parts:
            raise ModelError(f"{path} names the module {show(str(place))}, which is not beside it")
    return [(kind, path.parent / place) for kind, place in modules]


def _pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    config = read_json(path)
    named = config.get("pooling_mode")
    if named is None:
        given = [mode for key, mode in _FLAGS.items() if flag(config, key, False)]
    else:
        given = named if isinstance(named, list) else [named]
    modes = tuple("mean_sqrt_len" if mode == "mean_sqrt_len_tokens" else mode for mode in given)
    if not modes or not all(mode in POOLINGS for mode in modes):
        raise ModelError(f"{path}: the pooling must be one of {', '.join(POOLINGS)}, not {show(given)}")
    return modes, flag(config, "include_prompt", True)


def check_module_names(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for a module whose input or output is not the text's vector."""
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelError(f"{path}: {key} {show(config[key])} is not supported, only 'sentence_embedding'")


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    config = _optional(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be texts by their names, not {show(prompts)}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ModelError(f"{path}: default_prompt_name is {show(default)}, which is none of the prompts")
    return prompts, default


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
