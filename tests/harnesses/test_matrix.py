"""Coding agents of other projects, unmodified, with a scripted policy that really calls their
tools: what is recorded is the engine's log, token for token, whatever the agent does.

``make test-harnesses`` installs them, and writes the table of docs/agents.md.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from agent_session import TOKENIZER, check_rows, run_tasks, says, tool_call
from client_venvs import REQUIREMENTS
from harness_programs import PACKAGES, program_folders
from scripted_engine import ScriptedEngine

from burnish.agents.commands import CommandAgents
from burnish.episodes.loop import EpisodeLimits, EpisodeResult
from burnish.episodes.rows import episode_rows

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
LIMITS = EpisodeLimits(max_turns=12, max_tokens=200_000, step_timeout_s=60, timeout_s=120)
PROMPT = "Write the word hello into the file out.txt."
TASK = {"prompt": PROMPT, "test": "grep -q hello out.txt", "files": {"a/b.txt": "seven"}}
SUB_TASK = "SUBTASK: name a color."


@dataclass(frozen=True)
class Harness:
    """A program: its API, and how its tools are called."""

    api: str
    shell: Callable[[str], str]
    """Command -> call of the tool that runs it."""
    sub_agent: str | None = None
    """Call that starts a sub-agent with :data:`SUB_TASK`. None: it has none."""
    wait: str | None = None
    """Call that waits for the result of the sub-agent, if another one is needed."""
    arguments: tuple[str, ...] = ()
    """Further arguments for sub-agents."""
    side_calls: int = 0
    """Calls of other conversations, such as the title."""
    compacts: tuple[str, ...] | None = None
    """Arguments with which it summarizes a conversation. None: not tried."""
    ends_by: str = "Done."
    """Answer with which the program ends."""


def _shell(name: str, key: str = "command", **more: Any) -> Callable[[str], str]:
    return lambda command: tool_call(name, **{key: command, **more})


MINI_END = tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
HARNESSES = {
    "codex": Harness(
        "Responses",
        _shell("exec_command", "cmd"),
        sub_agent=tool_call("multi_agent_v1__spawn_agent", message=SUB_TASK),
        arguments=("-c", "features.multi_agent=true"),
        compacts=("-c", "model_auto_compact_token_limit={limit}"),
    ),
    "claude_code": Harness(
        "Messages",
        _shell("Bash", description="write"),
        sub_agent=tool_call(
            "Agent", description="a color", prompt=SUB_TASK, subagent_type="general-purpose"
        ),
    ),
    "opencode": Harness(
        "chat completions",
        _shell("bash", description="write"),
        sub_agent=tool_call(
            "task", description="a color", prompt=SUB_TASK, subagent_type="general"
        ),
        side_calls=1,
    ),
    "qwen_code": Harness(
        "chat completions",
        _shell("run_shell_command", description="write", is_background=False),
        sub_agent=tool_call(
            "agent", description="a color", prompt=SUB_TASK, subagent_type="general-purpose"
        ),
    ),
    "pi": Harness("chat completions", _shell("bash")),
    "mini_swe_agent": Harness("chat completions", _shell("bash"), ends_by=MINI_END),
}


@dataclass
class Play:
    """One episode of a program."""

    result: EpisodeResult
    engine: ScriptedEngine
    prompts: list[str]
    seconds: float
    others: list[EpisodeResult] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(episode_rows(self.result.calls))


def _is_side_call(text: str) -> bool:
    return "title" in text[-700:].lower() and "<tool_call>" not in text[-300:]


def play(
    name: str,
    answer: Callable[[int, str], str],
    *,
    limits: EpisodeLimits = LIMITS,
    turn_tokens: int = 600,
    arguments: tuple[str, ...] = (),
) -> Play:
    """Play one episode. ``answer``: (number of the call, prompt) -> the policy's text. Calls of the
    side are not numbered. Every token that was sampled is in exactly one row."""
    prompts: list[str] = []

    def write(text: str) -> str:
        if HARNESSES[name].side_calls and _is_side_call(text):
            return "A title"
        if text.rstrip().endswith(f"{SUB_TASK}<|im_end|>\n<|im_start|>assistant"):
            return "green"
        prompts.append(text)
        return answer(len(prompts), text)

    launcher = str(ROOT / f"recipes/harnesses/{name}.py")
    agents = CommandAgents([sys.executable, launcher, *arguments])
    began = time.monotonic()
    (result,), engine = run_tasks(agents, [TASK], limits, says(write), turn_tokens=turn_tokens)
    seconds = time.monotonic() - began
    check_rows(result, engine)
    return Play(result, engine, prompts, seconds)


TABLE: dict[str, dict[str, Any]] = {}


@pytest.fixture(params=HARNESSES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found = str(request.param)
    folders = [*map(str, program_folders(found)), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    return found


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """Write the table of docs/agents.md at the end, if every program was played."""
    yield
    if os.environ.get("BURNISH_WRITE_TABLE") and TABLE.keys() == HARNESSES.keys():
        write_table(TABLE)


def test_it_edits_and_runs_and_its_test_is_the_reward(name: str) -> None:
    harness = HARNESSES[name]

    def answer(number: int, text: str) -> str:
        if number == 1:
            assert PROMPT in text
            return harness.shell("cat a/b.txt && echo hello > out.txt")
        assert "seven" in text or harness.ends_by == MINI_END
        return harness.ends_by

    played = play(name, answer)
    record = played.result.record
    assert record.status == "done", record.error
    assert record.turns[-1].rewards == {"reward": 1.0}
    assert len(played.result.calls) == 2 + harness.side_calls
    assert played.rows == 1 + harness.side_calls
    first = max(len(call.prompt_ids) for call in played.result.calls[: 1 + harness.side_calls])
    TABLE.setdefault(name, {}).update(
        calls=len(played.result.calls), rows=played.rows, seconds=played.seconds, first=first
    )


def test_parallel_calls_come_back_in_one_row(name: str) -> None:
    harness = HARNESSES[name]

    def answer(number: int, text: str) -> str:
        if number == 1:
            return harness.shell("echo hello > out.txt") + "\n" + harness.shell("cat a/b.txt")
        assert text.count("<tool_response>") >= 2 and "seven" in text
        return harness.ends_by

    played = play(name, answer)
    assert played.result.record.status == "done", played.result.record.error
    assert played.rows == 1 + harness.side_calls
    TABLE.setdefault(name, {})["parallel"] = True


def test_a_sub_agent_has_a_row_of_its_own(name: str) -> None:
    harness = HARNESSES[name]
    if harness.sub_agent is None:
        pytest.skip(f"{name} has no sub-agents")
    start = harness.sub_agent

    def answer(number: int, text: str) -> str:
        if number == 1:
            return start
        if number == 2:
            return harness.shell("echo hello > out.txt; sleep 1")
        return harness.ends_by

    played = play(name, answer, arguments=harness.arguments)
    assert played.result.record.status == "done", played.result.record.error
    asked = [c for c in played.engine.log if SUB_TASK in played_text(c[0].prompt_ids)]
    assert asked and played.rows >= 2 + harness.side_calls
    TABLE.setdefault(name, {})["sub_agent"] = played.rows


def played_text(ids: Any) -> str:
    return str(TOKENIZER.decode(list(ids)))


def test_a_cut_answer_is_scored(name: str) -> None:
    """Codex exits with an error behind a cut answer; others go on or end."""
    harness = HARNESSES[name]

    def answer(number: int, _: str) -> str:
        if number == 1:
            return harness.shell("echo hello > out.txt")
        return "word " * 500 if number == 2 else harness.ends_by

    played = play(name, answer, turn_tokens=300)
    record = played.result.record
    assert played.result.error is None and record.status in ("done", "max_turn_tokens")
    assert record.turns[-1].rewards == {"reward": 1.0}
    TABLE.setdefault(name, {})["cut"] = record.status


def test_a_full_context_ends_the_episode_at_once_or_is_summarized(name: str) -> None:
    harness = HARNESSES[name]
    first = play(name, lambda *_: harness.ends_by)
    most = max(len(call.prompt_ids) for call in first.result.calls) + 500
    limits = replace(LIMITS, max_tokens=most)

    def answer(number: int, text: str) -> str:
        return harness.shell("seq 1 900") if number == 1 else harness.ends_by

    played = play(name, answer, limits=limits)
    assert played.result.error is None, played.result.record.error
    assert played.result.record.status in ("done", "max_tokens", "max_turns")
    assert played.result.record.turns[-1].counts.get("refused", 0) <= 8, (
        "it does not retry for ever"
    )
    TABLE.setdefault(name, {})["full"] = played.result.record.status


def test_turns_that_are_used_up_end_the_episode(name: str) -> None:
    harness = HARNESSES[name]
    limits = replace(LIMITS, max_turns=2 + harness.side_calls)
    played = play(name, lambda number, _: harness.shell(f"echo {number}"), limits=limits)
    assert played.result.record.status == "max_turns" and played.result.error is None
    assert len(played.result.calls) == limits.max_turns
    TABLE.setdefault(name, {})["turns"] = "max_turns"


def test_a_summary_begins_a_row_of_its_own(name: str) -> None:
    harness = HARNESSES[name]
    if harness.compacts is None:
        pytest.skip("its limit of a conversation cannot be set")
    first = play(name, lambda *_: harness.ends_by)
    limit = max(len(call.prompt_ids) for call in first.result.calls) // 4 + 300
    arguments = tuple(word.format(limit=limit) for word in harness.compacts)

    def answer(number: int, text: str) -> str:
        if number == 1:
            return harness.shell("echo hello > out.txt; seq 1 900")
        return "A summary." if "summar" in text[-3000:].lower() and number == 2 else harness.ends_by

    played = play(name, answer, arguments=arguments)
    assert played.result.record.status in ("done", "max_turns"), played.result.record.error
    assert played.rows >= 2
    TABLE.setdefault(name, {})["summary"] = played.rows


def version(name: str) -> str:
    if name in PACKAGES:
        return PACKAGES[name].rpartition("@")[2]
    return REQUIREMENTS[name][0].rpartition("=")[2]


def write_table(table: dict[str, dict[str, Any]]) -> None:
    path = ROOT / "docs/agents.md"
    heads = (
        "launcher, version, API, calls / rows, first prompt, parallel calls, sub-agent, summary, "
    )
    heads += "cut answer, full context, seconds"
    columns = heads.split(", ")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, facts in table.items():
        rows = {
            key: f"{facts[key]} rows" if key in facts else "-" for key in ("sub_agent", "summary")
        }
        cells = [
            f"`{name}.py`",
            version(name),
            HARNESSES[name].api,
            f"{facts['calls']} / {facts['rows']}",
            f"{facts['first']:,} tokens",
            "same row" if "parallel" in facts else "-",
            *rows.values(),
            *(f"`{facts[key]}`" if key in facts else "-" for key in ("cut", "full")),
            f"{facts['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    text = re.sub(
        r"(<!-- harnesses -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n".join(lines) + "\n" + found[2],
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    path.write_text(text, encoding="utf-8")
