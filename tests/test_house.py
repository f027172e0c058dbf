"""The structure of the package: directions of imports, sizes of files and functions, complete backends."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import deltic
from deltic.chat.processor import ChatConfig
from deltic.config import EngineConfig, Limits
from deltic.ops import Ops, backends, explain

ROOT = Path(deltic.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
NODES = {tree: list(ast.walk(tree)) for tree in TREES.values()}

_BASE = {"config", "errors", "params"}
_STEP = {"cache", "loader", "model", "ops", "threads", "vision", *_BASE}
ALLOWED = {
    "errors": set(), "threads": set(),
    "params": {"errors"},
    "config": {"errors", "params"},
    "ops": {"errors", "params"},
    "loader": {"ops", "threads", *_BASE},
    "model": {"ops", *_BASE},
    "cache": {"ops", "threads", *_BASE},
    "vision": _BASE,
    "chat": {"vision", *_BASE},
    "export": {"cache", "loader", "model", "ops", *_BASE},
    "runner": {"engine", "spec_decode", *_STEP},
    "spec_decode": {"engine", "runner", *_STEP},
    "engine": {"export", "runner", "spec_decode", *_STEP},
    "session": {"cache", "engine", "export", "ops", "runner", *_BASE},
    "llm": {"cache", "chat", "engine", "export", "runner", *_BASE},
    "embeddings": {"chat", "engine", "export", "loader", "ops", "runner", "threads", *_BASE},
    "server": {"cache", "chat", "embeddings", "engine", "llm", "threads", "vision", *_BASE},
    "llm_plugin": set(), "lm_eval_plugin": {"chat", "llm", "params"},
    "cluster": {"cache", "engine", "server", *_BASE},
    "cli": {"chat", "cluster", "embeddings", "engine", "export", "llm", "runner", "server", "spec_decode", *_STEP},
}
"""The packages that a package may import, besides itself."""


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def shown(path: Path) -> str:
    return str(Path("deltic") / path.relative_to(ROOT))


def walk(tree: ast.AST) -> Iterable[ast.AST]:
    """The nodes of a tree. Those of the package's modules are kept."""
    return NODES.get(tree) or ast.walk(tree)  # type: ignore[call-overload]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, also of those in functions."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_imports(path: Path, tree: ast.AST) -> list[str]:
    allowed = ALLOWED[room(path)] | {room(path)}
    wrong = []
    for line, name in imports(tree):
        parts = name.split(".")
        if parts[0] == "deltic" and parts[1] in ALLOWED and parts[1] not in allowed:
            wrong.append(f"{shown(path)}:{line} imports {name}")
    return wrong


INNER = [path for path in FILES if path.name not in ("__init__.py", "__main__.py") or path.parent != ROOT]


def test_imports_go_one_way() -> None:
    assert {room(path) for path in INNER} <= set(ALLOWED) | {"models"}
    wrong = [text for path in INNER if room(path) in ALLOWED for text in wrong_imports(path, TREES[path])]
    assert not wrong, "\n".join(wrong)


def test_the_rule_notices_a_wrong_import() -> None:
    tree = ast.parse("def f():\n    from deltic.model.decoder import Decoder\n    import deltic.chat.conversation")
    assert len(wrong_imports(ROOT / "cache" / "manager.py", tree)) == 2
    assert len(wrong_imports(ROOT / "engine" / "engine.py", tree)) == 1
    assert not wrong_imports(ROOT / "cli" / "run.py", tree)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def loaded_modules(path: Path, tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of the package that load with this one. Imports in functions and for type checkers do not count."""
    names = [name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
             for _, name in imports(ast.Module([node], []))]
    found = {name if name in known else name.rpartition(".")[0] for name in names}
    return (found & known) - {module_of(path)}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or nothing."""
    left = dict(graph)
    while ends := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ends:
            del left[name]
    return sorted(left)


def test_no_module_imports_itself_through_others() -> None:
    known = {module_of(path) for path in FILES}
    assert not cycle({module_of(path): loaded_modules(path, tree, known) for path, tree in TREES.items()})
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]


WITHOUT_TORCH = [
    "params", "errors", "config", "engine/scheduler", "engine/policy",
    *(f"cluster/{name}" for name in ("boundaries", "reachable", "router")),
    *(f"cache/{name}" for name in ("block_accounts", "block_pool", "handles", "manager", "memory_plan", "offload/tiers",
                                   "operations", "radix_tree")),
]


def test_policy_imports_no_torch() -> None:
    """Such modules can be tested by brute force, and a command line can be built without torch."""
    found = []
    for name in WITHOUT_TORCH:
        path = ROOT / name
        for file in path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]:
            found += [f"{shown(file)}:{line} {module}" for line, module in imports(TREES[file])
                      if module.split(".")[0] in ("torch", "numpy")]
    assert not found


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                            cwd=ROOT.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


HEAVY = ("torch", "starlette", "pydantic", "transformers", "huggingface_hub", "tokenizers", "numpy", "uvicorn",
         "jinja2", "rich")


def test_the_first_imports_are_light() -> None:
    loaded = python("import deltic, deltic.config, deltic.params\nfrom deltic import SamplingParams, DelticError\n"
                    f"import sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])")
    assert not loaded.split()


def test_the_public_names() -> None:
    assert deltic.__all__ == ["LLM", "DelticError", "Encoder", "Prompt", "RandomModel", "SamplingParams",
                              "Session", "__version__"]
    assert all(getattr(deltic, name) is not None for name in deltic.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", deltic.__version__)
    with pytest.raises(AttributeError, match="Engine"):
        _ = deltic.Engine


# Sizes


FILE_LINES, FUNCTION_LINES, PARAMETERS, LINE_WIDTH = 560, 60, 8, 120
ORACLE = {"deltic/ops/reference.py": 795}
"""The reference ops are one file on purpose, to be read beside the papers."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + bool(given.vararg) + bool(given.kwarg)


def test_files_are_small() -> None:
    lines = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {name: count for name, count in lines.items() if count > ORACLE.get(name, FILE_LINES)}


def test_functions_are_small() -> None:
    long = {f"{shown(path)}:{function.lineno} {function.name}": size for path, tree in TREES.items()
            for function in functions(tree)
            if (size := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES}
    assert not long


def test_functions_take_few_parameters() -> None:
    many = {f"{shown(path)} {function.name}": count for path, tree in TREES.items()
            for function in functions(tree) if (count := parameters(function)) > PARAMETERS}
    assert not many


def test_parameters_are_counted() -> None:
    function = next(functions(ast.parse("def f(self, a, /, b, *c, d=1, **e):\n    return 1\n")))
    assert parameters(function) == 5


# Backends


def test_every_backend_serves_every_op() -> None:
    known = backends()
    assert {"reference", "torch"} <= set(known)
    for name, ops in known.items():
        for entry in fields(Ops):
            assert callable(getattr(ops, entry.name)), f"{name} has no {entry.name}"
    assert set(explain(known["reference"]).values()) == {"reference"}


def test_the_reference_shares_no_code() -> None:
    """The reference and the backends that are compared with it share only records, the keyed noise and the order in
    which split columns are summed."""
    shared = tuple(f"deltic.ops.{name}" for name in ("types", "encoder", "mtp", "noise", "quantized", "slices"))
    wrong = [name for _, name in imports(TREES[ROOT / "ops" / "reference.py"])
             if name.startswith("deltic.ops.") and not name.startswith(shared)]
    assert set(wrong) <= {"deltic.ops.Ops"}


# Tests


def test_gpu_tests_need_few_packages() -> None:
    """`make test-gpu` runs with the Python of the machine, which may lack the clients and oracles of other tests. The
    imports of the GPU tests count, and those of the test modules that they import."""
    place = Path(__file__).parent
    files = [path.stem for path in place.glob("test_cuda_*.py")] + ["test_same_answer", "conftest"]
    seen, packages = set[str](), set[str]()
    while files:
        name = files.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = ast.parse((place / f"{name}.py").read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for found in {module.split(".")[0] for _, module in imports(tree)}:
            (files.append if (place / f"{found}.py").exists() else packages.add)(found)
    assert "test_cuda_kernels" in seen and packages - sys.stdlib_module_names == {
        "deltic", "torch", "numpy", "safetensors", "tokenizers", "PIL", "pytest", "hypothesis"}


# Words


def test_no_todo_markers() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|breakpoint\(|pdb")
    found = [f"{shown(path)}:{number}" for path in FILES
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if pattern.search(line)]
    assert not found


def test_messages_name_options_as_python_has_them() -> None:
    """In backquotes; the command line replaces them by options (`cli.parser.as_typed`)."""
    options = [*fields(EngineConfig), *fields(Limits), *fields(ChatConfig)]
    names = [option.name.replace("_", "-") for option in options] + ["chat-template"]
    typed = re.compile(rf"--(no-)?({'|'.join(names)})\b")
    found = []
    for path, tree in TREES.items():
        if room(path) in ("cli", "server", "export"):  # who reads these has typed a command
            continue
        docs = [node for node in walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        helps = [node for node in walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                 and node.func.id in ("_option", "_limit", "_device", "_memory", "_scheduling", "_weights", "_experts")]
        silent = {id(part) for node in (*docs, *helps) for part in ast.walk(node)}
        found += [f"{shown(path)}:{node.lineno}" for node in walk(tree) if id(node) not in silent
                  and isinstance(node, ast.Constant) and isinstance(node.value, str) and typed.search(node.value)]
    assert not found


def test_the_library_prints_nothing() -> None:
    found = [f"{shown(path)}:{node.lineno}" for path, tree in TREES.items() if room(path) not in ("cli", "server")
             for node in walk(tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert not found
