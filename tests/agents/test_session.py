"""Sessions of agent programs with a scripted policy: exact tokens whatever the client does to the
history, one record per call, limits and statuses."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from agent_session import (
    END,
    RENDERER,
    TOKENIZER,
    TOOL,
    call,
    check_rows,
    session,
    tool_call,
    user,
    wait_for,
    words,
)
from chat_families import chat_tokenizer
from chat_templates import named_tokenizer, published_tokenizer, trl_tokenizer
from scripted_engine import Answer, ScriptedEngine

from burnish.agents.anthropic_messages import Messages
from burnish.agents.calls import CallError, ModelReply
from burnish.agents.prompts import History, digests_of, thoughts_of
from burnish.agents.retries import Retries
from burnish.agents.session import TrainingSession
from burnish.agents.writing import openai_error
from burnish.environments.pool import EpisodeFailedError
from burnish.episodes.loop import EpisodeResult
from burnish.episodes.renderer import ChatRenderer
from burnish.episodes.rows import episode_rows
from burnish.episodes.runner import episode_sample
from burnish.rollout.base import Request
from burnish.types import Prompt


def run(scenario: Callable[..., Awaitable[Any]], answer: Answer = words, **changes: Any) -> Any:
    async def inside() -> Any:
        async with session(answer, **changes) as (backend, engine):
            return await scenario(backend, engine)

    return asyncio.run(inside())


async def ask(backend: TrainingSession, *messages: Any, digest: bytes = b"", **fields: Any) -> Any:
    reply = await backend.respond(call(*messages, **fields), digest=digest or random.randbytes(8))
    return reply.choices[0].message


def changed(message: Any, draw: random.Random) -> Any:
    """An answer as clients echo it: without reasoning, with other ids, with stripped text."""
    echoed = {k: v for k, v in message.items() if k != "reasoning_content" or draw.random() < 0.5}
    content = echoed["content"] or None
    echoed["content"] = content.strip() if content and draw.random() < 0.5 else content
    if "tool_calls" in echoed:
        echoed["tool_calls"] = [
            {**tool_call, "id": f"x{draw.random()}"} for tool_call in echoed["tool_calls"]
        ]
    return echoed


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_have_exact_tokens(seed: int) -> None:
    """Continued, edited, compacted and parallel conversations: the rows are the engine's log."""
    draw = random.Random(seed)

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        histories: list[list[Any]] = [[user("start")]]
        for step in range(12):
            chosen = draw.sample(histories, k=min(len(histories), draw.randint(1, 3)))
            asked = [list(history) for history in chosen]
            answers = await asyncio.gather(*(ask(backend, *history) for history in asked))
            for history, message in zip(asked, answers, strict=True):
                ending = [*history, changed(message, draw), user(f"go on {step}")]
                kind = draw.random()
                if kind < 0.6:
                    histories.append(ending)
                elif kind < 0.75:  # compaction
                    histories.append([user(f"summary {step}")])
                elif kind < 0.9:  # an edited answer
                    edited = {"role": "assistant", "content": "edited"}
                    histories.append([*history, edited, user("and now?")])
        result = backend.result({"reward": 1.0})
        check_rows(result, engine)
        assert result.record.status == "done"
        assert [turn.rewards for turn in result.record.turns if turn.rewards] == [{"reward": 1.0}]

    run(scenario)


def test_continued_conversation_is_one_row_with_the_prompts_of_the_bridge() -> None:
    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        history: list[Any] = [user("hello")]
        for turn in range(4):
            history += [await ask(backend, *history), user(f"turn {turn}")]
        result = backend.result({})
        (row,) = episode_rows(result.calls)
        (first, ids), (second, _), *_ = [(r.prompt_ids, ids) for r, ids in engine.log]
        assert second == RENDERER.bridge(first, ids, [user("turn 0")])
        assert [turn.prompt for turn in result.record.turns] == [None] * 4
        assert result.record.messages == [result.record.start[0], *history[1:-1]]
        assert len({request.conversation for request, _ in engine.log}) == 1
        check_rows(result, engine)
        del row

    run(scenario)


def test_responses_do_not_depend_on_arrival_order() -> None:
    async def scenario(backend: TrainingSession, engine: ScriptedEngine, order: list[int]) -> Any:
        prompts = [user(f"agent {i}") for i in range(6)]
        texts = await asyncio.gather(*(ask(backend, prompts[i]) for i in order))
        return {i: text["content"] for i, text in zip(order, texts, strict=True)}

    first = run(lambda backend, engine: scenario(backend, engine, [0, 1, 2, 3, 4, 5]))
    other = run(lambda backend, engine: scenario(backend, engine, [4, 2, 5, 0, 3, 1]))
    assert first == other
    assert len(set(first.values())) == 6


def told(result: EpisodeResult) -> Any:
    """Everything about an episode that is trained, scored or shown, but times."""
    sample = episode_sample(Prompt("p", (1,), ""), "p/0", result)
    turns = [
        (turn.message, turn.answer, turn.prompt, turn.rewards, turn.num_tokens)
        for turn in result.record.turns
    ]
    calls = [(call.prompt_ids, call.completion.token_ids) for call in result.calls]
    rows = sample.rows
    return sample.text, sample.finish_reason, result.record.status, turns, calls, rows


async def votes(backend: TrainingSession) -> None:
    """Five equal calls, and one that goes on with the answer that most have, the last one."""
    answers = await asyncio.gather(*(ask(backend, user("vote")) for _ in range(5)))
    await ask(backend, user("vote"), answers[-1], user("sure?"))


async def branches(backend: TrainingSession) -> None:
    """Sub-agents of different lengths; two conversations go on from the same answer."""
    plan = await ask(backend, user("plan"))
    parts = [ask(backend, user(f"part {i}"), max_tokens=1 if i % 2 else None) for i in range(4)]
    await asyncio.gather(
        *parts, *(ask(backend, user("plan"), plan, user(text)) for text in ("left", "right"))
    )


async def too_many(backend: TrainingSession) -> None:
    """Six calls at once, of which four fit into the turns and one is too long."""
    texts = ["a", "b", "long " * 900, "c", "d", "e"]
    tried = await asyncio.gather(*(ask(backend, user(t)) for t in texts), return_exceptions=True)
    refused = [
        t[0] for t, answer in zip(texts, tried, strict=True) if isinstance(answer, CallError)
    ]
    assert refused == ["l", "e"]


@pytest.mark.parametrize("agent", [votes, branches, too_many])
def test_an_episode_is_in_the_order_in_which_its_calls_arrived(agent: Any) -> None:
    async def run_session(seed: int) -> Any:
        async with session(max_turns=4 if agent is too_many else 50, max_tokens=900) as (
            backend,
            engine,
        ):
            engine._random = random.Random(seed)  # the order in which replies are sampled
            await agent(backend)
            return told(backend.result({"reward": 1.0}))

    first, *others = [asyncio.run(run_session(seed)) for seed in range(8)]
    assert all(other == first for other in others)
    if agent is branches:
        assert [turn[2] and turn[2][-1]["content"] for turn in first[3]] == [
            *(None, "part 0", "part 1", "part 2", "part 3", "left", "right")
        ]


def test_equal_calls_side_by_side_are_different_samples() -> None:
    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        same = [ask(backend, user("vote"), digest=b"same") for _ in range(5)]
        assert len({message["content"] for message in await asyncio.gather(*same)}) == 5
        check_rows(backend.result({}), engine)

    run(scenario)


def test_retry_gets_the_reply_of_the_call_it_repeats() -> None:
    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        request = call(user("hi"))
        first = asyncio.create_task(backend.respond(request, digest=b"a"))
        await asyncio.sleep(0)
        again = await backend.respond(request, digest=b"a", is_retry=True)
        assert again == await first
        assert again == await backend.respond(request, digest=b"a", is_retry=True)
        for _ in range(3):
            assert len(backend.result({}).calls) == 1  # one of the three clients got it
            backend.undelivered(again, b"a")
        assert len(backend.result({}).calls) == 0  # the agent never saw it
        assert again == await backend.respond(request, digest=b"a")
        assert len(engine.log) == len(backend.result({}).calls) == 1
        assert backend.counts["replayed"] == 2

    run(scenario)


def test_client_that_leaves_frees_its_request_and_its_retry_draws_the_same_tokens() -> None:
    gate = False

    def answer(request: Request) -> Sequence[int]:
        return words(request)

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        engine.poll, polled = (lambda: polled() if gate else []), engine.poll  # type: ignore[method-assign]
        nonlocal_gate(False)
        left = asyncio.create_task(backend.respond(call(user("hi")), digest=b"a"))
        await wait_for(lambda: engine.busy)
        (request,) = [request for request, _ in engine._open.values()]
        left.cancel()
        await wait_for(lambda: not engine.busy)
        nonlocal_gate(True)
        await backend.respond(call(user("hi")), digest=b"a", is_retry=True)
        assert engine.log[0][0].seed == request.seed
        assert len(backend.result({}).calls) == len(engine.log) == 1

    def nonlocal_gate(value: bool) -> None:
        nonlocal gate
        gate = value

    run(scenario, answer)


def test_reply_that_ends_just_when_its_client_leaves_is_given_to_the_retry() -> None:
    reply = ModelReply("t-0", 0, "m", (), 1, 0, 1)

    async def scenario() -> None:
        retries = Retries()

        async def work() -> ModelReply:
            waiting.cancel()  # in the last step of the work
            return reply

        waiting = asyncio.create_task(retries.run(b"a", work, is_retry=False))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert retries.finished(b"a", is_retry=True) is reply

    asyncio.run(scenario())


def test_retry_of_a_canceled_call_is_not_the_reply_of_its_twin() -> None:
    """Two equal calls are two votes. One client leaves and sends its call again."""

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        engine.poll, polled = list, engine.poll  # type: ignore[method-assign]
        same = [backend.respond(call(user("vote")), digest=b"v") for _ in range(2)]
        first, second = map(asyncio.create_task, same)
        await wait_for(lambda: len(engine._open) == 2)
        first.cancel()
        again = asyncio.create_task(backend.respond(call(user("vote")), digest=b"v", is_retry=True))
        await wait_for(lambda: len(engine._open) == 2 and backend._num_requests == 3)
        engine.poll = polled  # type: ignore[method-assign]
        assert (await again).choices[0].token_ids != (await second).choices[0].token_ids
        assert len(backend.result({}).calls) == len(engine.log) == 2

    run(scenario)


def test_limits_refuse_calls_and_give_the_status() -> None:
    async def too_many(backend: TrainingSession, engine: ScriptedEngine) -> Any:
        await ask(backend, user("1"))
        await ask(backend, user("2"))
        with pytest.raises(CallError, match="its 2 turns") as refused:
            await ask(backend, user("3"))
        assert refused.value.status == 410
        crash = EpisodeFailedError("env_error", "the agent raised APIError")
        assert backend.result({}, crash).record.status == "max_turns"
        late = EpisodeFailedError("timeout", "the agent took more than 9 s")
        assert backend.result({}, late).record.status == "timeout"
        killed = EpisodeFailedError("infra_error", "the worker died")
        return backend.result({}, killed).record.status

    async def too_long(backend: TrainingSession, engine: ScriptedEngine) -> Any:
        await ask(backend, user("1"))
        pattern = r"^This model's maximum context length is 200 tokens\. However, your messages "
        pattern += r"resulted in \d+ tokens, .*episodes\.max_tokens"
        with pytest.raises(CallError, match=pattern) as refused:
            await ask(backend, user("long " * 300))
        anthropic = Messages().error(refused.value)["error"]
        assert re.match(r"prompt is too long: \d+ tokens > 199 maximum", anthropic["message"])
        assert openai_error(refused.value)["error"]["code"] == "context_length_exceeded"
        assert refused.value.kind == "context_length_exceeded"
        assert backend.result({}).record.status == "max_tokens"
        crash = EpisodeFailedError("env_error", "the agent raised APIError", is_crash=True)
        assert backend.result({}, crash).record.status == "max_tokens"
        await ask(backend, user("a summary"))
        assert backend.result({}, crash).record.status == "max_tokens"
        await ask(backend, user("work"))
        assert backend.result({}, crash).record.status == "env_error"
        return backend.result({}).record.status

    async def never(backend: TrainingSession, engine: ScriptedEngine) -> Any:
        result = backend.result({})
        assert "without calling" in str(result.error)
        return result.record.status

    async def failed(backend: TrainingSession, engine: ScriptedEngine) -> Any:
        text = "the agent 'codex' exited with code 1"
        crash = EpisodeFailedError("env_error", text, is_crash=True)
        await ask(backend, user("1"), max_tokens=2)
        wrong = EpisodeFailedError("env_error", "BURNISH_REWARD cannot be read")
        assert backend.result({}, wrong).record.status == "env_error"
        cut = backend.result({"reward": 1.0}, crash)
        assert cut.error is None and cut.record.error == str(crash)
        assert cut.record.turns[-1].counts == {"failed_after_cut": 1}
        late = EpisodeFailedError("timeout", "the agent took more than 9 s")
        assert backend.result({}, late).record.status == "timeout"
        assert backend.result({}).record.status == "done"
        await ask(backend, user("2"))
        assert backend.result({}, crash).record.status == "env_error"
        return cut.record.status

    assert run(failed) == "max_turn_tokens"
    assert run(too_many, max_turns=2) == "infra_error"
    assert run(too_long, max_tokens=200) == "done"
    assert run(never) == "env_error"


def test_a_loop_of_summaries_is_named_and_growing_conversations_are_not() -> None:
    async def play(backend: TrainingSession, length: Callable[[int], int]) -> str | None:
        for number in range(8):
            await ask(backend, user(f"{number} " * length(number)))
        assert backend.summary_loop() is None
        with pytest.raises(CallError):
            await ask(backend, user("9"))
        return backend.summary_loop()

    found = run(lambda backend, _: play(backend, lambda number: 20), max_turns=8)
    assert "8 of 8 calls" in found and "episodes.max_tokens (now 4000)" in found
    assert (
        run(lambda backend, _: play(backend, lambda number: 20 * (number + 1)), max_turns=8) is None
    )


def test_parameters_of_the_run_win_and_are_reported() -> None:
    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> ModelReply:
        request = call(
            user("x"), temperature=0.2, top_p=1.0, seed=3, max_tokens=2, tool_choice="required"
        )
        for refused in (
            call(user("x"), n=2),
            call(user("x"), unsupported={"logit_bias": "it changes the distribution"}),
        ):
            with pytest.raises(CallError) as error:
                await backend.respond(refused, digest=b"")
            assert error.value.status == 400
        reply = await backend.respond(request, digest=b"")
        assert engine.log[0][0].max_tokens == 2
        assert backend.counts["ignored_seed"] == 1
        return reply

    reply = run(scenario)
    assert set(reply.ignored) == {"temperature", "seed", "tool_choice"}
    assert reply.choices[0].finish_reason == "length"
    assert reply.completion_tokens == 2


def test_stop_strings_are_not_part_of_the_message_but_of_the_tokens() -> None:
    def answer(request: Request) -> Sequence[int]:
        return TOKENIZER("think</code>", add_special_tokens=False)["input_ids"]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        message = await ask(backend, user("code"), stop=("</code>",))
        assert message["content"] == "think"
        await ask(backend, user("code"), message, user("result"), stop=("</code>",))
        result = backend.result({})
        assert len(episode_rows(result.calls)) == 1
        check_rows(result, engine)

    run(scenario, answer)


THOUGHT = "<think>\nI add.\n</think>\n\n" + tool_call("add", a=1)
RENDERERS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "ids in the prompt": (
        lambda: chat_tokenizer("mistral"),
        "keep",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "aaaaaaaaa"}]',
    ),
    "kept reasoning": (lambda: trl_tokenizer("qwen3"), "keep", THOUGHT),
    "the template's reasoning": (lambda: trl_tokenizer("qwen3"), "template", THOUGHT),
}


@pytest.mark.parametrize("kind", RENDERERS)
def test_renamed_calls_and_dropped_reasoning_do_not_change_a_prompt(kind: str) -> None:
    """Prompts and record are those of a client that returns every message as it is."""
    make, history, first = RENDERERS[kind]
    tokenizer = make()

    def answer(request: Request) -> Sequence[int]:
        text = first if len(request.prompt_ids) == asked[0] else "2"
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def client(name: str | None) -> Any:
        async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> Any:
            message = await ask(backend, user("Go."), tools=(TOOL,))
            (sampled,) = message["tool_calls"]
            identity = sampled["id"] if name is None else name
            if name is not None:
                message = {"role": "assistant", "tool_calls": [{**sampled, "id": name}]}
            shown = {"role": "tool", "tool_call_id": identity, "name": "add", "content": "2"}
            await ask(backend, user("Go."), message, shown, tools=(TOOL,))
            result = backend.result({})
            check_rows(result, engine)
            return [list(r.prompt_ids) for r, _ in engine.log], result.record.messages

        return run(scenario, answer, tokenizer=tokenizer, history=history, turn_tokens=200)

    asked = [len(ChatRenderer(tokenizer, history=history).render([user("Go.")], [TOOL]))]
    assert client("call_1") == client(None)


def test_results_of_calls_with_one_id_are_those_of_the_recorded_calls_in_order() -> None:
    """A client that names calls by their function gives the calls of one answer, and those of the
    next one, the same id."""
    tokenizer = chat_tokenizer("mistral")

    def turn(*ids: str) -> str:
        calls = [{"name": "add", "arguments": {"a": 1}, "id": each} for each in ids]
        return f"[TOOL_CALLS]{json.dumps(calls)}"

    texts = iter([turn("a" * 9, "b" * 9), turn("c" * 9, "d" * 9), "2"])

    def answer(request: Request) -> Sequence[int]:
        ids = tokenizer(next(texts), add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        messages: list[Any] = [user("Go.")]
        for _ in range(2):
            message = await ask(backend, *messages, tools=(TOOL,))
            calls = [{**each, "id": "add"} for each in message["tool_calls"]]
            shown = {"role": "tool", "tool_call_id": "add", "name": "add"}
            results = [{**shown, "content": text} for text in ("2", "3")]
            messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
        await ask(backend, *messages, tools=(TOOL,))
        recorded = backend.result({}).record.messages
        assert [m["tool_call_id"] for m in recorded if m["role"] == "tool"] == [
            each * 9 for each in "abcd"
        ]

    run(scenario, answer, tokenizer=tokenizer, history="keep", turn_tokens=400)


@pytest.mark.parametrize("history", ["keep", "template"])
def test_text_behind_a_call_in_channels_does_not_end_an_agent(history: str) -> None:
    """No text of the template has this order: the recorded tokens have, and a rendered history has
    what the template writes of the message (the call)."""
    tokenizer = trl_tokenizer("gptoss")
    called = (
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|end|><|start|>"
        "assistant<|channel|>final<|message|>behind"
    )
    texts = iter([called, *("<|channel|>final<|message|>more",) * 2])

    def answer(request: Request) -> Sequence[int]:
        ids = tokenizer(next(texts), add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        messages = [user("Go.")]
        for _ in range(3):
            message = await ask(backend, *messages, tools=(TOOL,))
            results = [
                {"role": "tool", "tool_call_id": each["id"], "name": "add", "content": "3"}
                for each in message.get("tool_calls", ())
            ]
            messages += [message, *(results or [user("More?")])]
        result = backend.result({})
        check_rows(result, engine)
        assert result.record.messages[1]["content_with_calls"]["text"] == ""
        prompt = tokenizer.decode(list(engine.log[-1][0].prompt_ids))
        assert prompt.count("behind") == (history == "keep") and "functions.add to" in prompt

    run(scenario, answer, tokenizer=tokenizer, history=history, turn_tokens=200)


def test_results_of_calls_with_one_name_belong_to_them_in_order() -> None:
    """A client may name calls by their function."""
    tokenizer = chat_tokenizer("mistral")
    end = tokenizer.eos_token_id
    first = '[{"name": "add", "arguments": {"a": 1}, "id": "aaaaaaaaa"}, '
    first += '{"name": "add", "arguments": {"a": 2}, "id": "bbbbbbbbb"}]'
    texts = iter([f"[TOOL_CALLS]{first}", "3"])

    def answer(_: Request) -> Sequence[int]:
        return [*tokenizer(next(texts), add_special_tokens=False)["input_ids"], end]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> str:
        message = await ask(backend, user("Go."), tools=(TOOL,))
        calls = [{**sampled, "id": "add"} for sampled in message["tool_calls"]]
        shown = [{"role": "tool", "tool_call_id": "add", "content": text} for text in "12"]
        await ask(backend, user("Go."), {**message, "tool_calls": calls}, *shown, tools=(TOOL,))
        return str(tokenizer.decode(list(engine.log[1][0].prompt_ids)))

    text = run(scenario, answer, tokenizer=tokenizer, history="keep", turn_tokens=300)
    results = re.findall(r'"content": "(.)", "call_id": "(\w+)"', text)
    assert results == [("1", "aaaaaaaaa"), ("2", "bbbbbbbbb")]


def test_a_returned_reasoning_and_a_name_choose_the_turn() -> None:
    """Two samples with the same answer: the one whose reasoning the client returns, if it does. A
    message with another name is another message."""
    history: History[str] = History()
    asked = [{**user("Go."), "name": "ann"}]
    digest = digests_of(asked, ())[-1]
    answers = [
        {"role": "assistant", "content": "4", "reasoning_content": text} for text in ("one", "two")
    ]
    for number, answer in enumerate(answers):
        history.add(digest, answer, f"turn {number}", number=number, thoughts=thoughts_of([answer]))

    def found(*messages: Any) -> Any:
        return history.find(messages, digests_of(messages, ()))

    for number, answer in enumerate(answers):
        padded = {**answer, "reasoning_content": f"\n{answer['reasoning_content']} "}
        assert found(*asked, padded, user("And?")) == (f"turn {number}", 2)
    bare = {"role": "assistant", "content": "4"}
    assert found(*asked, bare, user("And?")) == ("turn 1", 2)
    assert found(*asked, {**bare, "reasoning_content": "three"}, user("And?")) is None
    assert found({**asked[0], "name": "bob"}, bare, user("And?")) is None
    assert found(user("Go."), bare, user("And?")) is None


def test_raw_prompts_continue_the_tokens_of_earlier_ones() -> None:
    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        text = (await ask(backend, prompt="Question: 2+2\n"))["content"]
        await ask(backend, prompt=f"Question: 2+2\n{text}\nObservation: 4\n")
        with pytest.raises(CallError, match="ids below"):
            await ask(backend, prompt=(1, 10**9))
        result = backend.result({})
        assert len(episode_rows(result.calls)) == 1
        assert [m["role"] for m in result.record.messages] == ["user", "assistant"] * 2
        assert result.record.messages[2]["content"] == "\nObservation: 4\n"
        check_rows(result, engine)

    run(scenario, lambda request: words(request)[:-1])


@pytest.mark.parametrize("sampled", ["", "4", "4<think>"])
@pytest.mark.parametrize("more", ["", "\nQ: 3+3?\nA:"])
def test_a_raw_prompt_has_the_text_that_was_sent(sampled: str, more: str) -> None:
    """The response ends with an end token, which its text does not show: the next prompt has none.
    An equal prompt is another sample."""
    text = "Q: 2+2?\nA:"

    def answer(_: Request) -> Sequence[int]:
        return [*TOKENIZER(sampled, add_special_tokens=False)["input_ids"], END]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        reply = await ask(backend, prompt=text)
        assert reply["content"] == sampled
        for prompt in (text, text + sampled + more):
            await ask(backend, prompt=prompt)
            assert TOKENIZER.decode(engine.log[-1][0].prompt_ids) == prompt
        prompts = [request.prompt_ids for request, _ in engine.log]
        assert prompts[0] == prompts[1]
        seeds = [request.seed for request, _ in engine.log]
        assert len(set(seeds)) == 3
        check_rows(backend.result({}), engine)

    run(scenario, answer)


def test_raw_prompts_of_a_stop_string_continue_with_it() -> None:
    """The agent writes the stop string again, which the reply leaves out."""

    def answer(_: Request) -> Sequence[int]:
        return TOKENIZER(" look it up\nObs:", add_special_tokens=False)["input_ids"]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        reply = await ask(backend, prompt="Act:", stop=("Obs:", "\n"))
        assert reply["content"] == " look it up"
        await ask(backend, prompt=f"Act:{reply['content']}\nObs: 4\n")
        assert len(episode_rows(backend.result({}).calls)) == 1
        check_rows(backend.result({}), engine)

    run(scenario, answer)


def test_a_text_that_is_certainly_too_long_is_not_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is 100 tokens: texts of more than 3,200 characters never reach the tokenizer."""
    lengths: list[int] = []
    encode = ChatRenderer._encode
    monkeypatch.setattr(
        ChatRenderer,
        "_encode",
        lambda self, text, *marks, **options: (
            lengths.append(len(text)),
            encode(self, text, *marks, **options),
        )[1],
    )

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        first = await ask(backend, user("hi"))
        history = [user("hi"), first]
        for long in (
            call(user("a" * 100_000)),
            call(*history, user("a" * 100_000)),
            call(user("hi"), tools=({**TOOL, "a": "b" * 100_000},)),
            call(prompt="a" * 100_000),
            call(prompt=(1,) * 101),
        ):
            for ask_for in (
                backend.count_tokens(long),
                backend.respond(long, digest=random.randbytes(8)),
            ):
                with pytest.raises(CallError) as refused:
                    await ask_for
                assert refused.value.kind == "context_length_exceeded"
        assert backend.result({}).record.status == "max_tokens"
        assert max(lengths) <= 3_200

    run(scenario, max_tokens=100)


def test_closed_session_refuses_and_frees_everything() -> None:
    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        await ask(backend, user("1"))
        engine.poll = list  # type: ignore[method-assign]
        waiting = asyncio.create_task(backend.respond(call(user("2")), digest=b"b"))
        await wait_for(lambda: engine.busy)
        await backend.close()
        with pytest.raises(CallError) as refused:
            await waiting
        assert refused.value.status == 410
        with pytest.raises(CallError, match="has ended"):
            await ask(backend, user("3"))
        await wait_for(lambda: not engine.busy and len(engine.released) == 2)

    run(scenario)


def test_failure_of_the_engine_ends_the_run() -> None:
    def answer(request: Request) -> Sequence[int]:
        raise ArithmeticError("log-probs are not finite")

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        with pytest.raises(CallError) as refused:
            await ask(backend, user("1"))
        assert refused.value.status == 503
        with pytest.raises(ArithmeticError):
            await backend.failure

    run(scenario, answer)


@pytest.mark.parametrize("fields", [{"tools": (TOOL,), "tool_choice": "none"}, {}])
def test_a_last_call_without_tools_reads_the_calls_before_it(fields: Any) -> None:
    """An agent's final summary. Templates with names have one for conversations with calls."""
    tokenizer = named_tokenizer()
    left = iter([tool_call("add", a=1), "Two."])

    def answer(_: Request) -> Sequence[int]:
        return [
            *tokenizer(next(left), add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        asked = [user("q")]
        first = await ask(backend, *asked, tools=(TOOL,))
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        await ask(backend, *asked, first, result, **fields)
        text = tokenizer.decode(list(engine.log[-1][0].prompt_ids))
        assert tool_call("add", a=1) in text and text.startswith("<|im_start|>system\nTools:")
        assert "parameters" not in text

    run(scenario, answer, tokenizer=tokenizer, turn_tokens=200)


def test_a_request_whose_calls_the_template_leaves_out_is_refused() -> None:
    tokenizer = published_tokenizer("smollm2")
    made = {"name": "add", "arguments": {"a": 1}}
    history = [
        user("q"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": made}],
        },
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": "2"},
    ]

    async def scenario(backend: TrainingSession, engine: ScriptedEngine) -> None:
        with pytest.raises(CallError, match="leaves out the tool calls") as error:
            await ask(backend, *history)
        assert error.value.status == 400 and not engine.log

    run(scenario, tokenizer=tokenizer)


def test_text_beside_calls_that_the_template_leaves_out_is_named_and_counted() -> None:
    """The template of Llama 3.1 drops it, as it does for every server of that model."""
    tokenizer = trl_tokenizer("llama3_1")
    calls = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    answer = {"role": "assistant", "content": "Let me add.", "tool_calls": calls}
    result = {"role": "tool", "content": "1", "tool_call_id": "a"}

    async def scenario() -> Any:
        async with session(tokenizer=tokenizer) as (backend, engine):
            request = call(user("add"), answer, result, tools=(TOOL,))
            reply = await backend.respond(request, digest=b"a")
            assert "Let me add." not in tokenizer.decode(list(engine.log[0][0].prompt_ids))
            bare = call(user("add"), {**answer, "content": ""}, result, tools=(TOOL,))
            assert (await backend.respond(bare, digest=b"b")).ignored == ()
            return reply.ignored, dict(backend.result({}).record.turns[-1].counts)

    name = "template_text_with_calls_dropped"
    assert asyncio.run(scenario()) == ((name,), {f"ignored_{name}": 1})
