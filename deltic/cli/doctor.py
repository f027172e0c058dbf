"""`deltic doctor`: checks the installation and suggests fixes. It writes nothing and uses no network."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from deltic.cli import doctor_checks as checks
from deltic.cli.doctor_checks import Check, Finding
from deltic.cli.doctor_model import check_model
from deltic.cli.output import note
from deltic.cli.parser import UsageError, path_name, text

CHECKS: tuple[Check, ...] = (
    checks.check_python, checks.check_torch, checks.check_processor, checks.check_kernels, checks.check_operations,
    checks.check_threads, checks.check_load, checks.check_memory, checks.check_hub, checks.check_cache_dir, check_model,
    checks.check_answer)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check the installation, and suggest fixes for a model that is slow or does not start."
    parser.add_argument("model", nargs="?", metavar="MODEL", type=text,
                        help="also check that this model exists and fits; it is neither loaded nor downloaded")
    parser.add_argument("--model", dest="named", type=text, metavar="MODEL", help="the same as MODEL")
    parser.add_argument("--deep", action="store_true",
                        help="load MODEL, or all models in a directory, ask each some questions and compare the "
                             "answers with known ones; prints a report to send back")
    parser.add_argument("--cache-dir", type=path_name, metavar="DIR",
                        help="also check this directory for conversations")
    parser.add_argument("--no-run", dest="run_model", action="store_false",
                        help="do not ask the embedded model a question")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(args: argparse.Namespace) -> int:
    args.model = args.named or args.model
    if args.deep and args.model is None:
        raise UsageError("--deep loads a model: name it, or a directory of models")
    findings, width = list[Finding](), max(map(len, map(_name, CHECKS)))

    def add(finding: Finding | None) -> None:
        if finding is not None:
            findings.append(finding)
            if not args.json:
                print(finding.lines(width), flush=True)

    for check in CHECKS:
        if not (args.deep and check is check_model):  # --deep loads it, or several
            add(_guarded(check, args))
    report = ""
    if args.deep:
        from deltic.cli.doctor_model import examine_all, report_of

        examined = []
        for one in examine_all(args.model, lambda path: note(f"running {path} ...")):
            examined.append(one)
            add(one.finding())
        report = report_of(examined, findings)
    counts = {f"{state}s": sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if args.json:
        deep = {"report": json.loads(report)} if report else {}
        found = {"ok": not counts["problems"], **counts, "findings": list(map(asdict, findings)), **deep}
        print(json.dumps(found, ensure_ascii=False))
    else:
        if report:
            print(f"\nreport (please send it back; it has no paths and no texts of yours):\n{report}")
        print("\n" + ", ".join(f"{name}: {count}" for name, count in counts.items()))
    return 1 if counts["problems"] else 0


def _guarded(check: Check, args: argparse.Namespace) -> Finding | None:
    try:
        return check(args)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        advice = f"see above; `pip check` names missing packages; else reinstall: {checks.reinstall()}"
        return Finding.of(_name(check), f"the check failed: {type(error).__name__}: {reason}", [("problem", advice)])


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_")
