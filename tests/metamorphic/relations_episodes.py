"""Relations of episodes: order of parallel calls, killed and resumed agents, failures in an
evaluation, and the text of tool results."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import math
import random
import tempfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from metamorphic.base import Broken, Draw, Refused, equal, relation
from metamorphic.draw_text import write_rows

from burnish.agents.calls import ModelCall
from burnish.agents.session import TrainingSession
from burnish.checkpoint.state import load_state, save_state
from burnish.config.generate import AllSamples
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.config.rollout import EvalConfig
from burnish.data.chat import encode_prompt
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.demonstrations.encode import SFTEncoder
from burnish.data.forms import open_rows
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.generation import GenerationPrompt
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import ResponseEncoder
from burnish.data.selection import select
from burnish.data.stream import RowRef
from burnish.environments.multi_turn import Start, Step
from burnish.environments.pool import EpisodeFailedError
from burnish.environments.results import ToolResultError, as_text
from burnish.episodes.loop import (
    EngineCall,
    EpisodeLimits,
    EpisodeResult,
    Policy,
    Task,
    run_episode,
)
from burnish.episodes.probing import TOOLS, call
from burnish.episodes.renderer import ChatRenderer, RendererError
from burnish.episodes.runner import FAILED, EpisodeRunner, episode_sample
from burnish.jobs.evaluate import Evaluator
from burnish.rewards.base import RewardInput
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.model.rows import reward_encoder
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Completion, Request, Sampling, VersionSpan
from burnish.rollout.sample_state import samples_from_plain, samples_to_plain
from burnish.transcript import Episode, Turn
from burnish.types import Group, Prompt

CLOCKS = ("seconds", "engine_s", "environment_s", "cached_tokens")
PROMPT = Prompt("p", (1,), "?")


# ---- agents --------------------------------------------------------------------------------------


def family() -> Any:
    """(renderer, tokenizer, id of the end token) of a ChatML model."""
    from chat_families import chat_tokenizer

    tokenizer = chat_tokenizer("chatml")
    return ChatRenderer(tokenizer), tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")


Plan = Sequence[Sequence[tuple[int | None, str, dict[str, Any]]]]
"""Phases of calls at once: (number of the call that it continues, text, parameters)."""


def draw_plan(draw: Draw) -> Plan:
    """Votes (equal calls), sub-agents, and branches of earlier conversations."""
    plan: list[list[tuple[int | None, str, dict[str, Any]]]] = []
    count = 0
    for _ in range(draw.rng.randint(1, 4)):
        phase: list[tuple[int | None, str, dict[str, Any]]] = []
        for _ in range(draw.rng.randint(1, 5)):
            parent = draw.rng.choice([None, *range(count)])
            text = draw.rng.choice(["vote", "a", "b", "long " * draw.rng.randint(1, 80)])
            more: dict[str, Any] = draw.rng.choice([{}, {"temperature": 0.1}, {"max_tokens": 1}])
            phase.append((parent, text, more))
        count += len(phase)
        plan.append(phase)
    draw.note(plan=plan)
    return plan


async def agent(plan: Plan, ask: Callable[..., Awaitable[Any]]) -> None:
    """Send the calls of each phase at once. A call that was refused is not continued."""
    done: list[list[Any]] = []
    for phase in plan:
        given = [
            [*(done[parent] if parent is not None else []), {"role": "user", "content": text}]
            for parent, text, _ in phase
        ]
        replies = await asyncio.gather(
            *(ask(g, **more) for g, (_, _, more) in zip(given, phase, strict=True)),
            return_exceptions=True,
        )
        done += [
            [] if isinstance(reply, Exception) else [*messages, reply]
            for messages, reply in zip(given, replies, strict=True)
        ]


def run_plan(plan: Plan, order: int, limits: EpisodeLimits, seed: int) -> EpisodeResult:
    """Run an episode whose replies are sampled in an order that ``order`` seeds."""
    from scripted_engine import ScriptedEngine

    renderer, tokenizer, end = family()
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]

    def words(request: Request) -> Sequence[int]:
        rng = random.Random(request.seed)
        return [*rng.choices(ordinary[:6], k=rng.randint(1, 3)), end]

    async def inside() -> EpisodeResult:
        service = RolloutService(ScriptedEngine(words, tokenizer, seed=order))
        with ThreadPoolExecutor(1) as rendering:
            policy = Policy(service, renderer, Sampling(20, stop_token_ids=(end,)), rendering)
            session = TrainingSession(Task("t/0", {}, 0, sampling_seed=seed), policy, limits)

            async def ask(messages: Any, **more: Any) -> Any:
                digest = random.randbytes(8)
                reply = await session.respond(
                    ModelCall("m", tuple(messages), **more), digest=digest
                )
                return reply.choices[0].message

            try:
                await agent(plan, ask)
                return session.result({"reward": 1.0})
            finally:
                await session.close()
                service.close()

    return asyncio.run(inside())


def trained(finished: EpisodeResult) -> Any:
    """Everything of an episode that is trained, scored or shown, but times."""
    if not finished.calls:
        return finished.record.status
    sample = episode_sample(PROMPT, "p/0", finished)
    turns = [{k: v for k, v in vars(t).items() if k not in CLOCKS} for t in finished.record.turns]
    own = {k: v for k, v in vars(sample).items() if k != "episode"}
    return repr((own, sample.rows, finished.record.status, finished.record.start, turns))


def draw_limits(draw: Draw) -> EpisodeLimits:
    turns, tokens = draw.one(turns=[3, 50]), draw.one(tokens=[120, 4000])
    return EpisodeLimits(max_turns=turns, max_tokens=tokens, step_timeout_s=60, timeout_s=60)


@relation
def calls_in_any_order(draw: Draw) -> None:
    """An episode does not depend on the order in which the replies to its parallel calls are
    sampled. Exact."""
    plan, limits, seed = draw_plan(draw), draw_limits(draw), draw.rng.getrandbits(32)
    first, second = (trained(run_plan(plan, order, limits, seed)) for order in (1, 2))
    equal(second, first, "episode")


@relation
def episodes_in_a_checkpoint(draw: Draw) -> None:
    """A finished episode of an agent is the same after the way through a checkpoint, while its
    session counts on, and so equals the one that a resumed run repeats. Exact."""
    plan, limits, seed = draw_plan(draw), draw_limits(draw), draw.rng.getrandbits(32)
    finished, again = (run_plan(plan, order, limits, seed) for order in (1, 2))
    if not finished.calls:
        return
    sample = episode_sample(PROMPT, "p/0", finished)
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder), "rl", samples_to_plain([sample]))
        (loaded,) = samples_from_plain(load_state(Path(folder), "rl"))
    equal(repr(loaded), repr(sample), "sample in the file")
    assert loaded.episode is not None
    calls = tuple(EngineCall(c.prompt_ids, c.completion) for c in finished.calls)
    equal(
        trained(again),
        trained(EpisodeResult(loaded.episode, calls)),
        "episode that is run again",
    )


# ---- rows of an agent's calls --------------------------------------------------------------------

AGENT_TOOLS: tuple[tuple[Any, ...], ...] = ((), (TOOLS[0],), tuple(TOOLS))


@dataclass
class _Talk:
    """A conversation of an agent with its policy, as its client keeps it."""

    kind: str
    """``chat``, or of calls without a chat template ``text`` and ``ids``."""
    tools: tuple[Any, ...]
    messages: list[Any]
    tokenizer: Any
    prompt: Any = None
    """Text or ids so far, without a chat template."""

    def call(self) -> ModelCall:
        if self.kind == "chat":
            return ModelCall("m", tuple(self.messages), tools=self.tools)
        prompt = self.prompt if self.kind == "text" else tuple(self.prompt)
        return ModelCall("m", prompt=prompt, return_token_ids=True)

    def add(self, choice: Any, draw: Draw) -> None:
        """Keep a reply as clients do, and answer it."""
        if self.kind == "chat":
            self._add_message(choice.message, draw)
            return
        more = draw.rng.choice(["", " ", f"\nObs: {draw.rng.randrange(99)}\n"])
        if self.kind == "text":
            self.prompt += choice.message["content"] + more
        else:
            more_ids = self.tokenizer(more, add_special_tokens=False)["input_ids"]
            self.prompt += [*choice.token_ids, *more_ids]

    def _add_message(self, reply: Any, draw: Draw) -> None:
        echoed = {k: v for k, v in reply.items() if k != "reasoning_content"}
        echoed["content"] = echoed["content"] + draw.rng.choice(["", " ", "\n"])
        if draw.rng.random() < 0.3:
            echoed = dict(reply)
        if draw.rng.random() < 0.1:
            echoed = {"role": "assistant", "content": "edited by the client"}
        calls = []
        for n, made in enumerate(echoed.get("tool_calls", ())):
            function = made["function"]
            arguments = {k: v if k == "key" else float(v) for k, v in function["arguments"].items()}
            calls.append({**made, "id": f"id{n}", "function": {**function, "arguments": arguments}})
        self.messages.append(echoed | ({"tool_calls": calls} if calls else {}))
        self.messages += [
            {
                "role": "tool",
                "content": "12",
                "tool_call_id": c["id"],
                "name": c["function"]["name"],
            }
            for c in calls
        ]
        if not calls:
            self.messages.append({"role": "user", "content": f"go on {len(self.messages)}"})


def draw_talks(draw: Draw, tokenizer: Any) -> list[_Talk]:
    """Conversations with a chat template and without, of which each has its own tools."""
    talks = []
    for number in range(draw.one(talks=[1, 2, 3])):
        start = [{"role": "user", "content": f"task {number}"}]
        kind = draw.rng.choice(["chat", "chat", "text", "ids"])
        text = encode_prompt(tokenizer, start)[0] if draw.rng.random() < 0.5 else "Q: 1\nA:"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = text if kind == "text" else ids
        talks.append(_Talk(kind, draw.rng.choice(AGENT_TOOLS), start, tokenizer, prompt))
    draw.note(kinds=[t.kind for t in talks], tools=[len(t.tools) for t in talks])
    return talks


def _written_reply(request: Request, prompt: str) -> str:
    """A reply in the form of the template: reasoning, and a call if the prompt has tools."""
    rng = random.Random(request.seed)
    text = f"<think>\nwhy {rng.randrange(99)}\n</think>\n\n" if rng.random() < 0.6 else ""
    if '"look_up"' in prompt and rng.random() < 0.6:
        function = {"name": "look_up", "arguments": {"key": "a b", "limit": rng.randrange(9)}}
        return f"{text}<tool_call>\n{json.dumps(function)}\n</tool_call>"
    return f"{text}answer {rng.randrange(99)}"


def run_talks(draw: Draw) -> tuple[Any, EpisodeResult]:
    """Run an agent with several conversations, whose turns are in a random order. Returns (its
    tokenizer, the episode)."""
    from scripted_engine import ScriptedEngine

    renderer, tokenizer, end = family()
    talks = draw_talks(draw, tokenizer)
    order = [draw.rng.choice(talks) for _ in range(draw.one(calls=[1, 3, 5, 7]))]
    draw.note(order=[talks.index(talk) for talk in order])

    def answer(request: Request) -> Sequence[int]:
        prompt = tokenizer.decode(list(request.prompt_ids))
        text = _written_reply(request, prompt)
        has_end = prompt.endswith("assistant\n") or request.seed % 2
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], *[end] * has_end]

    async def inside() -> EpisodeResult:
        service = RolloutService(ScriptedEngine(answer, tokenizer))
        with ThreadPoolExecutor(1) as rendering:
            policy = Policy(service, renderer, Sampling(200, stop_token_ids=(end,)), rendering)
            limits = EpisodeLimits(max_turns=50, max_tokens=9000, step_timeout_s=60, timeout_s=60)
            session = TrainingSession(
                Task("t/0", {}, 0, sampling_seed=draw.rng.getrandbits(32)), policy, limits
            )
            try:
                for number, talk in enumerate(order):
                    reply = await session.respond(talk.call(), digest=bytes([number]))
                    talk.add(reply.choices[0], draw)
                return session.result({"reward": 1.0})
            finally:
                await session.close()
                service.close()

    return tokenizer, asyncio.run(inside())


def _texts(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> tuple[str, str]:
    """Text of a row and of its trained tokens, without the end of the row: rows of text write an
    end token also if none was sampled, and templates a line break behind it."""
    trained = [token for token, on in zip(ids, mask, strict=True) if on]
    texts = (tokenizer.decode(part).rstrip("\n") for part in (list(ids), trained))
    return next(texts).removesuffix("<|im_end|>"), next(texts).removesuffix("<|im_end|>")


@relation
def rows_of_agents_are_what_the_policy_read(draw: Draw) -> None:
    """The rows of an agent's calls, trained as text, are their tokens, and a reward model reads the
    last response behind the prompt of the policy, as does the job score: with and without a chat
    template, whatever tools each call has, in whichever order conversations go on, and whatever the
    client does to them. Exact."""
    tokenizer, finished = run_talks(draw)
    sample = episode_sample(PROMPT, "p/0", finished)
    read = reward_encoder(tokenizer, tokenizer, "rm")(RewardInput(PROMPT, sample))
    found, expected = (
        _texts(tokenizer, [*p, *r], [False] * len(p) + [True] * len(r))
        for p, r in (read, sample.last_response)
    )
    equal(found, expected, "the row of a reward model")
    rows = select(
        *(AllSamples(), [Group(0, PROMPT, (sample,))]),
        {"p": GenerationPrompt(PROMPT, "?", "?", None, False, {})},
        with_tokens=True,
        tokenizer=tokenizer,
    ).rows
    path = write_rows(draw, rows)
    for use_tokens in (True, False):
        config = SFTDataConfig(sources=(path,), max_len=9000, use_tokens=use_tokens)  # type: ignore[arg-type]
        encoder, (source,) = SFTEncoder(config, tokenizer), open_rows(config)
        for number, token_row in enumerate(sample.rows):
            row = encoder.encode(source[number], RowRef("rows", number, 0))
            ids = [*token_row.prompt_ids, *token_row.response_ids]
            mask = [False] * len(token_row.prompt_ids) + list(token_row.action_mask)
            found, expected = (_texts(tokenizer, *r) for r in ((row.ids, row.mask), (ids, mask)))
            equal(found, expected, f"row {number}, use_tokens={use_tokens}")
    given = ResponseDataConfig(sources=(path,))  # type: ignore[arg-type]
    (source,) = open_rows(given)
    for number, token_row in enumerate(sample.rows):
        scored = ResponseEncoder(given, tokenizer).encode(source[number], RowRef("rows", number, 0))
        found, expected = (
            [tuple(map(list, row.last_response)), len(set(row.turns) - {-1})]
            for row in (scored.group.samples[0], token_row)
        )
        equal(found, expected, f"the last response and number of responses of row {number}")


# ---- evaluation ----------------------------------------------------------------------------------


def result(score: float | None, status: Any) -> EpisodeResult:
    """An episode with a score; None: it failed."""
    if score is None:
        return EpisodeResult(Episode(status, ()), (), EpisodeFailedError(status, "failed"))
    completion = Completion("r", 0, (7,), (-1.0,), "stop", "4", (VersionSpan(0, 0, 1),))
    said = {"role": "assistant", "content": "4"}
    record = Episode("done", (), turns=(Turn(said, (), rewards={"right": score}),))
    return EpisodeResult(record, (EngineCall((1,), completion),))


class _Scores(EpisodeRunner):
    """Runs episodes with given scores. None: the episode failed with ``status``, or the reward
    did."""

    def __init__(self, scores: Sequence[Sequence[float | None]], status: str) -> None:
        self.scores, self.status, self.num_samples = scores, status, len(scores[0])
        if status == "the reward failed":
            self.scores = [[math.nan if s is None else s for s in row] for row in scores]
        self.seed, self.dynamic = 0, None
        self.rewards = RewardSet(
            [(EpisodeScorer("right", name="right"), 1.0)],
            on_failure=FailurePolicy(then="drop_group"),
            shaping=ShapingConfig(),
            generate_max_len=9,
        )

    def draw_all(self, prompts: Sequence[Prompt], *, least: int = 2) -> list[Any]:
        return [
            self._group_of(prompt, [result(s, self.status) for s in row], least=least)
            for prompt, row in zip(prompts, self.scores, strict=True)
        ]

    def check(self, drawn: Any) -> None:
        """Any share of episodes may fail."""


@relation
def failures_are_not_passed(draw: Draw) -> None:
    """An evaluation with failed episodes, or samples on which a reward fails, has the numbers of
    one in which their scores are 0. 1e-12: sums in another order."""
    prompts, count = draw.one(prompts=range(1, 7)), draw.one(samples=range(1, 5))
    scores = [[draw.rng.choice([None, 0.0, 1.0]) for _ in range(count)] for _ in range(prompts)]
    scores[0][0] = draw.one(first=[0.0, 1.0])
    draw.note(scores=scores)
    config = EvalConfig(
        data=PromptDataConfig(sources=["x.jsonl"]),
        n_samples_per_prompt=count,
        temperature=1.0,
        pass_k=tuple(range(1, count + 1)),
    )
    given = [Prompt(f"p:{i}@0", (1,), "?") for i in range(prompts)]
    found, wanted = (
        Evaluator(config, {"": given}, _Scores(rows, status), lambda *_: None).evaluate(0)
        for rows in (scores, [[score or 0.0 for score in row] for row in scores])
        for status in [draw.one(status=[*FAILED, *["the reward failed"] * 3])]
    )
    failed = sum(score is None for row in scores for score in row) / (prompts * count)
    if not math.isclose(found.pop("eval/failed_frac"), failed, abs_tol=1e-12):
        raise Broken(f"failed_frac is not {failed}")
    wanted.pop("eval/failed_frac")
    for name, value in wanted.items():
        if not math.isclose(found[name], value, abs_tol=1e-12):
            raise Broken(f"{name}: {found[name]} is not {value}")


# ---- results of tools ----------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


class Plain:
    """An object without a text."""


Point = make_dataclass("Point", [("x", Any), ("y", Any)])
LEAVES: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice([None, True, "text", "", 'quo"te', "\ud800"]),
    lambda rng: rng.randint(-5, 5),
    lambda rng: rng.random(),
    lambda rng: rng.randbytes(3) if rng.random() < 0.5 else b"abc",
    lambda rng: np.float32(rng.random()),
    lambda rng: np.arange(rng.randint(0, 3)),
    lambda rng: datetime.date(2026, 1, rng.randint(1, 28)),
    lambda rng: Color.RED,
    lambda rng: Plain(),
    lambda rng: (i for i in range(3)),
    lambda rng: print if rng.random() < 0.5 else (lambda: 0),
    lambda rng: frozenset(rng.sample(["a", "b", "c", 1, 2.5], rng.randint(0, 5))),
)


def value_of(rng: random.Random, depth: int = 0) -> Any:
    """A new value of a random type, with everything in it new."""
    if depth > 2 or rng.random() < 0.5:
        return rng.choice(LEAVES)(rng)
    items = [value_of(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    kind = rng.randrange(6)
    if kind == 0:
        return {rng.choice(["a", 1, ("t", 2), Color.RED]): item for item in items}
    if kind == 1:
        return Point(items, rng.randint(0, 3))
    if kind == 2:
        return Counter(rng.choices("abc", k=3))
    return (list, tuple, deque)[kind - 3](items)


@relation
def tool_results_have_one_text(draw: Draw) -> None:
    """Two equal results of a tool, made anew, have the same text or the same error, without a
    memory address. A JSON value has its own text. Exact."""
    seed = draw.rng.getrandbits(32)
    values = [value_of(random.Random(seed)) for _ in range(2)]
    draw.note(type=type(values[0]).__name__)
    texts = []
    for value in values:  # both are alive, so they have different addresses
        try:
            texts.append(as_text(value))
        except ToolResultError as error:
            texts.append(f"error: {error}")
    equal(texts[1], texts[0], "text")
    if " at 0x" in texts[0].replace("at 0x...", ""):
        raise Broken(f"a memory address: {texts[0]}")
    plain = {"a": [draw.rng.randint(0, 9), None, {"b": draw.rng.random()}]}
    equal(json.loads(as_text(plain)), plain, "JSON")


# ---- answers -------------------------------------------------------------------------------------

TAGS = ("<think>", "</think>", " ", "\n", "a", "Use the ", " tag", "`", "<th", "<", "漢字", "```\n")
FORMS = ("after reasoning", "framed", "always", "opened", "xml", "harmony")
"""When the template writes a block of reasoning: only with reasoning, the same between special
tokens, always, always with its opening tag in the prompt, never. Harmony has channels."""


def tokenizer_of(form: str) -> Any:
    """A tokenizer whose chat template writes reasoning in a form."""
    from chat_families import chat_tokenizer

    tokenizer = chat_tokenizer(form if form in ("xml", "harmony") else "chatml")
    if form == "framed":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|open|>", "<|close|>"]})
        before, call_end, rest = tokenizer.chat_template.partition(
            "{% endfor %}<|im_end|>\n{% elif"
        )
        template = before.replace("{% if m.reasoning", "<|open|>{% if m.reasoning")
        tokenizer.chat_template = template + call_end.replace("<|im", "<|close|><|im") + rest
    if form in ("always", "opened"):
        body = tokenizer.chat_template.replace("{% if m.reasoning_content %}<think>", "<think>")
        head, block, rest = body.partition("{{ m.reasoning_content }}\n</think>\n\n")
        template = head + block.replace(" }}", " or '' }}") + rest.removeprefix("{% endif %}")
        last = "<|im_start|>assistant\n" + ("<think>\n" if form == "opened" else "")
        tokenizer.chat_template = template.removesuffix("<|im_start|>assistant\n{% endif %}") + (
            last + "{% endif %}"
        )
    return tokenizer


def draw_answer(draw: Draw, form: str) -> dict[str, Any]:
    """An answer that mentions tags of reasoning in its content and in the arguments of its calls.
    Without a block before it, it begins with a word."""
    texts = ["".join(draw.rng.choices(TAGS, k=draw.rng.randint(0, 9))).strip() for _ in range(3)]
    answer: dict[str, Any] = {"role": "assistant", "content": texts[0]}
    if form != "xml" and draw.rng.random() < 0.6:
        answer["reasoning_content"] = "I " + texts[1].replace("</think>", "")
    elif form in ("after reasoning", "framed", "xml"):
        answer["content"] = f"So {texts[0]}"
    if form != "harmony" and draw.rng.random() < 0.5:
        answer["tool_calls"] = [call("look_up", {"key": texts[2]}, "probe0000")]
    draw.note(answer=answer)
    return answer


@relation
def rendered_answers_are_read_back(draw: Draw) -> None:
    """The text that a template writes for an answer is parsed to that answer. What is sent of it
    is a beginning of it, however the tokens arrive. Exact."""
    form = draw.one(form=FORMS)
    tokenizer, answer = tokenizer_of(form), draw_answer(draw, form)
    question = [{"role": "user", "content": "Go."}]
    prompt, text = (
        tokenizer.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=generate
        )
        for messages, generate in ((question, True), ([*question, answer], False))
    )
    equal(text[: len(prompt)], prompt, "the prompt in the complete text")
    renderer = ChatRenderer(tokenizer, history="keep")
    ids = tokenizer(text[len(prompt) :].rstrip("\n"), add_special_tokens=False)["input_ids"]
    message = renderer.parse(ids, TOOLS).message
    for call_ in message.get("tool_calls", ()):
        call_["id"] = "probe0000"
    equal(message, _stripped(answer), "the message")
    stream, sent, rest = renderer.stream(()), ("", ""), ids[:-1]  # without the end token
    while rest:
        length = draw.rng.choice((1, 1, 2, 9))
        parts, rest = stream.feed(rest[:length]), rest[length:]
        sent = (sent[0] + parts[0], sent[1] + parts[1])
    beginnings = (message.get("reasoning_content", ""), message["content"])
    equal(sent, tuple(b[: len(s)] for b, s in zip(beginnings, sent, strict=True)), "the stream")


def _stripped(answer: dict[str, Any]) -> dict[str, Any]:
    texts = {key: value.strip() for key, value in answer.items() if isinstance(value, str)}
    return {**answer, **texts}


GATHERED = "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
"""Beginning of a template that writes all system messages first, as DeepSeek's do."""


@relation
def new_messages_are_in_the_next_prompt(draw: Draw) -> None:
    """What is appended to a turn contains the texts of all messages that follow it, in their order.
    Exact."""
    from chat_families import FAMILIES, chat_tokenizer

    tokenizer = chat_tokenizer(draw.one(family=sorted(FAMILIES)))
    if draw.one(gathers=[True, False]):
        others = "{% for m in messages if m.role != 'system' %}"
        template = tokenizer.chat_template.replace("{% for m in messages %}", others)
        tokenizer.chat_template = GATHERED + template
    roles = draw.one(roles=[draw.rng.choices(("user", "system", "tool"), k=n) for n in (1, 2, 3)])
    words = ["the", "Ein", "漢字", "\U000f0000a\U000f0001", min(tokenizer.all_special_tokens)]
    texts = [f"{draw.rng.choice(words)} w{i}w" for i in range(len(roles))]
    new = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    renderer = ChatRenderer(tokenizer, history="keep")
    sampled = (
        *tokenizer("So.", add_special_tokens=False)["input_ids"],
        min(renderer.stop_token_ids),
    )
    prompt = renderer.render([{"role": "user", "content": "Go."}])
    try:
        following = renderer.bridge(prompt, sampled, new)
    except RendererError as error:
        if set(roles) == {"user"}:
            raise Broken(f"user messages are refused: {error}") from error
        raise Refused(str(error)) from error
    appended = tokenizer.decode(list(following)[len(prompt) + len(sampled) :])
    equal([text for text in texts if text in appended], texts, "texts of the new messages")
    places = [appended.index(text) for text in texts]
    equal(sorted(places), places, "order of the new messages")


_BY = {
    "nothing": "false",
    "a word of the system": "messages[0].role == 'system' and '/brief' in messages[0].content",
    "a word of any user": "'/brief' in (messages | selectattr('role', 'equalto', 'user') | "
    "map(attribute='content') | join)",
    "the number of answers": "messages | selectattr('role', 'equalto', 'assistant') | list | "
    "length > 1",
}
"""Conditions of a template about a conversation."""


@dataclass
class _Questions:
    """An environment, and its only episode, that asks one question after another."""

    start: Start
    questions: deque[str]

    async def open(self, *_: Any, **__: Any) -> _Questions:
        return self

    async def step(self, *_: Any, **__: Any) -> Step:
        if not self.questions:
            return Step(done=True)
        return Step([{"role": "user", "content": self.questions.popleft()}])

    async def close(self) -> None:
        pass


@relation
def prompts_end_as_complete_renderings(draw: Draw) -> None:
    """The text behind an answer in a prompt is that of the conversation rendered at once, also if
    the template begins answers by a condition on earlier messages. Environments and agents.
    Exact."""
    from chat_families import chat_tokenizer
    from scripted_engine import ScriptedEngine

    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    begins = "<|im_start|>assistant\n{% if " + _BY[draw.one(by=list(_BY))] + " %}Brief: {% endif %}"
    template = tokenizer.chat_template
    head, mark, tail = template.rpartition("<|im_start|>assistant\n")
    tokenizer.chat_template = head + begins + tail
    if not mark or ChatRenderer(tokenizer, history="keep").rejected:
        raise Broken("the template is refused")
    words = ["Go.", "Go. /brief", "And?", "Why /brief"]
    system = [{"role": "system", "content": draw.rng.choice(words)}] * draw.rng.randint(0, 1)
    questions = draw.rng.choices(words, k=4)
    draw.note(system=system, questions=questions)
    start = [*system, {"role": "user", "content": questions[0]}]

    def answer(request: Request) -> Sequence[int]:
        return [*tokenizer("So.", add_special_tokens=False)["input_ids"], end]

    engine = ScriptedEngine(answer, tokenizer)

    async def episode(policy: Policy, limits: EpisodeLimits) -> None:
        task = Task("t/0", {}, 0, sampling_seed=1)
        if draw.one(program=["environment", "agent"]) == "environment":
            asks: Any = _Questions(Start(start), deque(questions[1:]))
            await run_episode(task, policy, asks, limits)
            return
        session, messages = TrainingSession(task, policy, limits), list(start)
        try:
            for question in [*questions[1:], None]:
                called = ModelCall("m", tuple(messages))
                reply = await session.respond(called, digest=random.randbytes(8))
                messages += [reply.choices[0].message, {"role": "user", "content": question or ""}]
        finally:
            await session.close()

    async def inside() -> None:
        service = RolloutService(engine)
        with ThreadPoolExecutor(1) as rendering:
            renderer = ChatRenderer(tokenizer, history="keep")
            policy = Policy(service, renderer, Sampling(9, stop_token_ids=(end,)), rendering)
            try:
                await episode(policy, EpisodeLimits(max_turns=9, max_tokens=900, timeout_s=60))
            finally:
                service.close()

    asyncio.run(inside())
    said = {"role": "assistant", "content": "So."}
    conversation = list(start)
    for (request, _), question in zip(engine.log, [*questions[1:], ""], strict=True):
        wanted = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        text = tokenizer.decode(list(request.prompt_ids))
        equal(text.rpartition("So.")[2], wanted.rpartition("So.")[2], "text behind the last answer")
        conversation += [said, {"role": "user", "content": question}]


_XML = "<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
_GLM = "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>\n"
_PAIRS = "{% for k, v in f.arguments | items %}"
_TAGS = ("<tool_call>\n", "\n</tool_call>")
_PUBLISHED_CALLS = (
    (_TAGS[0], "{{ f | tojson }}", _TAGS[1]),
    (_TAGS[0], "{{ f.name }}\n" + _PAIRS + _GLM + "{% endfor %}", "</tool_call>"),
    (_TAGS[0], "<function={{ f.name }}>\n" + _PAIRS + _XML + "{% endfor %}</function>", _TAGS[1]),
    ("[TOOL_CALLS]", "{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
)
"""Text before a call, the call, text after it."""
_RESEMBLING = {
    "tool_call>": "seed:tool_call>",
    "{{ f.name }}": "<name>{{ f.name }}</name>",
    "{{ f | tojson }}": '{"function": "{{ f.name }}", "input": {{ f.arguments | tojson }}}',
    "</arg_key>": "</arg_key>\n",
    "[ARGS]": "[ARGS] ",
    "name }}\n": "name }}<tool_sep>\n",
    "<parameter={{ k }}>": '<parameter name="{{ k }}">',
    "</function>": "</invoke>",
}
"""Part of a call -> another text in its place."""


@relation
def offered_tools_have_calls_that_are_read(draw: Draw) -> None:
    """If a template writes calls in the form of a family, or in one that resembles it, a renderer
    that accepts tools reads them. Exact."""
    from chat_families import chat_tokenizer

    tokenizer = chat_tokenizer("chatml")
    written = "".join(draw.one(published=_PUBLISHED_CALLS))
    changed = draw.one(changed=[part for part in ("", "", "", *_RESEMBLING) if part in written])
    written = written.replace(changed, _RESEMBLING[changed]) if changed else written
    each = "{% for c in m.tool_calls or [] %}"
    head, _, rest = tokenizer.chat_template.partition(each)
    body = "{% set f = c.function %}" + written
    tokenizer.chat_template = head + each + body + rest[rest.index("{% endfor %}") :]
    renderer = ChatRenderer(tokenizer, history="keep")
    if not renderer.reads_tool_calls:
        if not changed:
            raise Broken("a known format is refused")
        raise Refused("the calls are in no known format")
    words = draw.rng.choices(("a", "the key", "7", "{", "漢字"), k=draw.rng.randint(1, 4))
    arguments = {"key": " ".join(words), "limit": draw.rng.randint(-9, 99)}
    drawn = call("look_up", arguments, "probe0000")
    answer = {"role": "assistant", "content": "", "tool_calls": [drawn]}
    question = {"role": "user", "content": "Go."}
    text = tokenizer.apply_chat_template([question, answer], tools=list(TOOLS), tokenize=False)
    sampled = text.rpartition("<|im_start|>assistant\n")[2].rstrip("\n")
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    calls = renderer.parse(ids, TOOLS).message.get("tool_calls", ())
    equal([c["function"] for c in calls], [drawn["function"]], "the calls")
