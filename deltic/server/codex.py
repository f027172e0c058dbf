"""The catalogue of models for Codex."""

from __future__ import annotations

from typing import Any, Final

from deltic.server.models import ModelEntry

INSTRUCTIONS: Final = """\
You are a coding agent in the Codex CLI, on the user's computer. You work in the user's repository until the task is
done.

- Read before you write: look at the files that matter, with `rg`, `sed -n` or `cat`.
- Run commands with the shell tool. Say in one line what you are about to do.
- Edit files with the tool for patches where there is one, else with the shell. Change no more than the task needs, in
  the style of the code around it.
- Run the tests or the program after a change, and correct what fails.
- Do not commit, and undo nothing that you did not do, unless you are asked to.
- Follow AGENTS.md files: one holds for all files below its folder.
- End with a short report: what you changed and where, and what you could not do.
"""
"""Codex takes its instructions from the catalogue."""


def catalogue(entries: list[ModelEntry]) -> list[dict[str, Any]]:
    """Returns the models in Codex's form. Reasoning summaries are declared, because Codex sends thinking back only
    then."""
    return [_described(entry, place) for place, entry in enumerate(entries)]


def _described(entry: ModelEntry, place: int) -> dict[str, Any]:
    return {
        "slug": entry.name, "display_name": entry.name, "description": None, "priority": place, "visibility": "list",
        "supported_in_api": True, "upgrade": None, "base_instructions": INSTRUCTIONS, "shell_type": "default",
        "apply_patch_tool_type": None, "experimental_supported_tools": [], "supports_parallel_tool_calls": True,
        "default_reasoning_level": None, "supported_reasoning_levels": [], "supports_reasoning_summaries": True,
        "support_verbosity": False, "default_verbosity": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "context_window": entry.context, "effective_context_window_percent": 95,
        "input_modalities": ["text", "image"] if entry.sees else ["text"]}
