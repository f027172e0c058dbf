"""Budgets that keep the package readable. Raise one only in a commit that gives the reason."""

from __future__ import annotations

import ast
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from test_house import FILES, ROOT, TREES, imports, room, shown

LINES = {
    ".": 1850,
    "cache": 4050,
    "chat": 6850,
    "cli": 5550,
    "config": 1700,
    "embeddings": 2700,
    "engine": 4250,
    "export": 4000,
    "loader": 6050,
    "model": 750,
    "ops": 8850,
    "runner": 2400,
    "server": 8300,
    "spec_decode": 1150,
    "vision": 1150,
}
"""Lines of Python of each package, and of the files beside them."""
FILES_AT_MOST = 300
MEDIAN_WIDTH, LONG_WIDTH = 46, 100
"""Characters of code lines: the median, and the width that nine of ten lines do not reach."""
METHODS = 20
MANY_METHODS = {"deltic/session.py Session": 25}
"""The public object to which tokens go in and logits come out: its methods are what users call."""
BACKEND_IMPORTS = {
    "deltic/cache/offload/identity.py deltic.ops.cpu.library.LEVELS",
    "deltic/cache/offload/identity.py deltic.ops.cpu.library.load",
    "deltic/cache/tensors.py deltic.ops.cuda.staging.on_device",
    "deltic/cli/bench.py deltic.ops.cpu.use_torch_threads",
    "deltic/cli/doctor_checks.py deltic.ops.cpu.library",
    "deltic/embeddings/bert.py deltic.ops.cpu.encoder.encoder_run",
    "deltic/embeddings/bert.py deltic.ops.cpu.kernels.linear",
    "deltic/embeddings/bert.py deltic.ops.cpu.library.ThreadPool",
    "deltic/embeddings/bert.py deltic.ops.cpu.missing",
    "deltic/embeddings/bert.py deltic.ops.cpu.pool_of",
    "deltic/embeddings/bert.py deltic.ops.cpu.torch_threads",
    "deltic/embeddings/bert.py deltic.ops.cuda.encoder.encoder_run",
    "deltic/engine/aot.py deltic.ops.cpu.library.MatrixStruct",
    "deltic/engine/loading.py deltic.ops.cpu.missing",
    "deltic/engine/loading.py deltic.ops.cpu.use_torch_threads",
    "deltic/engine/loading.py deltic.ops.cuda.expert_offload.GpuExpertCache",
    "deltic/engine/loading.py deltic.ops.cuda.expert_offload.TileStore",
    "deltic/engine/loading.py deltic.ops.cuda.quantized",
    "deltic/engine/loading.py deltic.ops.cuda.serves_delta_logs",
    "deltic/engine/memory.py deltic.ops.cuda.quantized_moe.scratch_bytes",
    "deltic/engine/operator_profile.py deltic.ops.cuda.marks.Marks",
    "deltic/engine/operator_profile.py deltic.ops.cuda.marks.mark_of",
    "deltic/engine/operator_profile.py deltic.ops.cuda.marks.operator_of",
    "deltic/engine/packed_weights.py deltic.ops.cpu.missing",
    "deltic/engine/packed_weights.py deltic.ops.cuda.expert_offload.pinned_form",
    "deltic/engine/packed_weights.py deltic.ops.cuda.kernel_config.knows_sizes",
    "deltic/engine/packed_weights.py deltic.ops.cuda.quantized_moe.knows_packed",
    "deltic/engine/packed_weights.py deltic.ops.cuda.quantized",
    "deltic/model/draft_vocabulary.py deltic.ops.cuda.staging.on_device",
    "deltic/spec_decode/proposers.py deltic.ops.cuda.staging.row_keys",
}
"""Imports of `ops.cuda` and `ops.cpu` outside of `ops/`, `runner/` and `loader/` that are still there."""
WORDS = {
    "nobody": 4,
    "whoever": 0,
    "somebody": 0,
    "anew": 13,
    "thereof": 0,
    "gives way": 1,
    "is told": 1,
    "are told": 0,
    "what is left": 0,
    "as of": 7,
    "of which": 25,
    "those that": 28,
    "whether": 25,
}
"""Words that make two readings necessary, and how often docstrings, comments and messages may still have them."""


def texts(path: Path) -> Iterator[str]:
    """Comments and strings of a file."""
    source = path.read_text(encoding="utf-8")
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    yield from (token.string for token in tokenize.generate_tokens(StringIO(source).readline) if token.type in kinds)


def code_lines(path: Path, tree: ast.Module) -> Iterator[str]:
    """Lines that are neither blank nor comments nor docstrings."""
    docstrings = set[int]()
    for node in ast.walk(tree):
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
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(shown(path))
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_classes_have_few_public_methods() -> None:
    many = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = len({name for name in methods if not name.startswith("_")})
                name = f"{shown(path)} {node.name}"
                if public > MANY_METHODS.get(name, METHODS):
                    many[name] = public
    assert not many


def test_backends_are_imported_by_runner_and_loader_alone() -> None:
    found = {f"{shown(path)} {name}" for path, tree in TREES.items() if room(path) not in ("ops", "runner", "loader")
             for _, name in imports(tree) if name.startswith(("deltic.ops.cuda", "deltic.ops.cpu"))}
    assert found <= BACKEND_IMPORTS


def test_words_are_plain() -> None:
    found = Counter[str]()
    for path in FILES:
        for text in texts(path):
            for word in WORDS:
                found[word] += len(re.findall(rf"\b{word}\b", text, re.IGNORECASE))
    assert not {word: count for word, count in found.items() if count > WORDS[word]}
