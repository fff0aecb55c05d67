"""Episodes of agent programs with a scripted policy, for tests of the session and the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from chat_families import chat_tokenizer
from scripted_engine import Answer, ScriptedEngine

from burnish.agents.calls import ModelCall
from burnish.agents.episodes import AgentProgram, Agents
from burnish.agents.server import EpisodeServer
from burnish.agents.serving import Renderers, ServingBackend
from burnish.agents.session import TrainingSession
from burnish.episodes.loop import EpisodeLimits, EpisodeResult, Policy, Task
from burnish.episodes.renderer import ChatRenderer, TextCodec
from burnish.episodes.rows import episode_rows
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Request, Sampling

TOKENIZER = chat_tokenizer("chatml")
RENDERER = ChatRenderer(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}

Session = tuple[TrainingSession, ScriptedEngine]


def words(request: Request) -> Sequence[int]:
    """Random ids that depend on the seed only. The tokenizer encodes their text differently."""
    draw = random.Random(request.seed)
    ordinary = [i for i in range(len(TOKENIZER)) if i not in TOKENIZER.all_special_ids]
    return [*draw.choices(ordinary, k=draw.randint(2, 9)), END]


def says(write: Callable[[str], str]) -> Answer:
    """Answers with the text that ``write`` returns for the text of the prompt, one token per
    character: another tokenization than the tokenizer's, so text that is encoded again differs."""

    def answer(request: Request) -> Sequence[int]:
        text = write(TOKENIZER.decode(list(request.prompt_ids)))
        characters = TOKENIZER(list(text), add_special_tokens=False)["input_ids"]
        return [*(token for ids in characters for token in ids), END]

    return answer


def script(*texts: str) -> Answer:
    """Answers with one text after the other, whatever the prompt."""
    left = iter(texts)
    return says(lambda _: next(left))


def tool_call(name: str, **arguments: Any) -> str:
    """The text of a call, in the format of the tokenizer's chat template."""
    made = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{made}\n</tool_call>"


@asynccontextmanager
async def session(
    answer: Answer = words, *, tokenizer: Any = TOKENIZER, history: Any = None, **changes: Any
) -> AsyncIterator[Session]:
    engine = ScriptedEngine(answer, tokenizer)
    is_usual = tokenizer is TOKENIZER
    renderer = RENDERER if is_usual else ChatRenderer(tokenizer, history=history)
    turn_tokens = changes.pop("turn_tokens", 40)
    limits = {"max_turns": 50, "max_tokens": 4000, "step_timeout_s": 9, "timeout_s": 9, **changes}
    service = RolloutService(engine)
    with ThreadPoolExecutor(1) as rendering:
        end = END if is_usual else tokenizer.eos_token_id
        sampling = Sampling(turn_tokens, stop_token_ids=(end,))
        policy = Policy(service, renderer, sampling, rendering)
        made = TrainingSession(Task("t/0", {}, 0, sampling_seed=5), policy, EpisodeLimits(**limits))
        try:
            yield made, engine
        finally:
            await made.close()
            service.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(*messages: Any, **fields: Any) -> ModelCall:
    return ModelCall("gpt", tuple(messages), **fields)


def check_rows(result: EpisodeResult, engine: ScriptedEngine) -> None:
    """Every sampled token is in exactly one row, with the ids and the prompt of the engine."""
    rows = episode_rows(result.calls)
    found = []
    for row in rows:
        ids = row.prompt_ids + row.response_ids
        for turn in sorted(set(row.turns) - {-1}):
            at = [t for t, number in enumerate(row.turns) if number == turn]
            begin = len(row.prompt_ids) + at[0]
            found.append((ids[:begin], tuple(row.response_ids[t] for t in at)))
    log = [(request.prompt_ids, ids) for request, ids in engine.log]
    assert sorted(found) == sorted(log)
    trained = sum(sum(row.action_mask) for row in rows)
    assert trained == sum(len(ids) for _, ids in engine.log)
    assert len(result.record.turns) == len(log)


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def run_tasks(
    agents: Agents,
    rows: Sequence[dict[str, Any]],
    limits: EpisodeLimits,
    answer: Answer = words,
    *,
    server: EpisodeServer | None = None,
    turn_tokens: int = 40,
) -> tuple[list[EpisodeResult], ScriptedEngine]:
    """Run an episode with each row, all at once. Return the episodes and the engine."""
    engine = ScriptedEngine(answer, TOKENIZER)

    async def inside() -> list[EpisodeResult]:
        program = AgentProgram(server or EpisodeServer("127.0.0.1", 0), agents)
        service = RolloutService(engine)
        try:
            await program.start()
            with ThreadPoolExecutor(1) as rendering:
                sampling = Sampling(turn_tokens, stop_token_ids=(END,))
                policy = Policy(service, RENDERER, sampling, rendering)
                tasks = [
                    Task(f"t:{i}", row, row.get("seed", 0), i, prompt_text=row.get("prompt", ""))
                    for i, row in enumerate(rows)
                ]
                return list(
                    await asyncio.gather(*(program.run_episode(t, policy, limits) for t in tasks))
                )
        finally:
            await program.close()
            await wait_for(lambda: not engine.busy)
            service.close()

    return asyncio.run(inside()), engine


@contextmanager
def backend_of(answer: Any, make: Any = lambda _: RENDERER) -> Iterator[ServingBackend]:
    service = RolloutService(ScriptedEngine(answer, TOKENIZER))
    codec, renderers = TextCodec(TOKENIZER), Renderers(make)
    made = ServingBackend(service, codec, renderers, names=("gpt",), max_len=900, max_queue=2)
    try:
        yield made
    finally:
        made.close()
        service.close()
