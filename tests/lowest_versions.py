"""Runs a core of the tests with the lowest version of each dependency that pyproject.toml allows: `make test-lowest`.

torch, whose wheels are large, and the tools of the tests are those of the Python that runs this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
AS_INSTALLED = ("torch",)
CORE = ("test_cli_run", "test_hub_downloads", "test_guide", "test_server_errors", "test_server_life",
        "test_server_chat", "test_chat_tokenizer", "test_chat_template", "test_cli_connect", "test_vision_images",
        "test_documents", "test_limits_http", "test_cli_hints", "test_cli_chat")
"""Files of tests that use each of the dependencies, and nothing that needs newer ones (transformers)."""


def lowest() -> dict[str, str]:
    """The lower bound of each dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,.*)?", line) for line in project["dependencies"]]
    assert all(found), "every dependency has a lower bound"
    return {bound[1]: bound[2] for bound in found if bound}


def main() -> int:
    place = ROOT / "build" / "lowest"
    venv.create(place, clear=True, with_pip=True)
    python = place / "bin" / "python"
    pins = [f"{name}=={version}" for name, version in lowest().items() if name not in AS_INSTALLED]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (own / "beside.pth").write_text("\n".join([*ours, ""]))  # behind what was installed here
    files = [str(ROOT / "tests" / f"{name}.py") for name in CORE]
    # newer warnings of older versions are no failures
    command = [python, "-m", "pytest", "-o", "filterwarnings=default", "-W", "default", *files, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
