"""What a command imports, and the memory of an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from deltic.cli import torch_import

TESTED = version("torch").startswith(torch_import._TESTED) and torch.version.cuda is None
RUN = """
import json, sys
from deltic.cli import main
code = main(["run", "What is the capital of France?", "--temperature", "0"])
import torch
pending = [name for name, module in sys.modules.items() if "_deltic_pending" in vars(module)]
print(json.dumps({"code": code, "modules": sorted(sys.modules), "pending": pending}), file=sys.stderr)
"""
USE = """
import sys, threading
from deltic.cli.torch_import import quick_imports
with quick_imports():
    import torch
assert any("_deltic_pending" in vars(module) for module in sys.modules.values())
given = torch.tensor([1.0, 2.0, 3.0])
def linear(names=("Linear", "functional", "Module")):
    found.append([getattr(torch.nn, name) for name in names])
found, failed = [], []
threading.excepthook = failed.append
threads = [threading.Thread(target=linear) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8 and not failed, (found, failed)
class Softmax(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.softmax(x + 1, 0)
assert torch.equal(torch.export.export(Softmax(), (given,)).module()(given), given.softmax(0))
assert torch.equal(torch.vmap(lambda x: x * 2)(given), given * 2) and torch.vmap is torch.func.vmap
assert torch.cond is sys.modules["torch._higher_order_ops"].cond
assert (torch.empty(2, 3, device="meta") @ torch.empty(3, 2, device="meta")).shape == (2, 2)
assert torch.jit._builtins._find_builtin(torch.ops.aten.quantized_lstm._op) == "aten::quantized_lstm"
assert torch.equal(torch.fft.ifft(torch.fft.fft(given)).real.round(), given)
assert not [name for name, module in sys.modules.items() if "_deltic_pending" in vars(module)]
assert not [name for name, module in sys.modules.items() if name == "torch.nn" and not hasattr(module, "Linear")]
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not TESTED, reason="this torch is imported whole")
def test_run_imports_a_part_of_torch() -> None:
    ended = python(RUN)
    found = json.loads(ended.stderr.splitlines()[-1])
    assert found["code"] == 0 and ended.stdout == "The capital of France is Paris.\n"
    deferred = {name for name in found["modules"] if torch_import._is_deferred(name)}
    ran = deferred - set(found["pending"]) - set(torch_import._AT_ONCE)
    assert {"torch.export", "torch.nn", "torch._meta_registrations"} <= set(found["pending"]) and not ran
    assert len([name for name in found["modules"] if name.startswith("torch.")]) < 300
    unused = {"pydantic", "sympy", "networkx", "torch._dynamo", "starlette", "uvicorn", "PIL", "transformers",
              "huggingface_hub"}
    assert not unused & set(found["modules"])


@pytest.mark.skipif(not TESTED, reason="this torch is imported whole")
def test_deferred_modules_run_when_they_are_used() -> None:
    ended = python(USE)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(not TESTED, reason="this torch is imported whole")
def test_the_embedded_model_fits_in_250_mib() -> None:
    """Of 234 MiB; 291 with all of torch."""
    ended = subprocess.run([sys.executable, "-m", "deltic", "run", "What is the capital of France?"],
                           capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0
    assert int(ended.stderr.split("peak memory ")[1].split(" MiB")[0]) < 250


def test_a_process_that_has_torch_keeps_it() -> None:
    finders = list(sys.meta_path)
    with torch_import.quick_imports():
        assert sys.meta_path == finders


def test_other_versions_are_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    monkeypatch.setattr(torch_import, "_TESTED", ("0.",))
    torch_import._defer_torch()
    assert sys.meta_path == finders
