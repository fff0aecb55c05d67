# house: ok one suite of properties, which every engine runs
"""What every rollout engine must do, whatever it is made of and wherever it runs. A new engine adds
one line to ENGINES.

Written against the protocol in ``rollout/base.py`` alone; the plain model of transformers is the
oracle.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_server import vllm_server

from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.placement import placement_groups_for
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.observe.timeline import Timeline
from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling, VersionSpan
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.servers.engine import VllmServerEngine
from burnish.rollout.vllm.config import VllmEngine
from burnish.rollout.vllm.engine import INSTALL, VllmRolloutEngine
from burnish.runtime.ray.rollout_engine import RemoteRolloutEngine
from burnish.runtime.ray.runtime import RayRuntime

SIZES = ScratchConfig(hidden_size=64, num_heads=2, num_kv_heads=1, tie_word_embeddings=False)
MODEL = ModelConfig(scratch=SIZES)  # heads of 32: the smallest that every engine computes
TOKENIZER = load_tokenizer(MODEL)
REQUESTS = [
    Request("a", (7, 8, 9), n=3, seed=1),
    Request("b", (10,), n=1, seed=2),
    Request("c", tuple(range(6, 30)), n=5, seed=3),
]


def local_engine() -> RolloutEngine:
    return LocalRolloutEngine(load_causal_lm(MODEL), TOKENIZER, LocalEngine(max_batch_size=4))


def vllm_engine() -> RolloutEngine:
    return VllmRolloutEngine(load_causal_lm(MODEL), TOKENIZER, VllmEngine(kind="vllm"))


SERVERS = ExitStack()


def server_engine() -> RolloutEngine:
    url = SERVERS.enter_context(vllm_server(MODEL, max_model_len=512))
    config = VllmServers(kind="vllm_server", urls=(url,))
    return VllmServerEngine(load_causal_lm(MODEL), TOKENIZER, config)


def on_ray(config: RolloutEngineConfig) -> RolloutEngine:
    """Two workers that share the requests."""
    workers = 2 if config.kind == "local" else 1
    cluster = ClusterConfig(runtime="ray", rollout_workers=workers, **APART)
    runtime = RayRuntime(
        TOKENIZER,
        MODEL,
        cluster,
        placements=placement_groups_for(cluster, ["rollout"]),
        precision=PrecisionConfig(),
        timeline=Timeline(),
    )
    return runtime.standalone_rollout(MODEL, config)


APART: dict[str, Any] = {"layout": "separate"}
ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "local": local_engine,
    "vLLM": vllm_engine,
    "vLLM server": server_engine,
    "local on Ray": partial(on_ray, LocalEngine(max_batch_size=4)),
    "vLLM on Ray": partial(on_ray, VllmEngine(kind="vllm")),
}
NO_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL)
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
MARKS = {
    **{name: [*SLOW, NO_VLLM] for name in ("vLLM", "vLLM server", "vLLM on Ray")},
    "local on Ray": SLOW,
}


@pytest.fixture(scope="module", params=[pytest.param(n, marks=MARKS.get(n, ())) for n in ENGINES])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def started(engine_name: str, request: pytest.FixtureRequest) -> Iterator[RolloutEngine]:
    """Once for the file: some take seconds to start."""
    if "Ray" in engine_name:
        request.getfixturevalue("ray_cluster")
    with SERVERS:
        made = ENGINES[engine_name]()
        yield made
        made.close()
    if isinstance(made, RemoteRolloutEngine):
        made.cluster.close()


@pytest.fixture
def engine(started: RolloutEngine) -> RolloutEngine:
    started.load_weights(1, lively(0).items())
    return started


@cache
def lively(seed: int) -> dict[str, Tensor]:
    """Weights whose distributions are far from uniform."""
    other = ModelConfig(scratch=SIZES.model_copy(update={"seed": seed}))
    parameters = load_causal_lm(other).named_parameters()
    return {n: p.detach() * (8 if p.ndim == 2 else 1) for n, p in parameters}


Done = dict[tuple[str, int], Completion]


def run(engine: RolloutEngine, sampling: Sampling) -> Done:
    done = list(engine.generate(REQUESTS, sampling))
    found = {(c.request_id, c.index): c for c in done}
    assert len(found) == len(done)
    return found


def plain_logprobs(
    weights: dict[str, Tensor], prompt: tuple[int, ...], c: Completion, sampling: Sampling
) -> Tensor:
    model = load_causal_lm(MODEL)
    model.load_state_dict(weights)
    tokens = torch.tensor([*prompt, *c.token_ids])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1] / sampling.temperature
    if sampling.sampling_mask:
        best = logits.topk(sampling.top_k)
        p = best.values.softmax(-1)
        dropped = p.cumsum(-1) - p >= sampling.top_p
        kept = [set(ids[~out].tolist()) for ids, out in zip(best.indices, dropped, strict=True)]
        assert [set(ids) for ids in c.kept_ids] == kept
        logits = torch.full_like(logits, -torch.inf).scatter_(
            -1, best.indices, best.values.masked_fill(dropped, -torch.inf)
        )
    return logits.log_softmax(-1).gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]


def test_every_request_gets_all_its_samples_in_any_order(engine: RolloutEngine) -> None:
    done = run(engine, Sampling(12))
    assert set(done) == {(r.request_id, k) for r in REQUESTS for k in range(r.n)}
    for c in done.values():
        assert 1 <= len(c.token_ids) <= 12 and len(c.logprobs) == len(c.token_ids)
        assert c.version == 1 and all(x <= 0 for x in c.logprobs)
        ended = c.token_ids[-1] == TOKENIZER.eos_token_id
        assert c.finish_reason == ("stop" if ended else "length")
        assert ended or len(c.token_ids) == 12
        assert c.text == TOKENIZER.decode(c.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(12), Sampling(12, 0.7), Sampling(12, 1.5, top_k=9), Sampling(12, top_p=0.8)),
        Sampling(12, 0.7, top_k=4, sampling_mask=True),
        Sampling(12, 1.5, top_k=9, top_p=0.8, sampling_mask=True),
    ],
)
def test_logprobs_are_at_the_temperature_before_top_k_and_top_p(
    sampling: Sampling, engine: RolloutEngine
) -> None:
    """With a recorded mask: over its tokens, which are those that top-k and top-p keep."""
    prompts = {r.request_id: r.prompt_ids for r in REQUESTS}
    for c in run(engine, sampling).values():
        expected = plain_logprobs(lively(0), prompts[c.request_id], c, sampling)
        # fp32, log-probs of up to 20 through a cache instead of one pass
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=3e-5, rtol=0)


def test_temperature_zero_selects_the_most_probable_token(engine: RolloutEngine) -> None:
    model = load_causal_lm(MODEL)
    model.load_state_dict(lively(0))
    prompts = {r.request_id: r.prompt_ids for r in REQUESTS}
    for (name, _), c in run(engine, Sampling(12, 0.0)).items():
        tokens = torch.tensor([*prompts[name], *c.token_ids])
        with torch.no_grad():
            best = model(tokens[None]).logits[0].argmax(-1)[len(prompts[name]) - 1 : -1]
        assert list(c.token_ids) == best.tolist()


def test_the_seed_of_a_request_determines_its_tokens(engine: RolloutEngine) -> None:
    done = run(engine, Sampling(12))
    assert {k: c.token_ids for k, c in run(engine, Sampling(12)).items()} == {
        k: c.token_ids for k, c in done.items()
    }
    for request in REQUESTS:
        for c in engine.generate([request], Sampling(12)):
            assert c.token_ids == done[c.request_id, c.index].token_ids
    (other,) = engine.generate([Request("b", (10,), n=1, seed=99)], Sampling(12))
    assert other.token_ids != done["b", 0].token_ids


def test_stop_tokens_and_strings_end_a_response_and_stay_in_it(engine: RolloutEngine) -> None:
    free = run(engine, Sampling(12))["c", 0]
    assert len(free.token_ids) > 4
    token, string = free.token_ids[2], TOKENIZER.decode(free.token_ids[1:3])
    for sampling in (Sampling(12, stop_token_ids=(token,)), Sampling(12, stop=(string,))):
        c = run(engine, sampling)["c", 0]
        assert c.finish_reason == "stop" and 1 <= len(c.token_ids) <= 3
        assert c.token_ids == free.token_ids[: len(c.token_ids)]
        assert c.token_ids[-1] == token


def test_samples_from_new_weights_have_their_version(engine: RolloutEngine) -> None:
    before = run(engine, Sampling(12, 0.0))
    engine.load_weights(5, lively(1).items())
    assert engine.version == 5
    after = run(engine, Sampling(12, 0.0))
    assert all(c.version == 5 for c in after.values())
    assert before["c", 0].token_ids != after["c", 0].token_ids
    expected = plain_logprobs(lively(1), REQUESTS[2].prompt_ids, after["c", 0], Sampling(12))
    torch.testing.assert_close(torch.tensor(after["c", 0].logprobs), expected, atol=3e-5, rtol=0)


def test_mismatched_weights_are_refused(engine: RolloutEngine) -> None:
    good = lively(1)
    twice = [("model.norm.weight", good["model.norm.weight"]), *good.items()]
    for wrong, name in (
        ([*good.items(), ("model.extra.weight", torch.zeros(1))], r"model\.extra\.weight"),
        ([(n, t) for n, t in good.items() if n != "lm_head.weight"], r"lm_head\.weight"),
        ((good | {"model.norm.weight": torch.ones(3)}).items(), r"model\.norm\.weight"),
        ((good | {"model.norm.weight": torch.ones(1)}).items(), r"model\.norm\.weight"),
        (twice, r"model\.norm\.weight was received"),
    ):
        with pytest.raises(ValueError, match=name):
            engine.load_weights(9, wrong)
        assert engine.version == 1
        with pytest.raises(RuntimeError, match="weights"):
            run(engine, Sampling(2))  # two versions may be mixed
    engine.load_weights(2, good.items())
    assert engine.version == 2, "a good load mends it"
    assert all(c.version == 2 for c in run(engine, Sampling(2)).values())


def test_sleeping_and_waking_change_nothing(engine: RolloutEngine) -> None:
    before = run(engine, Sampling(12))
    engine.sleep()
    engine.wake()
    assert_same(engine, run(engine, Sampling(12)), before)
    engine.sleep()  # generate wakes it
    assert_same(engine, run(engine, Sampling(12)), before)


def assert_same(engine: RolloutEngine, done: Done, before: Done) -> None:
    """Equal; but requests reach a server at any time, so that their batches, and the rounding of
    log-probs of up to 20 in fp32, may differ."""
    if not isinstance(engine, VllmServerEngine):
        assert done == before
    assert tokens(done) == tokens(before)
    for key, c in done.items():
        assert c.logprobs == pytest.approx(before[key].logprobs, abs=3e-5, rel=0)


def is_remote(engine: RolloutEngine) -> bool:
    """True if it samples while nobody polls, so that a poll has no fixed number of steps."""
    return isinstance(engine, RemoteRolloutEngine | VllmServerEngine)


def poll_all(engine: RolloutEngine) -> Done:
    done: list[Completion] = []
    while engine.busy:
        done += engine.poll()
    return {(c.request_id, c.index): c for c in done}


def tokens(done: Done) -> dict[tuple[str, int], tuple[int, ...]]:
    return {key: c.token_ids for key, c in done.items()}


def test_requests_may_come_at_any_time_and_with_any_sampling(engine: RolloutEngine) -> None:
    """The tokens of a request do not depend on what else is open."""
    samplings = {"a": Sampling(12), "b": Sampling(30, 0.7, top_k=9), "c": Sampling(12, 0.0)}
    alone: dict[tuple[str, int], Completion] = {}
    for r in REQUESTS:
        for c in engine.generate([r], samplings[r.request_id]):
            alone[c.request_id, c.index] = c
    done: dict[tuple[str, int], Completion] = {}
    for request in REQUESTS:
        engine.submit([request], samplings[request.request_id])
        for c in engine.poll():
            done[c.request_id, c.index] = c
    done |= poll_all(engine)
    assert not engine.busy and tokens(done) == tokens(alone)
    assert engine.poll() == []
    for c in done.values():
        assert c.spans == (VersionSpan(1, 0, len(c.token_ids)),)
        assert c.versions == (1,) * len(c.token_ids)


def test_a_canceled_request_is_gone_and_its_id_is_free(engine: RolloutEngine) -> None:
    alone = run(engine, Sampling(40))
    engine.submit(REQUESTS, Sampling(40))
    if not is_remote(engine):  # a poll may be all steps there
        engine.poll()
    engine.cancel(["a", "c", "unknown"])
    assert engine.busy
    engine.submit([REQUESTS[0]], Sampling(40))
    done = poll_all(engine)
    assert tokens(done) == {k: c.token_ids for k, c in alone.items() if k[0] != "c"}
    engine.submit(REQUESTS, Sampling(40))
    engine.cancel(["a", "b", "c"])
    assert not engine.busy and engine.poll() == []


def test_an_id_or_conversation_is_open_once(engine: RolloutEngine) -> None:
    talk = Request("t0", (7, 8), conversation="talk")
    engine.submit([talk, REQUESTS[0]], Sampling(4))
    for request, told in (
        (replace(REQUESTS[0]), "a is already open"),
        (replace(talk, request_id="t1"), "conversation talk already has an open request"),
        (Request("t2", (7,), n=2, conversation="other"), "n=2"),
    ):
        with pytest.raises(ValueError, match=told):
            engine.submit([Request("fresh", (9,)), request], Sampling(4))
    assert {name for name, _ in poll_all(engine)} == {"t0", "a"}
    engine.release(["talk", "unknown"])


def test_a_conversation_continues_with_the_tokens_of_a_single_prompt(
    engine: RolloutEngine,
) -> None:
    prompt = tuple(range(6, 46))
    (first,) = engine.generate([Request("t0", prompt, seed=1, conversation="t")], Sampling(12))
    longer = (*prompt, *first.token_ids, 9, 11, 20)
    follow = Request("t1", longer, seed=2, conversation="t")
    (second,) = engine.generate([follow], Sampling(12))
    engine.release(["t"])
    (plain,) = engine.generate([Request("t2", longer, seed=2)], Sampling(12))
    assert second.token_ids == plain.token_ids
    assert 0 <= second.cached_tokens < len(longer)
    assert second.logprobs == pytest.approx(plain.logprobs, abs=3e-5)


def begin(engine: RolloutEngine, requests: list[Request], sampling: Sampling, polls: int) -> Done:
    """Submit and poll. Nothing is polled if a poll may be all steps."""
    engine.submit(requests, sampling)
    polls = 0 if is_remote(engine) else polls
    return {(c.request_id, c.index): c for _ in range(polls) for c in engine.poll()}


@pytest.mark.parametrize("keep_cache", [False, True])
def test_the_same_weights_loaded_after_every_poll_change_no_token(
    keep_cache: bool, engine: RolloutEngine
) -> None:
    """So no draw is repeated or lost, and samples of a prompt stay distinct."""
    expected = run(engine, Sampling(24))
    assert len({expected["c", i].token_ids for i in range(5)}) == 5
    engine.submit(REQUESTS, Sampling(24))
    done, version = Done(), 1
    while engine.busy:
        done |= {(c.request_id, c.index): c for c in engine.poll()}
        version += 1
        engine.load_weights(version, lively(0).items(), keep_cache=keep_cache)
    assert tokens(done) == tokens(expected)
    local = isinstance(engine, LocalRolloutEngine)
    for key, c in done.items():
        # the local engine's bits do not depend on prefill or decode; vLLM's do
        exact = local and engine.network.stable  # type: ignore[attr-defined]
        assert c.logprobs == pytest.approx(expected[key].logprobs, abs=0 if exact else 3e-5, rel=0)
        if not is_remote(engine):
            assert len(set(c.versions)) == len(c.token_ids), "a version for each token"
        assert list(c.versions) == sorted(c.versions) and c.version <= version


def test_recomputed_responses_continue_as_those_of_a_new_engine(engine: RolloutEngine) -> None:
    """Greedy, so that a new request with prompt and tokens continues in the same way. Interrupted
    after every number of tokens."""
    local = isinstance(engine, LocalRolloutEngine)
    polls = range(13) if local else (0, 1, 6)
    request, sampling = REQUESTS[2], Sampling(12, 0.0)
    (old,) = engine.generate([replace(request, n=1)], sampling)
    assert len(old.token_ids) == 12
    for count in polls:
        engine.load_weights(1, lively(0).items())
        done = begin(engine, [replace(request, n=1)], sampling, count)
        engine.load_weights(2, lively(1).items())
        (c,) = (done | poll_all(engine)).values()
        k = c.versions.count(1)
        if not isinstance(engine, VllmServerEngine):  # which samples on its own
            assert k == (0 if is_remote(engine) else count)
        assert c.token_ids[:k] == old.token_ids[:k] and c.logprobs[:k] == old.logprobs[:k]
        if k == 12:
            continue
        longer = replace(request, n=1, prompt_ids=(*request.prompt_ids, *c.token_ids[:k]))
        (new,) = engine.generate([replace(longer, max_tokens=12 - k)], sampling)
        assert c.token_ids[k:] == new.token_ids and c.finish_reason == new.finish_reason
        exact = local and engine.network.stable  # type: ignore[attr-defined]
        assert c.logprobs[k:] == pytest.approx(new.logprobs, abs=0 if exact else 3e-5, rel=0)


def test_open_requests_continue_with_new_weights(engine: RolloutEngine) -> None:
    """Tokens of a version have the log-probs of its weights."""
    done = begin(engine, REQUESTS, Sampling(24), 5)
    engine.load_weights(2, lively(1).items())
    done |= poll_all(engine)
    prompts = {r.request_id: r.prompt_ids for r in REQUESTS}
    assert len(done) == 9
    for (name, _), c in done.items():
        by_version = {
            v: plain_logprobs(lively(v - 1), prompts[name], c, Sampling(12)) for v in (1, 2)
        }
        expected = torch.stack([by_version[v][i] for i, v in enumerate(c.versions)])
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=3e-5, rtol=0)
    newest = {c.version for c in done.values()}
    if isinstance(engine, VllmServerEngine):  # a response may end before the server is paused
        assert 2 in newest and newest <= {1, 2}
    else:
        assert newest == {2}
    if not is_remote(engine):
        assert max(len(c.spans) for c in done.values()) == 2


LONG = tuple(range(6, 50)) * 2  # two blocks of vLLM's cache, and 24 tokens


def cached_logprobs(prompt: tuple[int, ...], c: Completion, cached: int) -> Tensor:
    """Log-probs of version 2 if the keys and values of the first ``cached`` tokens are those of
    version 1."""
    old, new = load_causal_lm(MODEL), load_causal_lm(MODEL)
    old.load_state_dict(lively(0))
    new.load_state_dict(lively(1))
    ids = torch.tensor([[*prompt, *c.token_ids]])
    with torch.no_grad():
        cache = old(ids[:, :cached], use_cache=True).past_key_values if cached else None
        log_p = new(ids[:, cached:-1], past_key_values=cache).logits[0].log_softmax(-1)
    found = log_p.gather(-1, ids[0, cached + 1 :, None])[:, 0]
    return found[len(prompt) - 1 - cached :] if cached < len(prompt) else found


@pytest.mark.parametrize("polls", [0, 1, 7])
def test_with_keep_cache_only_old_responses_and_conversations_read_old_keys(
    polls: int, engine: RolloutEngine, record_property: Callable[..., None]
) -> None:
    """The oracle continues the old model's cache with the new model."""
    if isinstance(engine, VllmServerEngine):
        assert not engine.keeps_cache_on_update, "a recipe with in_flight=continue is refused"
        record_property("refused", "rollout.asynchronous.in_flight=continue")
        return
    assert engine.keeps_cache_on_update
    talk = Request("t0", LONG, seed=1, conversation="t")
    (first,) = engine.generate([talk], Sampling(12))
    list(engine.generate([Request("seen", LONG, seed=2)], Sampling(2)))  # vLLM shares its blocks
    running = [Request("r", LONG, n=2, seed=5), Request("s", (*LONG, 8), seed=4, conversation="s")]
    done = begin(engine, running, Sampling(24), polls)
    engine.load_weights(2, lively(1).items(), keep_cache=True)
    longer = (*LONG, *first.token_ids, 9)
    new = [Request("t1", longer, seed=2, conversation="t"), Request("new", LONG, seed=1)]
    engine.submit([*new, Request("u", LONG, seed=6, conversation="u")], Sampling(24))
    done |= poll_all(engine)
    second = done["t1", 0]
    assert set(second.versions) == {2} and second.cached_tokens >= 64
    prompts = {"r": LONG, "s": (*LONG, 8), "t1": longer, "new": LONG, "u": LONG}
    for (name, _), c in done.items():
        k = c.versions.count(1)
        assert c.versions == (1,) * k + (2,) * (len(c.token_ids) - k)
        assert k == 0 or name in "rs"
        before = plain_logprobs(lively(0), prompts[name], c, Sampling(12))[:k]
        cached = len(prompts[name]) + k - 1 if k else 0
        cached = c.cached_tokens if name == "t1" else cached
        after = cached_logprobs(prompts[name], c, cached)[-(len(c.token_ids) - k) :]
        if k < len(c.token_ids):
            expected = torch.cat([before, after])
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=3e-5, rtol=0)
    engine.load_weights(3, lively(0).items())
    (third,) = engine.generate([Request("t2", longer, seed=2, conversation="t")], Sampling(12))
    assert third.cached_tokens == 0 and set(third.versions) == {3}
    expected = plain_logprobs(lively(0), longer, third, Sampling(12))
    torch.testing.assert_close(torch.tensor(third.logprobs), expected, atol=3e-5, rtol=0)
    engine.release(["t", "s", "u"])


def test_after_new_weights_a_known_conversation_answers_as_a_new_one(
    engine: RolloutEngine,
) -> None:
    prompt = tuple(range(6, 46))
    (first,) = engine.generate([Request("t0", prompt, seed=1, conversation="t")], Sampling(12))
    longer = (*prompt, *first.token_ids, 9)
    engine.load_weights(2, lively(1).items())
    (second,) = engine.generate([Request("t1", longer, seed=2, conversation="t")], Sampling(12))
    expected = plain_logprobs(lively(1), longer, second, Sampling(12))
    torch.testing.assert_close(torch.tensor(second.logprobs), expected, atol=3e-5, rtol=0)
    assert second.cached_tokens == 0 and second.versions == (2,) * len(second.token_ids)
    engine.release(["t"])


def test_no_requests_return_no_completions(engine: RolloutEngine) -> None:
    assert list(engine.generate([], Sampling(4))) == []


def test_prompts_that_cannot_run_are_refused(engine: RolloutEngine) -> None:
    for prompt in ((), (7,) * 510):
        with pytest.raises(ValueError, match="odd"):
            list(engine.generate([Request("odd", prompt)], Sampling(8)))
    for stop in ("", "\ud800"):
        with pytest.raises(ValueError, match="stop string"):
            engine.submit(REQUESTS, Sampling(8, stop=(stop,)))
    assert not engine.busy


def test_a_request_may_set_its_own_maximum_length(engine: RolloutEngine) -> None:
    """The same tokens, cut at 3 for one and let run to 20 for the other."""
    free = run(engine, Sampling(20))
    mixed = [replace(REQUESTS[0], max_tokens=3), replace(REQUESTS[2], max_tokens=20)]
    for c in engine.generate(mixed, Sampling(12)):
        limit = 3 if c.request_id == "a" else 20
        assert c.token_ids == free[c.request_id, c.index].token_ids[:limit]
    with pytest.raises(ValueError, match=r"a.*max_tokens=0"):
        list(engine.generate([replace(REQUESTS[0], max_tokens=0)], Sampling(12)))
