"""How a model's hidden states become vectors, and what is put before its texts: the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from deltic.config.reading import flag
from deltic.errors import ModelError, RequestError, show
from deltic.loader.files import open_plain, read_json

POOLINGS: Final = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
"""Where a model has several, their vectors are put one after another."""
_MODES: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken"}
"""Older files have flags, which count in this order."""
_LIMITS: Final = tuple(f"sentence_{family}_config.json" for family in ("bert", "roberta", "xlm-roberta"))
"""What sentence-transformers has called one file."""
_MOST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """pooling: of POOLINGS. with_prompt: the prompt's tokens count in it. dense: directories of layers that follow.
    prompts: what is put before a text, by names such as `query`; default: the one for texts of no kind.
    max_length: tokens of a text, None: as many as the model has positions. lower: texts are made lower case."""

    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = True
    with_prompt: bool = True
    dense: tuple[Path, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    max_length: int | None = None
    lower: bool = False

    def prompt(self, kind: str | None) -> str:
        """What is put before texts of this kind: `query`, `passage` (or `document`), another name that the model has,
        or None; RequestError for any other. Models without a prompt for queries or passages have texts as they are."""
        names = {"query": ("query",), "passage": ("passage", "document", "corpus"),
                 "document": ("document", "passage", "corpus")}
        known = list(dict.fromkeys([*names, *self.prompts]))
        if kind is not None and kind not in known:
            raise RequestError(f"kind must be one of {', '.join(known)}, or None, not {show(kind)}", "kind")
        wanted = (self.default or "",) if kind is None else names.get(kind, (kind,))
        return next((self.prompts[name] for name in wanted if name in self.prompts), "")


def read_recipe(directory: Path, pooling: str = "mean") -> Recipe:
    """What the directory says; without modules.json the pooling that is given, normalised.

    ModelError names the file and key that cannot be used.
    """
    recipe, path = Recipe((pooling,)), directory / "modules.json"
    if path.is_file():
        recipe = _from_modules(directory, path)
    place = next((place for name in _LIMITS if (place := directory / name).is_file()), directory / _LIMITS[0])
    limits = _optional(place)
    longest = limits.get("max_seq_length")
    if longest is not None and (type(longest) is not int or not 1 <= longest <= _MOST):
        raise ModelError(f"{place}: max_seq_length must be an integer from 1 to {_MOST}, not {show(longest)}")
    return replace(recipe, max_length=longest or _tokenizer_length(directory),
                   lower=flag(limits, "do_lower_case", False),
                   **_prompts(directory / "config_sentence_transformers.json"))


def _tokenizer_length(directory: Path) -> int | None:
    """Tokens that the tokenizer's files allow; tokenizers without a bound have a number beyond all bounds."""
    length = _optional(directory / "tokenizer_config.json").get("model_max_length")
    return length if type(length) is int and 1 <= length <= _MOST else None


def _from_modules(directory: Path, path: Path) -> Recipe:
    recipe, dense = Recipe(("cls",), normalize=False), list[Path]()
    for number, (kind, place) in enumerate(_modules(path)):
        if kind == "Transformer" and number == 0:
            continue
        if kind == "Pooling" and number == 1:
            recipe = replace(recipe, **_pooling(place / "config.json"))
        elif kind == "Dense" and not recipe.normalize:
            dense.append(place)
        elif kind == "Normalize":
            refuse_other_names(place / "config.json", _optional(place / "config.json"))
            recipe = replace(recipe, normalize=True)
        else:
            raise ModelError(f"{path}: the module {show(kind)} is not supported at place {number}: a model is a "
                             "Transformer, a Pooling, then Dense and Normalize")
    return replace(recipe, dense=tuple(dense))


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Kind and directory of each module."""
    import json

    try:
        with open_plain(path) as file:
            entries = json.load(file)
        found = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path} is no list of modules with type and path ({error}); download it again") from error
    for _, place in found:
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ModelError(f"{path} names the module {show(place)}, which is not beside it")
    return [(kind, path.parent / place) for kind, place in found]


def _pooling(path: Path) -> dict[str, Any]:
    config = read_json(path)
    flags, named = [mode for key, mode in _MODES.items() if flag(config, key, False)], config.get("pooling_mode")
    given = flags if named is None else named if isinstance(named, list) else [named]
    modes = tuple("mean_sqrt_len" if mode == "mean_sqrt_len_tokens" else mode for mode in given)
    if not modes or not all(mode in POOLINGS for mode in modes):
        raise ModelError(f"{path}: the pooling must be one of {', '.join(POOLINGS)}, not {show(given)}")
    return {"pooling": modes, "with_prompt": flag(config, "include_prompt", True)}


def refuse_other_names(path: Path, config: Mapping[str, Any]) -> None:
    """ModelError for a module that reads or writes something else than a text's vector."""
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelError(f"{path}: {key} {show(config[key])} is not supported, only 'sentence_embedding'")


def _prompts(path: Path) -> dict[str, Any]:
    config = _optional(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be texts by their names, not {show(prompts)}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ModelError(f"{path}: default_prompt_name is {show(default)}, which is none of the prompts")
    return {"prompts": prompts, "default": default}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
