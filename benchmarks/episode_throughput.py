"""Episodes per second with slow environments, and the cost of single turns and of follow-up turns.

    python benchmarks/episode_throughput.py [--part barriers single cache] [--engine local vllm]

``barriers``: the continuous engine against turn barriers. Episodes have 1 to 8 turns, and each step
of the environment takes 0 to 2 seconds (both uniform, equal on both sides). The barrier loop
generates one turn of all its episodes as one batch, steps all their environments concurrently, and
then begins the next turn. Both play the same episodes with the same engine, environments, chat
format and number of episodes at once. ``--concurrent 0``: all at once. ``--scale`` multiplies the
latencies. Each of ``--rounds`` rounds plays both in turn.

``single``: responses of a single turn. ``engine.generate`` against the service that episodes use
(``rollout/asynchronous/service.py``) and against episodes of one turn, in alternating rounds.

``cache``: share of the prompt tokens of follow-up turns that the engine reads from its cache, in 8
conversations of 8 turns: 300 tokens at the start, then 40 sampled and 20 observed tokens per turn.

The model is made from scratch: its computations take a small share of the time, as on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from typing import Any

from common import cpu_seconds, markdown_table, versions

PROMPT_CHARS, ANSWER_CHARS = 500, 16
MAX_TURNS, MAX_LATENCY_S = 8, 2.0
STOP = tuple("aeiou")
MAX_NEW = 256
TOKENS = 4096
CONVERSATIONS, TURNS, START, SAMPLED, OBSERVED = 8, 8, 300, 40, 20
ENGINES = ("local", "vllm")


class Latency:
    """Environment: 1 to 8 turns, each answered after up to two seconds."""

    def __init__(self, scale: float = 1.0, turns: int | None = None) -> None:
        self.scale, self.fixed_turns = scale, turns

    async def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        """Draw the number of turns and their latencies."""
        draw = random.Random(seed)
        turns = self.fixed_turns or draw.randint(1, MAX_TURNS)
        self.latencies = [draw.uniform(0, MAX_LATENCY_S) * self.scale for _ in range(turns)]
        text = "".join(draw.choices("bcdfghklm ", k=PROMPT_CHARS))
        return {"messages": [{"role": "user", "content": text}]}

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer after the next latency."""
        await asyncio.sleep(self.latencies.pop(0))
        if not self.latencies:
            return {"done": True}
        return {"messages": [{"role": "user", "content": "b" * ANSWER_CHARS}]}


@dataclass(frozen=True)
class Bench:
    """The parts that both sides use."""

    engine: Any
    pool: Any
    sampling: Any

    def close(self) -> None:
        """End the environment's process and the engine."""
        self.pool.close()
        self.engine.close()


def build(args: argparse.Namespace, engine: str, **options: Any) -> Bench:
    """Return engine, environments and sampling parameters. Heads have 32 dimensions, the least that
    vLLM accepts on a CPU."""
    from pydantic import TypeAdapter

    from burnish.config.episodes import EnvironmentEpisodes
    from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
    from burnish.jobs.episodes import build_episode_pool
    from burnish.models.load import load_tokenizer
    from burnish.observe.timeline import Timeline
    from burnish.rollout.base import Sampling
    from burnish.rollout.kinds import RolloutEngineConfig
    from burnish.runtime.inline import InlineRuntime

    heads = {"num_heads": args.hidden // 32, "num_kv_heads": args.hidden // 32}
    model = ModelConfig(
        scratch=ScratchConfig(hidden_size=args.hidden, max_position_embeddings=TOKENS, **heads)
    )
    tokenizer = load_tokenizer(model)
    config = EnvironmentEpisodes(
        environment=f"{__file__}:Latency",
        options={"scale": args.scale, **options},
        max_turns=MAX_TURNS,
        max_tokens=TOKENS,
        max_concurrent=args.concurrent or None,
    )
    runtime = InlineRuntime(
        tokenizer, precision=PrecisionConfig(), device="cpu", timeline=Timeline()
    )
    pool = build_episode_pool(config, model, runtime)
    assert pool is not None
    wanted = TypeAdapter(RolloutEngineConfig).validate_python({"kind": engine})
    built = runtime.standalone_rollout(model, wanted, max_len=TOKENS)
    ends = tuple(sorted(pool.renderer.stop_token_ids))
    return Bench(built, pool, Sampling(MAX_NEW, stop=STOP, stop_token_ids=ends))


def make_tasks(count: int, name: str) -> list[Any]:
    """Return ``count`` tasks. Their seeds do not depend on ``name``."""
    from burnish.episodes.loop import Task

    return [Task(f"{name}/{i}", {}, environment_seed=i, sampling_seed=i) for i in range(count)]


# ---- the barrier loop ----------------------------------------------------------------------------


async def play_with_barriers(bench: Bench, tasks: Sequence[Any]) -> list[list[tuple[int, ...]]]:
    """Play ``tasks`` turn by turn. Return the sampled ids of each episode's turns."""
    from burnish.episodes.loop import call_seed
    from burnish.rollout.base import Request

    renderer, environments = bench.pool.renderer, bench.pool.program.environments
    games = await asyncio.gather(
        *(environments.open(task.row, task.environment_seed, timeout_s=60) for task in tasks)
    )
    prompts = [renderer.render(game.start.messages) for game in games]
    sampled: list[list[tuple[int, ...]]] = [[] for _ in tasks]
    active = list(range(len(tasks)))
    while active:
        requests = [
            Request(str(i), prompts[i], seed=call_seed(tasks[i].sampling_seed, prompts[i]))
            for i in active
        ]
        done = {int(c.request_id): c for c in bench.engine.generate(requests, bench.sampling)}
        messages = {i: renderer.parse(done[i].token_ids).message for i in active}
        steps = await asyncio.gather(*(games[i].step(messages[i], timeout_s=60) for i in active))
        going = []
        for i, step in zip(active, steps, strict=True):
            sampled[i].append(done[i].token_ids)
            if not step.done:
                prompts[i] = renderer.bridge(prompts[i], done[i].token_ids, step.messages)
                going.append(i)
        active = going
    await asyncio.gather(*(game.close() for game in games))
    return sampled


def measure_barriers(bench: Bench, args: argparse.Namespace) -> tuple[float, list[Any]]:
    """Return wall seconds, and the sampled ids of each episode's turns."""
    tasks, sampled = make_tasks(args.episodes, "barrier"), []
    size = args.concurrent or args.episodes
    started = time.perf_counter()
    for begin in range(0, args.episodes, size):
        part = tasks[begin : begin + size]
        sampled += bench.pool.loop.run(play_with_barriers, bench, part)
    return time.perf_counter() - started, sampled


def measure_continuous(bench: Bench, args: argparse.Namespace) -> tuple[float, list[Any]]:
    """Return wall seconds and the played episodes."""
    tasks = make_tasks(args.episodes, "continuous")
    started = time.perf_counter()
    played = bench.pool.run(bench.engine, bench.sampling, tasks)
    return time.perf_counter() - started, played


def barriers(args: argparse.Namespace, engine: str) -> None:
    """Print both times, their ratio, and the share of follow-up prompts read from the cache."""
    ratios = []
    with closing(build(args, engine)) as bench:
        bench.pool.run(bench.engine, bench.sampling, make_tasks(1, "warmup"))
        for _ in range(args.rounds):
            barrier_s, expected = measure_barriers(bench, args)
            continuous_s, played = measure_continuous(bench, args)
            ratios.append((barrier_s / continuous_s, barrier_s, continuous_s))
    found = [[call.completion.token_ids for call in one.calls] for one in played]
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    later = [turn for one in played for turn in one.record.turns[1:]]
    cached = sum(t.cached_tokens for t in later) / sum(t.num_prompt_tokens for t in later)
    turns = sum(len(one.record.turns) for one in played)
    concurrent = args.concurrent or args.episodes
    print(f"{args.episodes} episodes, {turns} turns, {concurrent} at once; {equal} sampled equally")
    median = statistics.median(ratio for ratio, _, _ in ratios)
    rows = [
        (str(i + 1), *(f"{s:.1f} ({args.episodes / s:.2f})" for s in times), f"{ratio:.2f}")
        for i, (ratio, *times) in enumerate(ratios)
    ]
    heads = ["round", "turn barriers, s (episodes/s)", "continuous", "ratio"]
    print("\n".join(markdown_table(heads, rows)))
    print(f"median ratio {median:.2f}; cached share of follow-up prompts {cached:.3f}\n")


# ---- a single turn -------------------------------------------------------------------------------


def single(args: argparse.Namespace, engine: str) -> None:
    """Print user-CPU milliseconds per response of three ways to sample one response per prompt."""
    from burnish.rollout.asynchronous.service import RolloutService
    from burnish.rollout.base import Request

    args = argparse.Namespace(**{**vars(args), "scale": 0.0, "concurrent": 0})
    with closing(build(args, engine, turns=1)) as bench:
        prompt = bench.pool.renderer.render([{"role": "user", "content": "b" * PROMPT_CHARS}])
        requests = [Request(str(i), prompt, seed=i) for i in range(args.responses)]

        def generate() -> int:
            return sum(len(c.token_ids) for c in bench.engine.generate(requests, bench.sampling))

        def service() -> int:
            with closing(RolloutService(bench.engine)) as shared:
                futures = [shared.submit(request, bench.sampling) for request in requests]
                return sum(len(future.result().token_ids) for future in futures)

        def episodes() -> int:
            tasks = make_tasks(args.responses, "single")
            played = bench.pool.run(bench.engine, bench.sampling, tasks)
            return sum(turn.num_tokens for one in played for turn in one.record.turns)

        ways = {"engine.generate": generate, "service": service, "episodes of one turn": episodes}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds + 1):
            for name, way in ways.items():
                begun = cpu_seconds()
                way()
                times[name].append(cpu_seconds() - begun)
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    rows = [
        (name, f"{1e3 * s / args.responses:.2f}", f"{s / medians['engine.generate']:.2f}")
        for name, s in medians.items()
    ]
    print(f"{args.responses} responses of one turn, median of {args.rounds} rounds")
    heads = ["", "user-CPU ms per response", "ratio to engine.generate"]
    print("\n".join(markdown_table(heads, rows)) + "\n")


# ---- follow-up turns -----------------------------------------------------------------------------


def cache(args: argparse.Namespace, engine: str) -> None:
    """Print the share of the prompt tokens of follow-up turns that came from the cache."""
    from burnish.rollout.asynchronous.service import RolloutService
    from burnish.rollout.base import Request, Sampling

    draw = random.Random(0)
    prompts = [tuple(draw.choices(range(6, 40), k=START)) for _ in range(CONVERSATIONS)]
    counted: list[tuple[int, int]] = []
    bench = build(args, engine)
    with closing(bench), closing(RolloutService(bench.engine)) as service:
        for turn in range(TURNS):
            requests = [
                Request(f"{i}/{turn}", prompt, seed=i, conversation=str(i))
                for i, prompt in enumerate(prompts)
            ]
            futures = [service.submit(request, Sampling(SAMPLED)) for request in requests]
            done = [future.result() for future in futures]
            counted += [(len(p), c.cached_tokens) for p, c in zip(prompts, done, strict=True)]
            observed = [draw.choices(range(6, 40), k=OBSERVED) for _ in prompts]
            prompts = [
                (*p, *c.token_ids, *new) for p, c, new in zip(prompts, done, observed, strict=True)
            ]
    read, cached = (sum(column) for column in zip(*counted[CONVERSATIONS:], strict=True))
    tokens = sum(map(len, prompts)) // CONVERSATIONS
    print(
        f"{engine}: {cached / read:.3f} of {read} prompt tokens of {TURNS - 1} follow-up turns in "
        f"{CONVERSATIONS} conversations came from the cache (mean final length {tokens})\n"
    )


PARTS = {"barriers": barriers, "single": single, "cache": cache}


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["local"])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--concurrent", type=int, default=16, help="0: all")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all latencies")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--responses", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    print(versions("torch", "transformers"), end="")
    for package in packages_distributions()["vllm"] if "vllm" in args.engine else ():
        print(f", {package} {version(package)}", end="")
    print(", one thread\n")
    for engine in args.engine:
        for part in args.part:
            print(f"## {part}, {engine}\n")
            PARTS[part](args, engine)


if __name__ == "__main__":
    main()
