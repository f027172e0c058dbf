"""Budgets that keep the package readable. Raise one only in a commit that gives the reason."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from test_house import FILES, ROOT, TREES, imports, room, shown, walk

LINES = {
    ".": 2070,
    "cache": 6005,
    "chat": 7115,
    "cli": 5960,
    "cluster": 1725,
    "config": 2050,
    "embeddings": 2600,
    "engine": 3985,
    "export": 3950,
    "loader": 9435,
    "model": 1280,
    "ops": 14195,
    "runner": 4510,
    "server": 8675,
    "spec_decode": 1315,
    "vision": 1150,
}
"""Lines of Python of each package, and of the files beside them."""
FILES_AT_MOST = 324
MEDIAN_WIDTH, LONG_WIDTH = 46, 100
"""Characters of code lines: the median, and the width that nine of ten lines do not reach."""
METHODS = 20
DEVICE_FREE = {"cache", "chat", "config", "engine", "model", "server", "spec_decode", "llm", "session"}
"""Packages that ask `ops.capabilities` or `EngineConfig.on_gpu` instead of comparing the name of a device."""
WORDS = {
    "nobody": 2,
    "whoever": 0,
    "somebody": 0,
    "anew": 10,
    "thereof": 0,
    "gives way": 0,
    "is told": 0,
    "are told": 0,
    "what is left": 0,
    "as of": 0,
    "of which": 0,
    "those that": 8,
    "whether": 3,
    "so many": 3,
}
"""Words that make two readings necessary, and how often they may still occur."""


def code_lines(path: Path, tree: ast.Module) -> Iterator[str]:
    """Lines that are neither blank nor comments nor docstrings."""
    docstrings = set[int]()
    for node in walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in docstrings:
            yield line


def test_packages_keep_their_budgets() -> None:
    lines = Counter[str]()
    for path in FILES:
        name = room(path) if path.parent != ROOT else "."
        lines[name] += len(path.read_text(encoding="utf-8").splitlines())
    assert not {name: count for name, count in lines.items() if count > LINES[name]}
    assert len(FILES) <= FILES_AT_MOST


def test_lines_of_code_are_short() -> None:
    widths = sorted(len(line) for path, tree in TREES.items() for line in code_lines(path, tree))
    assert statistics.median(widths) <= MEDIAN_WIDTH and widths[len(widths) * 9 // 10] < LONG_WIDTH


def test_a_class_name_means_one_thing() -> None:
    found = defaultdict(set)
    for path, tree in TREES.items():
        for node in walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(shown(path))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_classes_have_few_public_methods() -> None:
    many = {}
    for path, tree in TREES.items():
        for node in walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = len({name for name in methods if not name.startswith("_")})
                name = f"{shown(path)} {node.name}"
                if public > METHODS:
                    many[name] = public
    assert not many


def test_backends_are_imported_by_runner_and_loader_alone() -> None:
    found = {f"{shown(path)} {name}" for path, tree in TREES.items() if room(path) not in ("ops", "runner", "loader")
             for _, name in imports(tree) if name.startswith(("deltic.ops.cuda", "deltic.ops.cpu"))}
    assert not found


def device_comparisons(tree: ast.AST) -> Iterator[int]:
    """Lines that compare with the name of a device type."""
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            parts = node.args
        elif isinstance(node, ast.Match):
            parts = [case.pattern.value for case in node.cases if isinstance(case.pattern, ast.MatchValue)]
        names = [one for part in parts for one in (part.elts if isinstance(part, ast.Tuple | ast.Set) else [part])]
        if any(isinstance(name, ast.Constant) and name.value in ("cpu", "cuda") for name in names):
            yield node.lineno


def test_devices_are_compared_in_runner_loader_and_ops_alone() -> None:
    found = [f"{shown(path)}:{line}" for path, tree in TREES.items() if room(path) in DEVICE_FREE
             for line in device_comparisons(tree)]
    assert not found
    code = "a == 'cpu'\nb.startswith('cuda')\nc in ('cpu', 'x')\nd = 'cpu'"
    assert [*device_comparisons(ast.parse(code))] == [1, 2, 3]


def test_words_are_plain() -> None:
    words = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    found = Counter(word.lower() for path in FILES for word in words.findall(path.read_text(encoding="utf-8")))
    assert not {word: count for word, count in found.items() if count > WORDS[word]}
