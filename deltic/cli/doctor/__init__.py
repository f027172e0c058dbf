"""`deltic doctor`: is the installation sound, and if not, what to do. Nothing is written, and no network is used."""

from __future__ import annotations

import argparse
import json
import sys
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
from deltic.cli.parser import UsageError, path_name, text

HELP = "Check the installation, and say what to do where a model is slow or does not start."
CHECKS: tuple[Check, ...] = (
    check_python, check_torch, check_processor, check_kernels, check_operations, check_threads, check_load,
    check_memory, check_hub, check_cache_dir, check_model, check_answer)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", type=text,
                        help="also check that this model can be found and fits; it is neither loaded nor downloaded")
    parser.add_argument("--model", dest="named", type=text, metavar="MODEL", help="the same as MODEL")
    parser.add_argument("--deep", action="store_true",
                        help="load MODEL, or all models of a directory, ask each some questions and compare with "
                             "known answers; prints a report to send back")
    parser.add_argument("--cache-dir", type=path_name, metavar="DIR",
                        help="also check this directory for conversations")
    parser.add_argument("--no-run", dest="run_model", action="store_false",
                        help="do not let the embedded model answer a question")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    args.model = args.named or args.model
    if args.deep and args.model is None:
        raise UsageError("--deep loads a model: name it, or a directory of models")
    findings, width = list[Finding](), max(map(len, map(_name, CHECKS)))
    for check in CHECKS:
        if args.deep and check is check_model:
            continue  # it is examined below, and may be a directory of several
        finding = _guarded(check, args)
        if finding is not None:
            findings.append(finding)
            if not args.json:
                print(finding.lines(width), flush=True)
    told = _deep(args, findings, width) if args.deep else None
    count = {f"{state}s": sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if args.json:
        deep = {"report": json.loads(told)} if told else {}
        print(json.dumps({"ok": not count["problems"], **count, "findings": list(map(asdict, findings)), **deep},
                         ensure_ascii=False))
    else:
        if told:
            print(f"\nreport (please send it back, it has no paths and no texts of yours):\n{told}")
        print("\n" + ", ".join(f"{name}: {number}" for name, number in count.items()))
    return 1 if count["problems"] else 0


def _deep(args: argparse.Namespace, findings: list[Finding], width: int) -> str:
    """Examine the models, add what was found to the findings, and return the report."""
    from deltic.cli.doctor.deep import examine_all, report

    examined = []
    for one in examine_all(args.model, lambda path: print(f"running {path} ...", file=sys.stderr)):
        examined.append(one)
        findings.append(one.finding())
        if not args.json:
            print(findings[-1].lines(width), flush=True)
    return report(examined, findings)


def _guarded(check: Check, args: argparse.Namespace) -> Finding | None:
    try:
        return check(args)
    except Exception as error:  # whatever is broken here is what the user wants to know
        reason = " ".join(str(error).split())[:300]
        advice = f"see above; `pip check` names missing packages; else reinstall: {reinstall()}"
        return Finding.of(_name(check), f"the check failed: {type(error).__name__}: {reason}", [("problem", advice)])


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_")
