"""No hidden state: the results of a model depend only on its own objects, not on other models or earlier calls in the
process. Everything that a whole process shares is listed here with a reason."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_house import ROOT, TREES, functions, shown, walk

from deltic.ops.cpu import library, missing

CACHES = {
    **{f"deltic/export/tvm/kernels.py {name}": "source of code, which nobody changes" for name in (
        "add_norm", "delta_gates", "delta_rule", "embed", "gated_norm", "heads", "linear", "linear_one", "output_gate",
        "row", "short_conv", "state_copy", "swiglu")},
    **{f"deltic/export/tvm/network.py {name}": "source of code, which nobody changes" for name in (
        "add_layer_norm", "attention", "bias_gelu", "embeddings")},
    **{f"deltic/export/tvm/gpu_kernels.py {name}": "source of code, which nobody changes" for name in (
        "delta_rule", "linear")},
    "deltic/server/routing.py _schemas": "the schemas of a class, which are constant",
    "deltic/export/tvm/runtime.py tvm_runtime": "a library that can be loaded once",
    "deltic/cache/offload/host.py _copy_stream": "a stream of a device, which orders what is put into it",
    "deltic/cache/offload/host.py _staging": "pinned memory through which a thread copies",
    **{f"deltic/ops/cuda/card.py {name}": "a record, which nobody changes" for name in ("card_of", "default_card")},
    "deltic/ops/cuda/quantized.py _bytes_of_rows": "a constant that is never written to",
    "deltic/ops/cuda/staging.py _buffers": "pinned memory that small tensors go through",
    "deltic/cache/item_copies.py _side_stream": "a stream of a device, which orders what is put into it",
    "deltic/ops/kv.py _signs": "a constant that is never written to",
    "deltic/ops/reference.py hadamard": "a constant that is never written to",
    "deltic/ops/cpu/library.py load": "the library is loaded once; it has no state of its own",
    "deltic/ops/cuda/driver.py _capture_stream": "a stream of torch's, which lives as long as the process",
    "deltic/ops/cuda/driver.py _driver": "a library without a state that we know of",
    "deltic/ops/cuda/driver.py _launcher": "the same library",
    "deltic/loader/formats/fp8.py _value_pairs": "a constant that is never written to",
    "deltic/ops/cuda/nvrtc.py library": "a library without a state that we know of",
    "deltic/ops/cuda/driver.py load_module": "compiled code",
    "deltic/ops/cuda/driver.py why_not_compiled": "a source compiles or not",
    "deltic/ops/cuda/state_delta_log.py _module": "compiled code",
    "deltic/ops/cuda/staging.py _module": "compiled code",
    "deltic/ops/cuda/sample.py _module": "compiled code",
    "deltic/ops/cuda/encoder.py _module": "compiled code",
    "deltic/ops/cuda/sample.py _drawer": "room for one call at a time, of one thread each",
    "deltic/ops/cuda/sample.py _drawer_of_parts": "the same, on several devices",
    "deltic/ops/mlx/metal.py _kernel": "compiled code",
    "deltic/runner/input_batch.py _no_appends": "a constant that is never written to",
    "deltic/runner/sampling.py _table": "a constant that is never written to",
    "deltic/runner/sampling.py _greedy": "constants that are never written to",
    "deltic/ops/torch/basic.py frequencies": "a constant that is never written to",
    "deltic/ops/memory.py guard": "torch has one memory of a device for the process",
    "deltic/server/page/__init__.py _files": "files of the package, as they are",
    "deltic/chat/conversation.py _render_alone": "a pure function of texts, few of them kept",
    "deltic/chat/output_router.py _pattern": "a compiled expression",
    "deltic/chat/template.py _compile": "a compiled template",
}
"""Functions that cache their results."""
CHANGED = {
    "deltic/export/tvm/runtime.py sys": "while one package is imported, which would import torch if it could",
    "deltic/cli/torch_import.py sys": "a command imports a part of torch",
    "deltic/cli/process.py sys": "a command without standard streams gets some",
    "deltic/ops/cuda/tensor_parallel.py os": "how NCCL reaches memory, which changes no result",
    "deltic/ops/mlx/memory.py _whole": "the memory behind a tensor, found by its address while the tensor lives",
    "deltic/ops/cuda/driver.py cls": "a class of arguments names its fields when it is made",
}
"""Functions that change objects of a module or a class."""
MADE = {
    "deltic/export/tvm/artifact.py Lock": "TVM has one cache of parameters for the process",
    "deltic/cache/offload/types.py AcceptAllItems": "it has no fields",
    "deltic/ops/mlx/memory.py WeakValueDictionary": "the memory behind tensors, by its address",
    "deltic/chat/template.py Watchdog": "deadlines of what threads render, and a thread that waits for them",
}
"""Objects of classes that are not frozen, made where a module is defined."""
SETTINGS = {
    "deltic/export/executorch/export.py simplefilter": "until the export is over, which takes a process of its own",
    "deltic/cli/doctor.py simplefilter": "until the check is over, in a process of its own",
    "deltic/runner/memory.py mallopt": "where freed memory goes: no results depend on it",
    "deltic/ops/cpu/__init__.py set_num_threads": "torch counts per thread; every step or batch sets its model's",
    "deltic/server/connections.py setrlimit": "a server is a process of its own",
    "deltic/server/run.py setswitchinterval": "a server is a process of its own, and takes it back",
    "deltic/vision/decoder_process.py nice": "in the child, a process of its own",
    "deltic/vision/decoder_process.py setrlimit": "in the child, a process of its own",
    "deltic/threads.py setpriority": "of the calling thread alone",
    "deltic/loader/dummy.py manual_seed": "of a generator of its own",
}
"""Calls that change the state of the process."""
VARIABLES = {
    "completed": "of the compiler's start code", "__dso_handle": "of the compiler's start code",
    "__TMC_END__": "of the compiler's start code", "DW.ref": "addresses for exceptions",
    "_ZN6deltic12_GLOBAL__N_1L10kProcessorE": "what the processor can do, read when the library is loaded",
    "_ZZNSt8__detail18__waiter_pool_base": "how the standard library lets threads sleep",
}
"""Beginnings of the names of variables that the native library may have."""

SETTERS = frozenset((
    "set_num_threads", "set_num_interop_threads", "manual_seed", "seed", "set_default_dtype", "set_default_device",
    "set_grad_enabled", "set_float32_matmul_precision", "use_deterministic_algorithms", "set_flush_denormal",
    "setswitchinterval", "setrecursionlimit", "putenv", "unsetenv", "chdir", "umask", "setlocale", "nice",
    "setpriority", "setrlimit", "stack_size", "simplefilter", "filterwarnings", "mallopt", "basicConfig", "settrace",
    "setprofile", "set_start_method",
))
MUTATORS = frozenset((
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear",
    "sort", "reverse", "appendleft", "popleft", "move_to_end", "difference_update", "intersection_update",
    "symmetric_difference_update", "__setitem__", "__setattr__",
))
MUTABLE = frozenset((
    "defaultdict", "OrderedDict", "Counter", "deque", "bytearray", "WeakSet", "WeakValueDictionary",
    "WeakKeyDictionary", "Lock", "RLock", "Event", "Condition", "Semaphore", "local", "Queue", "SimpleQueue",
    "LifoQueue", "ThreadPoolExecutor", "ContextVar", "Random", "count", "cycle",
))


# Python


def root_of(node: ast.expr) -> tuple[str, int] | None:
    """The name that a chain of attributes and items begins with, and the length of the chain."""
    length = 0
    while isinstance(node, ast.Attribute | ast.Subscript):
        node, length = node.value, length + 1
    return (node.id, length) if isinstance(node, ast.Name) else None


@cache
def bound(node: ast.AST) -> frozenset[str]:
    """The names that a statement binds, without those inside of functions and classes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset({node.name})
    names = bound_below(node)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return names | {node.id}
    if isinstance(node, ast.alias):
        return names | {(node.asname or node.name).split(".")[0]}
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        return names | {node.name}
    return names | {node.arg} if isinstance(node, ast.arg) else names


def bound_below(node: ast.AST) -> frozenset[str]:
    """The names that the parts of a module, a function or a statement bind."""
    return frozenset[str]().union(*map(bound, ast.iter_child_nodes(node)))


_NOT_ENTERED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Name, ast.Constant, ast.expr_context)


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below but those of functions inside."""
    waiting = [node]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            yield child
            if not isinstance(child, _NOT_ENTERED):
                waiting.append(child)


_WRITES = (ast.Assign, ast.Delete, ast.AugAssign, ast.AnnAssign, ast.Call, ast.Global)
"""Nodes that can change an object."""


def targets(node: ast.AST) -> list[ast.expr]:
    """The attributes and items that a statement writes to."""
    found = node.targets if isinstance(node, ast.Assign | ast.Delete) else (
        [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else [])
    flat = [part for one in found for part in (one.elts if isinstance(one, ast.Tuple | ast.List) else [one])]
    return [one for one in flat if isinstance(one, ast.Attribute | ast.Subscript)]


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines at which a function changes something that belongs to a module or a class, and its name."""
    outer = bound_below(tree)
    modules = {name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in bound(node)
               if not name.isupper()}

    def within(body: ast.AST, known: set[str], function: bool) -> Iterator[tuple[int, str]]:
        own = known | (bound_below(body) - {"cls"} if function else set())
        for node in inner(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from within(node, own, True)
            elif function and isinstance(node, _WRITES):
                if isinstance(node, ast.Global):
                    yield node.lineno, "global"
                written = [(root_of(target), 0) for target in targets(node)]
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                    written.append((root_of(node.func), 1))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                    written.append((root_of(node.args[0]), 0))
                for found, called in written:
                    # a module's own functions may be called anything
                    if (found and found[0] not in own and (found[0] in outer or found[0] == "cls")
                            and not (called and found[0] in modules and found[1] == 1)):
                        yield node.lineno, found[0]

    yield from within(tree, set(), False)


def caches(tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in (
                    "cache", "lru_cache", "memoize"):
                yield function.name


def name_of(call: ast.expr) -> str:
    while isinstance(call, ast.Subscript):  # dict[str, int]()
        call = call.value
    return call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")


def is_frozen(node: ast.ClassDef) -> bool:
    if any(name_of(base) in ("NamedTuple", "Enum", "IntEnum", "StrEnum", "Protocol") for base in node.bases):
        return True
    return any(isinstance(one, ast.Call) and name_of(one.func) == "dataclass"
               and any(word.arg == "frozen" for word in one.keywords) for one in node.decorator_list)


CLASSES = {node.name: is_frozen(node) for tree in TREES.values() for node in walk(tree)
           if isinstance(node, ast.ClassDef)}


def made(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Objects that can change, made where a module or a class is defined."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from made(node.body)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for part in (value, *inner(value)) if value else ():
            if isinstance(part, ast.Call) and (name_of(part.func) in MUTABLE or not CLASSES.get(name_of(part.func), 1)):
                yield node.lineno, name_of(part.func)


def test_functions_change_no_module_state() -> None:
    found = {f"{shown(path)} {name}": line for path, tree in TREES.items() for line, name in changes(tree)}
    assert found.keys() == CHANGED.keys(), found


def test_modules_hold_no_mutable_objects() -> None:
    found = {f"{shown(path)} {name}": line for path, tree in TREES.items() for line, name in made(tree.body)}
    assert found.keys() == MADE.keys(), found


def test_cached_functions_are_listed() -> None:
    found = {f"{shown(path)} {name}" for path, tree in TREES.items() for name in caches(tree)}
    assert found == CACHES.keys()


def test_process_wide_settings_are_listed() -> None:
    found = {f"{shown(path)} {name_of(node.func)}" for path, tree in TREES.items() for node in walk(tree)
             if isinstance(node, ast.Call) and name_of(node.func) in SETTERS}
    assert found == SETTINGS.keys()


def test_the_rule_notices_a_change() -> None:
    for body in (
            "global X\n    X = 1", "X['a'] = 1", "X.a = 1", "X.append(1)", "X.a.add(1)", "del X[0]", "X[0] += 1",
            "Y.b = 1", "os.environ['a'] = 'b'", "os.environ.update(a='b')", "setattr(Y, 'b', 1)", "X.a, b = 1, 2",
            "def inner():\n        X.clear()"):
        tree = ast.parse(f"import os\nX = []\nclass Y:\n    b = 0\ndef f(a):\n    {body}")
        assert len(list(changes(tree))) == 1, body


def test_the_rule_ignores_local_objects() -> None:
    for body in (
            "X = []\n    X.append(1)", "a.append(1)", "for X in a:\n        X.b = 1", "os.remove(a)",
            "b = X.copy()\n    b.add(1)", "with a as X:\n        X[0] = 1"):
        assert not list(changes(ast.parse(f"import os\nX = []\ndef f(a):\n    {body}"))), body


def test_the_rule_notices_a_change_by_a_class() -> None:
    tree = ast.parse("class Y:\n    b = 0\n    @classmethod\n    def f(cls):\n        cls.b = 1")
    assert list(changes(tree)) == [(5, "cls")]


def test_the_rule_notices_what_is_made() -> None:
    tree = ast.parse("A = WeakSet()\nclass B:\n    c: Any = threading.Lock()\nD = defaultdict[str, int](int)\n"
                     "E = Path()")
    assert [name for _, name in made(tree.body)] == ["WeakSet", "Lock", "defaultdict"]
    assert [name for _, name in made(ast.parse("A = Arena()\nB = SamplingParams()").body)] == ["Arena"]
    assert list(caches(ast.parse("@cache\ndef a(): pass\n@functools.lru_cache(1)\ndef b(): pass"))) == ["a", "b"]


# C++ and CUDA


SOURCES = sorted([*ROOT.parent.glob("csrc/*.[ch]*"), *ROOT.glob("ops/**/*.cu*")])
DECLARES_NO_VARIABLE = re.compile(r"(using|typedef|struct|union|class|enum|template|static_assert|namespace|extern|"
                                  r"friend|public|private|asm)\b")


def statements(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the text before each `;` and `{`, and True outside of functions and classes."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n\\]|\\.)*|"(?:[^"\\\n]|\\.)*"', " ", text,
                  flags=re.DOTALL | re.MULTILINE)
    scopes, start = [True], 0
    for found in re.finditer(r"[;{}]", text):
        words = " ".join(text[start:found.start()].split())
        start = found.end()
        if found[0] == "}":
            scopes.pop()
            continue
        if words:
            yield words, scopes[-1]
        if found[0] == "{":
            scopes.append(scopes[-1] and bool(re.match(r"(inline )?namespace\b|extern$", words)))


def variables(text: str) -> Iterator[str]:
    """Declarations of variables that live as long as the program and can change."""
    for words, outside in statements(text):
        declared = re.split(r"[=({\[]", words)[0]
        is_function = "(" in words and "=" not in words.split("(")[0]
        if is_function or re.search(r"\b(const|constexpr|__constant__)\b", declared):
            continue
        if re.search(r"\b(static|thread_local)\b", declared) or (
                outside and " " in declared and not DECLARES_NO_VARIABLE.match(words)):
            yield words


def test_native_sources_have_no_variables_of_the_process() -> None:
    found = {f"{path.name}: {words}" for path in SOURCES for words in variables(path.read_text(encoding="utf-8"))}
    assert len(SOURCES) > 20 and not found


def test_the_rule_notices_a_variable() -> None:
    for text in (
            "static int a;", "namespace b { int a = 0; }", "namespace { std::atomic<int> a{0}; }",
            "thread_local int a;", "void f() { static int a = 0; }", "struct S { static int a; };",
            "template <int N> struct S { static float a[N]; };",
            'extern "C" { int a; }', "static std::vector<int> a = {3};"):
        assert len(list(variables(text))) == 1, list(statements(text))


def test_the_rule_ignores_constants_and_local_variables() -> None:
    for text in (
            "constexpr int a = 0;", "static const char *const a = 0;", "static int f(int a);",
            "static inline int f() { return 1; }",
            "void f() { int a = 0; }", "struct S { int a; static constexpr int b = 1; };",
            "// static int a;\nusing A = int;"):
        assert not list(variables(text)), text


@pytest.mark.skipif(bool(missing()) or not shutil.which("objdump"), reason="needs the library and objdump")
def test_the_native_library_has_no_variables_of_the_process() -> None:
    listed = subprocess.run(["objdump", "-t", Path(library.__file__).parent / "libdeltic.so"], capture_output=True,
                            text=True, check=True).stdout
    names = re.findall(r"^\S+ .{7} \.(?:t?bss|t?data)\s+\S+\s+(\S+)$", listed, re.MULTILINE)
    assert "__dso_handle" in names
    assert not [name for name in names if not name.startswith(tuple(VARIABLES)) and not name.startswith(".")]
