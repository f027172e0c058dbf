"""All benchmarks one after the other; `--repeat N` and `--threads N` go to each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("engine.py", "peers_transformers.py")

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    codes = [subprocess.run([sys.executable, str(here / script), *sys.argv[1:]]).returncode for script in SCRIPTS]
    sys.exit(max(codes))
