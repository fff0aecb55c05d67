"""Episodes with a scripted policy: exact tokens, statuses, limits, and conservation under failing
environments."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML_DROPS, chat_tokenizer
from scripted_engine import Answer, ScriptedEngine

from burnish.config.episodes import EnvironmentEpisodes, EpisodesConfig, ToolEpisodes
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.episodes.loop import call_seed, sampling_timeout
from burnish.episodes.probing import TOOLS
from burnish.episodes.runner import EpisodePool, EpisodeRunner, EpisodesFailedError, episode_stats
from burnish.episodes.template import RendererError
from burnish.jobs.episodes import build_episode_pool
from burnish.models.scratch import scratch_tokenizer
from burnish.observe.timeline import Timeline
from burnish.rewards.base import RewardError
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.reward_set import NoGroupLeftError, RewardSet
from burnish.rollout.base import Request, Sampling
from burnish.runtime.inline import InlineRuntime
from burnish.transcript import Episode, Turn
from burnish.types import Group, Prompt, Stats

MODEL = ModelConfig(scratch=ScratchConfig(max_position_embeddings=1 << 16))
ENVIRONMENTS = Path(__file__).parents[1] / "environments"
TOKENIZER = chat_tokenizer("chatml")
RUNTIME = InlineRuntime(TOKENIZER, precision=PrecisionConfig(), device="cpu", timeline=Timeline())
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def options(name: str, **changes: Any) -> EpisodesConfig:
    return EnvironmentEpisodes(
        **{"environment": f"{ENVIRONMENTS / 'hostile.py'}:{name}", "max_tokens": 4096, **changes}
    )


@contextmanager
def pool(config: EpisodesConfig) -> Iterator[EpisodePool]:
    made = build_episode_pool(config, MODEL, RUNTIME)
    assert made is not None
    try:
        yield made
    finally:
        made.close()


def prompts(count: int, **metadata: Any) -> list[Prompt]:
    return [Prompt(f"task:{i}@0", (1,), f"task {i}", metadata=metadata) for i in range(count)]


def runner(engine: ScriptedEngine, made: EpisodePool, *, n: int = 2) -> EpisodeRunner:
    rewards = RewardSet(
        [(EpisodeScorer(None, name="all"), 1.0)],
        on_failure=FailurePolicy(),
        shaping=ShapingConfig(),
        generate_max_len=100,
    )
    return EpisodeRunner(engine, rewards, Sampling(40), made, num_samples=n, seed=3)


def says(text: str) -> tuple[int, ...]:
    return (*TOKENIZER(text, add_special_tokens=False)["input_ids"], END)


def random_words(request: Request) -> Sequence[int]:
    """Random token ids, most of which the tokenizer would encode differently from their text."""
    draw = random.Random(f"{request.request_id}")
    ordinary = [i for i in range(len(TOKENIZER)) if i not in TOKENIZER.all_special_ids]
    return [*draw.choices(ordinary, k=draw.randint(1, 9)), END]


def run_episodes(answer: Answer, config: EpisodesConfig, count: int = 4, **metadata: Any) -> Any:
    engine = ScriptedEngine(answer, TOKENIZER)
    with pool(config) as made:
        groups, stats = sampled(runner(engine, made), prompts(count, **metadata))
    return engine, groups, stats


def sampled(task_runner: EpisodeRunner, given: Sequence[Prompt]) -> tuple[list[Group], Stats]:
    """Return the groups of prompts, as many as have one, and the statistics of all episodes."""
    drawn = task_runner.draw_all(given)
    task_runner.check(drawn)
    groups = [one.group for one in drawn if one.group is not None]
    if not groups:
        raise task_runner.no_group_error(drawn)
    return groups, task_runner.stats(drawn)


def test_rows_have_exactly_the_ids_that_the_engine_sampled() -> None:
    """The engine's own log is the record. Decoding and tokenizing again gives other ids for most
    of these turns, so the naive way would train on tokens that were not sampled."""
    engine, groups, _ = run_episodes(
        random_words, options("Hostile", options={"turns": 6}), count=8
    )
    logged = {request.request_id: (request, ids) for request, ids in engine.log}
    used, changed = [], 0
    for sample in (s for group in groups for s in group.samples):
        (row,) = sample.rows
        ids = row.prompt_ids + row.response_ids
        for turn in range(len(sample.episode.turns)):
            request, sampled = logged[f"{sample.sample_id}/{turn}"]
            at = [t for t, number in enumerate(row.turns) if number == turn]
            assert tuple(row.response_ids[t] for t in at) == sampled
            assert ids[: len(row.prompt_ids) + at[0]] == request.prompt_ids
            used.append(request.request_id)
            text = TOKENIZER.decode(sampled[:-1])
            changed += tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"]) != sampled[:-1]
        assert sum(row.action_mask) == sum(turn.num_tokens for turn in sample.episode.turns)
    assert sorted(used) == sorted(logged)
    assert changed > len(used) / 2
    assert sorted(engine.released) == sorted(s.sample_id for g in groups for s in g.samples)


def test_members_of_a_group_start_equally_and_sample_differently() -> None:
    engine, groups, _ = run_episodes(random_words, options("Hostile"))
    for group in groups:
        one, other = group.samples
        assert one.episode.start == other.episode.start
        assert one.rows[0].prompt_ids == other.rows[0].prompt_ids
    seeds = [request.seed for request, _ in engine.log]
    assert len(set(seeds)) == len(seeds)


def test_any_seed_of_a_run_gives_its_own_tokens() -> None:
    """A run's seed is multiplied by 2^52 in the seed of an episode."""
    found = {call_seed(seed << 52, (1, 2)) for seed in (0, 1, 2047, 2048, 4096, -1, 1 << 62)}
    assert len(found) == 7
    assert call_seed(5, (1, 2)) == call_seed(5, [1, 2]) != call_seed(5, (1, 2), attempt=1)


def statuses(groups: Sequence[Group]) -> Counter[str]:
    return Counter(s.episode.status for group in groups for s in group.samples)


FOREVER = {"start": [{"role": "user", "content": "a"}]} | {
    "step": {"messages": [{"role": "user", "content": "b"}], "rewards": {"x": 0.5}}
}
FLOOD = FOREVER | {"step": {"messages": [{"role": "user", "content": "b " * 3000}]}}
LONG = {"start": [{"role": "user", "content": "a " * 3000}], "step": {"done": True}}


@pytest.mark.parametrize(
    ("answer", "changes", "task", "status", "turns"),
    [
        (says("hi"), {"max_turns": 3}, FOREVER, "max_turns", 3),
        (says("hi " * 100), {}, FOREVER, "max_turn_tokens", 1),
        (says("hi"), {"max_tokens": 60, "max_turns": 99}, FOREVER, "max_tokens", None),
        (says("hi"), {"max_tokens": 500}, FLOOD, "max_tokens", 1),
        (says("hi"), {"max_turns": 1}, FOREVER, "max_turns", 1),
    ],
)
def test_limits_end_an_episode_with_their_status(
    answer: tuple[int, ...], changes: dict[str, Any], task: Any, status: str, turns: int | None
) -> None:
    """An episode that reaches a token limit is truncated, also if an observation reaches it."""
    _, groups, stats = run_episodes(lambda _: answer, options("Fixed", **changes), **task)
    assert statuses(groups) == {status: 8}
    assert stats.floats()[f"episodes/{status}"] == 8
    for sample in (s for group in groups for s in group.samples):
        (row,) = sample.rows
        limit = changes.get("max_tokens", 4096)
        assert len(row.prompt_ids + row.response_ids) <= limit
        assert turns in (None, len(sample.episode.turns))
        assert sample.finish_reason == ("stop" if status == "max_turns" else "length")


def test_a_prompt_that_fills_the_limit_leaves_nothing_to_train_on() -> None:
    with pytest.raises(NoGroupLeftError, match=r"raise episodes\.max_tokens") as error:
        run_episodes(lambda _: says("hi"), options("Fixed", max_tokens=100), **LONG)
    assert error.value.stats.floats()["episodes/prompt_too_long"] == 8


def test_lost_groups_are_counted_as_episodes_and_replaced() -> None:
    """The first 2 prompts fill the limit, so both groups lose their 2 episodes; the next 2 work."""
    short = {**FOREVER, "step": {"done": True, "rewards": {"x": 1.0}}}
    given = iter([prompts(2, **LONG), prompts(2, **short)])
    with pool(options("Fixed", max_tokens=100)) as made:
        task_runner = runner(ScriptedEngine(lambda _: says("hi"), TOKENIZER), made)
        rollout = task_runner.fill(lambda _: next(given), 2)
        found = rollout.stats.floats()
        with pytest.raises(RewardError, match=r"first messages.*prompt_too_long 4"):
            task_runner.fill(lambda _: prompts(2, **LONG), 2)
    assert len(rollout.groups) == 2
    names = ("episodes/prompt_too_long", "episodes/done", "episodes/groups_dropped")
    assert [found[name] for name in names] == [4, 4, 2]
    assert found["reward/groups_dropped"] == 0


def test_failures_are_conserved_and_leave_the_baseline() -> None:
    """Environments raise, hang, return garbage and kill their process: every episode ends exactly
    once, and only those that the policy ended are trained on."""
    config = options(
        "Hostile",
        options={"rate": 0.15},
        step_timeout_s=1.0,
        workers=2,
        max_concurrent=3,
        max_failed_frac=1.0,
    )
    engine, groups, stats = run_episodes(random_words, config, count=20)
    found: Stats = stats
    ended = {k.removeprefix("episodes/"): v for k, v in found.floats().items()}
    names = ("done", "max_turns", "env_error", "timeout", "infra_error")
    assert sum(ended.get(name, 0) for name in names) == 40
    assert ended["env_error"] and ended["done"]
    kept = sum(len(group.samples) for group in groups)
    assert set(statuses(groups)) <= {"done", "max_turns"}
    assert all(len(group.samples) == 2 for group in groups)
    assert len(groups) + ended["groups_dropped"] == 20
    assert kept <= ended["done"] + ended.get("max_turns", 0)
    assert not engine.busy


def test_the_time_limit_of_an_episode_does_not_count_stops_of_the_service() -> None:
    """A service that is stopped all the time, and one that never is."""

    async def is_in_time(seconds: float, stopped_s: Callable[[], float]) -> bool:
        with suppress(TimeoutError):
            async with sampling_timeout(0.05, stopped_s):
                await asyncio.sleep(seconds)
                return True
        return False

    assert asyncio.run(is_in_time(0.2, time.monotonic))
    assert not asyncio.run(is_in_time(60, lambda: 0.0))


def test_without_tools_text_that_looks_like_a_call_reaches_the_environment(tmp_path: Path) -> None:
    """An environment whose format of actions looks like a tool call."""
    call = '<tool_call>\n{"name": "move", "arguments": {"x": 1}}\n</tool_call>'
    config = options("Async", options={"path": str(tmp_path / "closed")})
    engine = ScriptedEngine(lambda request: says(call), TOKENIZER)
    with pool(config) as made:
        task_runner = runner(engine, made)
        task_runner.sampling = Sampling(100)
        (group,), _ = sampled(task_runner, prompts(1))
    for sample in group.samples:
        assert sample.episode is not None
        (turn,) = sample.episode.turns
        assert turn.message == {"role": "assistant", "content": call} and not turn.problem
        assert sample.episode.status == "done" and turn.rewards == {"length": len(call)}


def test_calls_that_were_not_run_are_text() -> None:
    """Templates may reject calls without results. Prompt and record have them as sampled."""
    tokenizer = chat_tokenizer("chatml_drops")
    tokenizer.chat_template = CHATML_DROPS.replace(
        "{{ m.content }}",
        "{% if m.tool_calls and not loop.last "
        "and messages[loop.index0 + 1].role == 'user' %}"
        "{{ raise_exception('calls need results') }}{% endif %}{{ m.content }}",
        1,
    )
    runtime = InlineRuntime(
        tokenizer, precision=PrecisionConfig(), device="cpu", timeline=Timeline()
    )
    call = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
    text = call.format(TOOLS[0]["function"]["name"]) + call.format("nothing")
    engine = ScriptedEngine(lambda request: says(text), tokenizer)
    config = options("Fixed", history="template", max_turns=2)
    made = build_episode_pool(config, MODEL, runtime)
    assert made is not None
    try:
        task_runner = runner(engine, made)
        task_runner.sampling = Sampling(100)
        (group,), _ = sampled(task_runner, prompts(1, **FOREVER, tools=[*TOOLS]))
    finally:
        made.close()
    for sample in group.samples:
        assert sample.episode is not None and sample.episode.status == "max_turns"
        for turn in sample.episode.turns:
            assert turn.problem and turn.message == {"role": "assistant", "content": text}
        assert len(sample.rows) == 1, "the second prompt continues the first response"


def test_tools_of_rows_that_no_episode_offers_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """An environment may offer the tools of its row (Fixed), or none (Hostile)."""
    name = TOOLS[0]["function"]["name"]
    for environment, unseen in (("Hostile", 2), ("Fixed", 0)):
        engine = ScriptedEngine(lambda request: says("a"), TOKENIZER)
        rows = prompts(2, **FOREVER, tools=[*TOOLS])
        with pool(options(environment, max_turns=1)) as programs:
            with_tools = [replace(prompt, tools=tuple(TOOLS)) for prompt in rows]
            task_runner = runner(engine, programs)
            _, stats = sampled(task_runner, with_tools)
            task_runner.stats([])
        assert stats.sums.get("episodes/groups_with_unseen_tools", 0) == unseen
    assert [name in r.getMessage() for r in caplog.records if "tools of rows" in r.msg] == [True]


def test_too_many_failures_stop_the_run_with_the_cause() -> None:
    config = options("Hostile", options={"rate": 1.0}, step_timeout_s=0.5, max_failed_frac=0.5)
    with pytest.raises(EpisodesFailedError, match=r"(?s)episodes failed .*max_failed_frac=0\.5"):
        run_episodes(random_words, config, count=2, salt="b")


def refill(number: int, task: dict[str, Any]) -> list[Prompt]:
    """One more prompt, with an id of its own."""
    return [replace(prompt, id=f"refill:{number}@0") for prompt in prompts(1, **task)]


def test_a_refill_may_fail_entirely_if_the_rollout_does_not() -> None:
    """Two episodes per prompt. 5 of 6 prompts work, and the refill of one prompt fails: 4 of 14
    episodes, below the limit of 0.3. If the next refill also fails, 6 of 16 are above it."""
    bad, good = {"start": 3}, {**FOREVER, "step": {"done": True, "rewards": {"x": 1.0}}}
    config = options("Fixed", max_failed_frac=0.3)
    with pool(config) as made:
        task_runner = runner(ScriptedEngine(lambda _: says("hi"), TOKENIZER), made)
        first = [*prompts(5, **good), *refill(0, bad)]
        given = iter([first, refill(1, bad), refill(2, good)])
        rollout = task_runner.fill(lambda _: next(given), 6)
        given = iter([first, refill(1, bad), refill(2, bad)])
        with pytest.raises(EpisodesFailedError, match=r"6 of 16 episodes failed \(env_error 6\)"):
            task_runner.fill(lambda _: next(given), 6)
    found = rollout.stats.floats()
    assert len(rollout.groups) == 6
    names = ("episodes/env_error", "episodes/done", "episodes/groups_dropped", "rollout/samples")
    assert [found[name] for name in names] == [4, 12, 2, 12]


def test_results_do_not_depend_on_the_order_of_arrival() -> None:
    """The engine finishes requests in another order, with other numbers of episodes at once."""
    found = []
    for seed, concurrent in ((0, None), (1, 1), (2, 3)):
        engine = ScriptedEngine(random_words, TOKENIZER, seed=seed)
        config = options("Hostile", max_concurrent=concurrent, workers=2)
        with pool(config) as made:
            groups, _ = sampled(runner(engine, made), prompts(5))
        found.append([sample.rows for group in groups for sample in group.samples])
    assert found[0] == found[1] == found[2]


def test_tools_of_a_recipe_run_within_their_time_limit(tmp_path: Path) -> None:
    """Turn 1 calls a tool, turn 2 calls it with a value that makes it sleep, turn 3 answers."""
    tools = tmp_path / "my_tools.py"
    tools.write_text(
        "import time\n\n\ndef double(number: int) -> int:\n"
        '    """Double a number."""\n    time.sleep(number // 100)\n    return 2 * number\n'
    )
    config = ToolEpisodes(
        tools=(f"{tools}:double",), max_tokens=4096, tool_timeout_s=0.2, tool_format="hermes"
    )
    call = '<tool_call>\n{"name": "double", "arguments": {"number": %d}}\n</tool_call>'
    scripts = {"0": says(call % 21), "1": says(call % 200), "2": says("42")}

    def answer(request: Request) -> Sequence[int]:
        return scripts[request.request_id.rpartition("/")[2]]

    engine = ScriptedEngine(answer, TOKENIZER)
    with pool(config) as made:
        task_runner = runner(engine, made)
        task_runner.sampling = Sampling(100)
        groups, stats = sampled(task_runner, prompts(1))
    (group,) = groups
    for sample in group.samples:
        first, second, third = sample.episode.turns
        assert [message["content"] for message in first.answer] == ["42"]
        assert second.answer[0]["content"].startswith("error: TimeoutError")
        assert third.message["content"] == "42" and sample.episode.status == "done"
    measured = stats.floats()
    assert measured["episodes/tool_error_frac"] == 0.5  # one call of two
    assert measured["episodes/counts/tool_calls"] == 4 and measured["episodes/turns"] == 3


def test_tools_that_the_template_cannot_render_are_an_error_before_the_run(tmp_path: Path) -> None:
    """The template of models made from scratch ignores tools."""
    tools = tmp_path / "my_tools.py"
    tools.write_text('def now() -> str:\n    """Return the time."""\n    return "12:00"\n')
    runtime = InlineRuntime(
        scratch_tokenizer("abc"), precision=PrecisionConfig(), device="cpu", timeline=Timeline()
    )
    config = ToolEpisodes(tools=(f"{tools}:now",), max_tokens=100)
    with pytest.raises(RendererError, match="the environment offers tools"):
        build_episode_pool(config, MODEL, runtime)


def test_statistics_by_hand() -> None:
    """Two episodes, of 2 turns (status done) and 1 turn (max_turns). Engine 1 + 2 + 3 = 6 s,
    environment 0 + 1 + 1 = 2 s of 8 s; of the 20 prompt tokens of the later turn, 15 were cached.
    A count named like a statistic does not replace it."""
    turn = Turn(message={}, answer=(), num_tokens=4)
    first = replace(turn, num_prompt_tokens=9, engine_s=1.0, counts={"turns": 7.0})
    second = replace(
        turn, num_prompt_tokens=20, cached_tokens=15, engine_s=2.0, environment_s=1.0, problem="x"
    )
    third = replace(turn, engine_s=3.0, environment_s=1.0, counts={"turns": 1.0})
    records = [
        Episode("done", (), turns=(first, second), seconds=5.0),
        Episode("max_turns", (), turns=(third,), seconds=7.0),
    ]
    found = episode_stats(records).floats("")
    shares = {name for name, value in found.items() if value and name.endswith("s_frac")}
    assert shares == {"episodes/max_turns_frac"} and found["episodes/done_frac"] == 0.5
    assert "episodes/tool_error_frac" not in found
    expected = {
        "turns": 1.5, "turns_max": 2, "tokens": 6, "seconds": 6, "engine_s": 3, "environment_s": 1,
        "environment_frac": 0.25, "cached_prefix_frac": 0.75, "parse_problems": 1, "done": 1,
        "max_turns": 1, "max_turns_frac": 0.5, "env_error_frac": 0, "counts/turns": 8,
    }  # fmt: skip
    assert {name: found[f"episodes/{name}"] for name in expected} == expected
