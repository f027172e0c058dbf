"""The C interface equals deltic.h, for Python and for the example programs in C and Rust."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import conftest
import device_abi
import pytest
from native_pools import naming

from deltic.config.engine import CPU_LEVELS
from deltic.errors import ConfigError
from deltic.loader.gguf.blocks import BY_NAME
from deltic.ops.cpu import library, missing
from deltic.ops.quantized import PANEL
from deltic.params import PAGE, RING

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "native"
PLACE = Path(library.__file__).parent
"""Directory of the installed library and header."""
HEADER = re.sub(r"/\*.*?\*/", " ", (ROOT / "csrc" / "deltic.h").read_text(encoding="utf-8"), flags=re.DOTALL)
FUNCTIONS = {name: (result.split(), arguments) for result, name, arguments in re.findall(
    r"^(\w[\w \n]*?[ *]+)(deltic_\w+)\(([^)]*)\);", HEADER, re.MULTILINE)}
STRUCTS = {str(kind.__doc__).strip("`."): kind for kind in (*vars(library).values(), device_abi.DeviceProperties)
           if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure}
"""Python's structs by their C names."""
SIGNATURES = library._SIGNATURES | device_abi.SIGNATURES
C_FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-pedantic", "-Werror")
NUMBERS: dict[Any, str] = {ctypes.c_int: "int", ctypes.c_int64: "int64_t", ctypes.c_float: "float"}
GCC, RUSTC = shutil.which("gcc"), shutil.which("rustc")
needs_gcc = pytest.mark.skipif(not GCC, reason="there is no gcc")
needs_rustc = pytest.mark.skipif(not RUSTC, reason="there is no rustc")


def run(*command: object, **options: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


Built = Callable[[str], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Gives the example in C or Rust, compiled once against the installed library."""
    link, place = ("-L", PLACE, "-ldeltic", f"-Wl,-rpath,{PLACE}"), tmp_path_factory.mktemp("examples")

    @cache
    def build(language: str) -> Path:
        target = place / f"decode-{language}"
        if language == "c":
            run(GCC, *C_FLAGS, EXAMPLES / "decode.c", "-I", PLACE, *link, "-o", target)
        else:
            run(RUSTC, "--edition", "2021", "-O", "-D", "warnings", EXAMPLES / "decode.rs", "-L", PLACE, "-C",
                f"link-arg=-Wl,-rpath,{PLACE}", "-o", target)
        return target

    return build


# Examples


LANGUAGES = [pytest.param("c", marks=needs_gcc), pytest.param("rust", marks=needs_rustc)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_example_runs_at_every_level(built: Built, language: str) -> None:
    """The program fails if a token's result depends on its batch; the ids do not depend on the threads either."""
    program = built(language)
    for level in range(library.library().deltic_best_level() + 1):
        ids = run(program, 1, level).split()
        assert len(ids) == 30 and len(set(ids)) > 5 and all(0 <= int(id) < 500 for id in ids)
        assert run(program, 3, level).split() == ids


@needs_gcc
@needs_rustc
def test_both_examples_print_the_same_ids(built: Built) -> None:
    assert run(built("c")) == run(built("rust"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_example_visits_every_device(built: Built, language: str) -> None:
    """All devices of the library; the program fails if a device returns other numbers."""
    done = subprocess.run([built(language)], capture_output=True, text=True, check=True)
    devices = device_abi.Devices(PLACE / "libdeltic.so")
    names = [devices.get(device).name.decode() for device in range(devices.count())]
    devices.close()
    assert re.findall(r"^device (\d+): (.+), \d+ of \d+ MiB free$", done.stderr, re.MULTILINE) == [
        (str(device), name) for device, name in enumerate(names)]


@pytest.mark.parametrize("language", [LANGUAGES[0], pytest.param("rust", marks=[needs_rustc, pytest.mark.slow])])
def test_commands_of_the_examples_page(tmp_path: Path, built: Built, language: str) -> None:
    first, *blocks = re.findall(r"```sh\n(.*?)```", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    script = first + blocks[["c", "rust"].index(language)]
    shutil.copytree(EXAMPLES, tmp_path / "examples" / "native")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(PLACE.parents[2])}
    assert run("bash", "-ec", script, cwd=tmp_path, env=environment) == run(built(language))


@pytest.mark.parametrize("language", LANGUAGES)
def test_example_refuses_unknown_levels(built: Built, language: str) -> None:
    program = built(language)
    for level in ("-1", "99"):
        done = subprocess.run([program, "1", level], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "no such level" in done.stderr and not done.stdout


# The header


def test_header_is_installed_with_the_library() -> None:
    assert (PLACE / "deltic.h").read_bytes() == (ROOT / "csrc" / "deltic.h").read_bytes()


def test_header_is_parsed_completely() -> None:
    assert {"deltic_abi", "deltic_pool_new", "deltic_forward"} <= set(FUNCTIONS)
    assert len(FUNCTIONS) == len(set(re.findall(r"\bdeltic_\w+(?=\()", HEADER)))
    assert set(STRUCTS) == set(re.findall(r"^\} (deltic_\w+);", HEADER, re.MULTILINE))


@needs_gcc
def test_struct_layouts_are_equal(tmp_path: Path) -> None:
    """Sizes, and the offset, size and kind of every field."""
    lines, expected = [], []
    for name, kind in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(kind)}")
        for field, form in ((entry[0], entry[1]) for entry in kind._fields_):
            at = f"(({name} *)0)->{field}"
            lines.append(f'printf("{name}.{field} %zu %zu %s\\n", offsetof({name}, {field}), sizeof({at}), '
                         f'_Generic({at}, int64_t: "int64_t", float: "float", default: "other"));')
            place = getattr(kind, field)
            expected.append(f"{name}.{field} {place.offset} {place.size} {NUMBERS.get(form, 'other')}")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "deltic.h"\nint main(void) {\n'
                      + "\n".join(lines) + "\nreturn 0;\n}\n")
    run(GCC, *C_FLAGS, "-I", ROOT / "csrc", source, "-o", program)
    assert run(program).splitlines() == expected


def in_c(form: Any) -> str:
    """A ctypes type as the header writes it, void * for any pointer but those to structs."""
    if form in NUMBERS:
        return NUMBERS[form]
    pointed = getattr(form, "_type_", None)
    return f"{str(pointed.__doc__).strip('`.')} *" if isinstance(pointed, type) else "void *"


def declared(parameter: str, known: set[str]) -> str:
    """The same of a parameter in the header."""
    words = parameter.replace("*", " * ").replace("const", " ").split()
    if "*" not in words:
        return words[0]
    return f"{words[0]} *" if words[0] in known else "void *"


def test_python_signatures_equal_the_header() -> None:
    for name, (result, arguments) in SIGNATURES.items():
        words, text = FUNCTIONS[name]
        parameters = [] if text == "void" else [declared(part, set(STRUCTS)) for part in text.split(",")]
        assert [in_c(form) for form in arguments] == parameters, name
        assert ("void" if result is None else in_c(result)) == ("void *" if "*" in words else words[0]), name


def test_every_declared_function_is_exported() -> None:
    loaded = library.library()
    assert not [name for name in FUNCTIONS if not hasattr(loaded, name)]


def test_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a library that is too old to have the function."""
    loaded, path, compiled = library.library(), PLACE / "libdeltic.so", library._COMPILED
    for wanted in (wrong for name, number in compiled.items()
                   for wrong in ({name: number + 1}, {name: number, "deltic_unheard_of": 1})):
        monkeypatch.setattr(library, "_COMPILED", wanted)
        message = r"compiled from other sources .* instead of \d+; rebuild it \(pip"
        with naming(wanted), pytest.raises(ConfigError, match=message):
            library._check_compiled(loaded, path)


def test_suite_reports_a_stale_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale() -> None:
        raise ConfigError("it was compiled from other sources")

    assert conftest.library_fault(True) is None
    monkeypatch.setattr(library, "load", lambda: "the native kernels were not compiled")
    assert "not compiled; or run `python hatch_build.py`" in str(conftest.library_fault(True))
    assert conftest.library_fault(False) is None  # torch serves all there
    monkeypatch.setattr(library, "load", stale)
    assert conftest.library_fault(False) == "it was compiled from other sources"


def test_constants_agree() -> None:
    rust = (EXAMPLES / "decode.rs").read_text(encoding="utf-8")
    defined = {f"deltic_{name.lower()}": int(number)
               for name, number in re.findall(r"#define DELTIC_(\w+) (\d+)", HEADER)}
    assert defined == library._COMPILED == {name: getattr(library.library(), name)() for name in defined}
    assert (defined["deltic_page"], defined["deltic_ring"], defined["deltic_panel"]) == (PAGE, RING, PANEL)
    assert f"pub const ABI: c_int = {defined['deltic_abi']};" in rust
    types = {name: int(number) for name, number in re.findall(r"DELTIC_(\w+) = (\d+)", HEADER)}
    of_files = {name: number for name, number in types.items() if number < 1000}  # INT4 is a type of K/V alone
    assert len(of_files) > 10 and all(BY_NAME[name].id == number for name, number in of_files.items())
    levels = re.findall(r"DELTIC_(\w+)", re.findall(r"enum \{( DELTIC_PORTABLE[^}]*)\}", HEADER)[0])
    assert levels.pop() == "LEVELS"
    x86 = tuple(level.removesuffix("_LEVEL").lower() for level in levels)
    names = re.findall(r"DELTIC_(\w+)", re.findall(r"enum \{( DELTIC_ARM_PORTABLE[^}]*)\}", HEADER)[0])
    arm = tuple(name.removeprefix("ARM_").lower() for name in names)
    assert (*x86, *arm[1:]) == CPU_LEVELS[1:] and library.LEVELS in (x86, arm)
    build = runpy.run_path(str(ROOT / "hatch_build.py"), run_name="hatch_build")
    assert (tuple(build["LEVELS"]), tuple(build["ARM_LEVELS"])) == (x86, arm)
