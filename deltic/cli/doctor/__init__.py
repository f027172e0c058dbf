"""`deltic doctor`: is the installation sound, and if not, what to do. Nothing is written, and no network is used."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from deltic.cli.doctor.findings import Check, Finding
from deltic.cli.doctor.installation import (
    check_answer,
    check_kernels,
    check_operations,
    check_python,
    check_torch,
    reinstall,
)
from deltic.cli.doctor.machine import check_load, check_memory, check_processor, check_threads
from deltic.cli.doctor.models import check_model
from deltic.cli.doctor.places import check_cache_dir, check_hub
from deltic.cli.parser import path_name, text

HELP = "Check the installation, and say what to do where a model is slow or does not start."
CHECKS: tuple[Check, ...] = (
    check_python, check_torch, check_processor, check_kernels, check_operations, check_threads, check_load,
    check_memory, check_hub, check_cache_dir, check_model, check_answer)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", type=text,
                        help="also check that this model can be found and fits; it is neither loaded nor downloaded")
    parser.add_argument("--cache-dir", type=path_name, metavar="DIR",
                        help="also check this directory for conversations")
    parser.add_argument("--no-run", dest="run_model", action="store_false",
                        help="do not let the embedded model answer a question")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    findings, width = [], max(map(len, map(_name, CHECKS)))
    for check in CHECKS:
        finding = _guarded(check, args)
        if finding is not None:
            findings.append(finding)
            if not args.json:
                print(finding.lines(width), flush=True)
    count = {f"{state}s": sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if args.json:
        print(json.dumps({"ok": not count["problems"], **count, "findings": list(map(asdict, findings))},
                         ensure_ascii=False))
    else:
        print("\n" + ", ".join(f"{name}: {number}" for name, number in count.items()))
    return 1 if count["problems"] else 0


def _guarded(check: Check, args: argparse.Namespace) -> Finding | None:
    try:
        return check(args)
    except Exception as error:  # whatever is broken here is what the user wants to know
        reason = " ".join(str(error).split())[:300]
        advice = f"see above; `pip check` names missing packages; else reinstall: {reinstall()}"
        return Finding.of(_name(check), f"the check failed: {type(error).__name__}: {reason}", [("problem", advice)])


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_")
