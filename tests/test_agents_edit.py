"""Real coding agents edit a file through the server, in an empty home without a network, and re-read only what is new.

The model is played: every answer follows from the prompt that the agent sent, its tools and their results among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from agent_cases import Player, Room, Seen, Turn, call, from_npm, from_python, playing
from test_chat_history import TOKENIZER

from deltic.cache.memory_plan import grid_spacing
from deltic.cli import main
from deltic.params import common_length

TASK, NEXT = ("Replace Hello with Goodbye in hello.py", "Replace Goodbye with Farewell in hello.py")
FILE = 'print("Hello")\n'
DONE = "The word is replaced."
THINK = TOKENIZER.token_to_id("<think>") or 0


@dataclass(frozen=True)
class Agent:
    """program: how to install it. client: its name for `deltic connect`. first, further: the command for a task, and
    for another one in the same conversation."""

    program: Callable[[], Path]
    client: str
    first: Callable[[Path], list[str]]
    further: Callable[[Path], list[str]]
    script: Callable[[Path], Callable[[Seen], str]]
    thinks: bool


def words(seen: Seen) -> tuple[str, str]:
    """What shall be replaced, and by what."""
    before, after = re.findall(r"Replace (\w+) with (\w+) in hello.py", seen.text)[-1]
    return before, after


def with_tools(work: Path) -> Callable[[Seen], str]:
    """Reads the file and replaces the line that it found, with tools that take a path and two texts."""
    def answer(seen: Seen) -> str:
        if not seen.tools:
            return "A title"
        path, old, new = next(names for names in (("filePath", "oldString", "newString"),
                                                  ("file_path", "old_string", "new_string"))
                              if any(set(names) <= set(has) for has in seen.tools.values()))
        if not seen.results:
            reader = next(name for name in seen.tools if name.lower() == "read")
            assert path in seen.tools[reader]
            return call(reader, **{path: str(work / "hello.py")})
        if len(seen.results) == 1:
            before, after = words(seen)
            line = re.search(r'print\("\w+"\)', seen.results[0])
            assert line
            return "I edit it.\n\n" + call(seen.tool(path, old, new), **{
                path: str(work / "hello.py"), old: line[0], new: line[0].replace(before, after)})
        return DONE
    return answer


def with_a_shell(_: Path) -> Callable[[Seen], str]:
    """Reads and patches the file with commands."""
    def answer(seen: Seen) -> str:
        shell = seen.tool("cmd", "workdir")
        if not seen.results:
            return call(shell, cmd="cat hello.py")
        if len(seen.results) == 1:
            before, after = words(seen)
            line = next(line for line in seen.results[0].splitlines() if before in line)
            patch = f"@@\n-{line}\n+{line.replace(before, after)}\n"
            command = f"apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: hello.py\n{patch}*** End Patch\nEOF"
            return "I edit it.\n\n" + call(shell, cmd=command)
        return DONE
    return answer


AGENTS = {
    "opencode": Agent(lambda: from_npm("opencode-ai@1.18.33", "opencode"), "opencode",
                      lambda _: ["run", TASK], lambda _: ["run", "--continue", NEXT], with_tools, False),
    "codex": Agent(lambda: from_npm("@openai/codex@0.169.0", "codex"), "codex",
                   lambda _: ["exec", *CODEX, TASK], lambda _: ["exec", "resume", "--last", *CODEX, NEXT],
                   with_a_shell, True),
    "claude-code": Agent(lambda: from_npm("@anthropic-ai/claude-code@2.1.197", "claude"), "claude-code",
                         lambda _: ["-p", TASK, "--allowedTools", "Read,Edit"],
                         lambda _: ["-p", "--continue", NEXT, "--allowedTools", "Read,Edit"], with_tools, True),
}
CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", "model_reasoning_effort=medium",
         "-c", "model_supports_reasoning_summaries=true")


@contextmanager
def room(directory: Path, monkeypatch: pytest.MonkeyPatch, client: str, history: str,
         script: Callable[[Path], Callable[[Seen], str]], memory: str = "1GiB") -> Iterator[tuple[Room, Player]]:
    """A home with a file to edit, for a client whose settings `deltic connect` has written. memory: of the cache."""
    work = directory / "work"
    work.mkdir()
    (work / "hello.py").write_text(FILE)
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "DELTIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(directory))
    with playing(script(work), history, memory) as (served, player):
        assert main(["connect", client, "--write", "--url", served.url]) == 0
        yield Room(directory, served), player
        metrics = served.http.get("/metrics").text
        player.check()
    reused = re.search(r"^deltic_prompt_tokens_reused_total\{.*\} (\d+)$", metrics, re.MULTILINE)
    assert reused and int(reused[1]) == sum(turn.cached or 0 for turn in player.turns.values())


def shared(before: Turn, after: Turn) -> int:
    """Tokens that a prompt has in common with the one before it and its answer."""
    return common_length((*before.prompt, *before.ids), after.prompt)


@pytest.mark.slow
@pytest.mark.parametrize("history", ["template", "preserve"])
@pytest.mark.parametrize("name", AGENTS)
def test_two_tasks(name: str, history: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is three turns: a file is read, edited, and the agent told that it is done."""
    agent = AGENTS[name]
    program = agent.program()
    with room(tmp_path, monkeypatch, agent.client, history, agent.script) as (place, player):
        assert DONE in place.run(program, *agent.first(place.work))
        assert (place.work / "hello.py").read_text() == FILE.replace("Hello", "Goodbye")
        assert DONE in place.run(program, *agent.further(place.work))
        assert (place.work / "hello.py").read_text() == FILE.replace("Hello", "Farewell")
    turns = [turn for turn in player.turns.values() if turn.seen.tools]
    assert [len(turn.seen.results) for turn in turns] == [0, 1, 2, 0, 1, 2]
    assert {turn.seen.thinks for turn in turns} == {agent.thinks}
    for at, (before, after) in enumerate(pairwise(turns), 1):
        common, whole = shared(before, after), len(before.prompt) + len(before.ids)
        if at == 3 and history == "template":  # which drops the think blocks since the question before
            whole = "".join(map(chr, turns[0].prompt)).rindex(chr(THINK))
            common = min(shared(turns[0], after), whole)
        assert common == whole, f"turn {at} spells an earlier one anew: {common} of {whole}"
        assert after.cached is not None
        assert after.cached >= common - 1, f"turn {at} reads again: {after.cached} of {common}"


def by_sub_agents(work: Path) -> Callable[[Seen], str]:
    """Gives three parts of a task to sub-agents at once, which read the file twice."""
    def answer(seen: Seen) -> str:
        if not seen.tools:
            return "A title"
        if part := re.match(r"\s*Explore part (\d)", seen.question):
            reads = len(seen.results) < 2
            return call("read", filePath=str(work / "hello.py")) if reads else f"Part {part[1]} is explored."
        if seen.results:
            return DONE
        return "\n".join(call("task", description=f"Part {part}", prompt=f"Explore part {part}",
                              subagent_type="general") for part in range(3))
    return answer


@pytest.mark.slow
def test_sub_agents_do_not_evict_their_main_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCode with three sub-agents at a time, in a cache that holds little more than all four: their own prompts are
    evicted, and those of the main line are not."""
    agent = AGENTS["opencode"]
    with room(tmp_path, monkeypatch, "opencode", "preserve", by_sub_agents, "20MiB") as (place, player):
        for command in (agent.first, agent.further):
            assert DONE in place.run(agent.program(), *command(place.work))
    turns = [turn for turn in player.turns.values() if turn.seen.tools]
    main = [turn for turn in turns if "task" in turn.seen.tools]
    assert [len(turn.seen.results) for turn in main] == [0, 3, 0, 3] and len(turns) == 4 + 2 * 9
    for before, after in pairwise(main):
        assert after.cached is not None and after.cached >= shared(before, after) - 1, "the main line is read again"
    evicted = [turn for turn in turns if turn not in main and (turn.cached or 0) < len(turn.prompt) // 2]
    assert len(evicted) > 1, "there is room for all"


def by_words(work: Path) -> Callable[[Seen], str]:
    """Edits in aider's form; wrong at first, so that aider asks again."""
    def answer(seen: Seen) -> str:
        before, after = words(seen)
        line = 'print("{}")' if "failed to match" in seen.text else "print('{}')"
        return (f"I edit it.\n\nhello.py\n```python\n<<<<<<< SEARCH\n{line.format(before)}\n=======\n"
                f"{line.format(after)}\n>>>>>>> REPLACE\n```")
    return answer


@pytest.mark.slow
def test_aider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It edits through text, and asks again where that does not fit. It puts the files and its reminder behind what was
    said, so that all from there on is new; instructions and examples are known but for a space of the grid."""
    program = from_python("aider-chat==0.86.2", "aider")
    with room(tmp_path, monkeypatch, "aider", "template", by_words) as (place, player):
        said = place.run(program, "--edit-format", "diff", "--yes-always", "--no-git", "--no-check-update",
                         "--analytics-disable", "--message", TASK, "hello.py")
        assert "Applied edit to hello.py" in said
        assert (place.work / "hello.py").read_text() == FILE.replace("Hello", "Goodbye")
    first, second = player.turns.values()
    common = shared(first, second)
    files = TOKENIZER.encode(first.seen.text[:first.seen.text.rindex("I have *added these files")])
    assert len(files) - 1 <= common <= len(files) + 1 and second.cached is not None
    assert second.cached >= common - grid_spacing(player.runtime.cache.sizes.slot_tokens)
