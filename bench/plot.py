"""Draws docs/speed.svg from bench/results/cpu_peers.jsonl.

The plot compares deltic with llama.cpp on the same files, measured in one run.

    python bench/plot.py
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "cpu_peers.jsonl"
TARGET = ROOT / "docs" / "speed.svg"
ROW, LEFT, RIGHT, UNIT, TOP = 26, 230, 130, 70, 48
"""Pixels: height of a bar's row, margins left and right, width of a ratio of 1, height of the title."""


def bars() -> list[tuple[str, float, float, float]]:
    """The last measurement of each case: label, tokens/s of deltic and of llama.cpp, ratio of the medians."""
    found: dict[str, tuple[str, float, float, float]] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["task"] == "start":
            continue
        types = run["model"]["tensors"]
        kind = max((name for name in types if name != "F32"), key=types.__getitem__)
        case = f"prefill of {run['prompt_tokens']:,}" if run["task"] == "prefill" else "decode"
        if run["task"] == "decode" and run["prompt_tokens"] > 1000:
            case += f" after {run['prompt_tokens']:,}"
        if run["batch"] > 1:
            case += f", {run['batch']} sequences"
        label = f"{kind}: {case}"
        found[label] = (label, run["deltic"]["median"], run["llama.cpp"]["median"],
                        run["ratios"]["llama.cpp"]["ratio_of_medians"])
    return sorted(found.values())


def svg() -> str:
    rows = bars()
    widest = max(ratio for *_, ratio in rows)
    width = int(LEFT + widest * UNIT + RIGHT)
    height = TOP + ROW * len(rows) + 12
    one = LEFT + UNIT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="20" font-weight="bold">Speed of deltic relative to llama.cpp, two CPU cores</text>',
        f'<text x="{one}" y="40" text-anchor="middle" fill="#777">llama.cpp = 1</text>',
    ]
    for index, (label, ours, theirs, ratio) in enumerate(rows):
        y = TOP + ROW * index
        end = LEFT + ratio * UNIT
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{ratio * UNIT:.1f}" height="{ROW - 8}" fill="#3b6fd4"/>',
            f'<text x="{end + 6:.1f}" y="{y + 15}">{ratio:.2f}× '
            f'<tspan fill="#777">({ours:.0f} / {theirs:.0f} tokens/s)</tspan></text>',
        ]
    bottom = height - 8
    parts.append(f'<line x1="{one}" y1="{TOP - 4}" x2="{one}" y2="{bottom}" stroke="#777" stroke-dasharray="3 3"/>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(svg(), encoding="utf-8")
