"""The local engine's tokens against transformers' generate, its log-probs against the train
engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

import burnish.models.flash as flash
from burnish.config.model import Dtype, ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.flash_reference import on_cpu
from burnish.models.half_linear import use_fp32_products
from burnish.models.load import load_causal_lm
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local import running_batch
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.local.running_batch import RunningBatch
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import rows_to_batch

GREEDY = Sampling(max_tokens=24, temperature=0.0)
PROMPTS = [(7,), (9, 12, 30), tuple(range(6, 40)), (11, 11), (45, 6, 8, 9, 10, 33, 21)]


def requests_for(prompts: list[tuple[int, ...]], *, n: int = 1) -> list[Request]:
    return [Request(f"r{i}", p, n=n, seed=100 + i) for i, p in enumerate(prompts)]


def by_sample(completions: list[Completion]) -> dict[tuple[str, int], Completion]:
    found = {(c.request_id, c.index): c for c in completions}
    assert len(found) == len(completions), "no sample twice"
    return found


@pytest.fixture
def engine(
    lively_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> LocalRolloutEngine:
    return LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine())


def transformers_greedy(model: LlamaForCausalLM, prompt: tuple[int, ...], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            use_cache=True,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("max_batch_size", [1, 2, 128])
@pytest.mark.parametrize("max_prefill_tokens", [1, 8, 8192])
def test_greedy_tokens_are_those_of_transformers(
    max_batch_size: int,
    max_prefill_tokens: int,
    lively_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = LocalEngine(max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens)
    engine = LocalRolloutEngine(lively_model, tiny_tokenizer, config)
    ours = by_sample(list(engine.generate(requests_for(PROMPTS), GREEDY)))
    lively_model.set_attn_implementation("sdpa")
    seen: set[int] = set()
    for i, prompt in enumerate(PROMPTS):
        expected = transformers_greedy(lively_model, prompt, 24)
        assert list(ours[f"r{i}", 0].token_ids) == expected
        seen |= set(expected)
    assert len(seen) > 20, "a model that repeats itself would prove little"


def test_a_growing_cache_keeps_its_contents(
    engine: LocalRolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache grows every 64 positions, which 150 new tokens make it do twice."""
    monkeypatch.setattr(running_batch, "_LEAST_ROOM", 1)
    long = replace(GREEDY, max_tokens=150)
    engine._end_tokens = set()
    ours = by_sample(list(engine.generate(requests_for(PROMPTS[:3]), long)))
    engine.model.set_attn_implementation("sdpa")
    engine.model.generation_config.eos_token_id = None
    for i, prompt in enumerate(PROMPTS[:3]):
        expected = transformers_greedy(engine.model, prompt, 150)
        assert list(ours[f"r{i}", 0].token_ids) == expected


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_sampler_logprobs_are_the_train_engines(
    temperature: float,
    tiny_config: ModelConfig,
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.mul_(2)  # away from uniform
    train = TorchTrainEngine(
        tiny_model,
        EngineSpec(TrainRole.alone("policy", TrainConfig(), tiny_config), temperature=temperature),
    )
    engine = LocalRolloutEngine(tiny_model, tiny_tokenizer, LocalEngine(max_batch_size=7))
    ends = tuple(range(12, 20))  # so that responses are ragged
    sampling = Sampling(40, temperature, top_k=30, top_p=0.95, stop_token_ids=ends)
    done = list(engine.generate(requests_for(PROMPTS, n=4), sampling))
    assert len({len(c.token_ids) for c in done}) > 3
    prompts = {f"r{i}": p for i, p in enumerate(PROMPTS)}
    rows = [[*prompts[c.request_id], *c.token_ids] for c in done]
    prompt_lens = [len(prompts[c.request_id]) for c in done]
    masks = [[i >= p for i in range(len(r))] for r, p in zip(rows, prompt_lens, strict=True)]
    batch = rows_to_batch(rows, masks, prompt_lens=prompt_lens)
    ours = torch.tensor([x for c in done for x in c.logprobs])
    # fp32: log-probs of up to 10 through a cache instead of one pass
    torch.testing.assert_close(ours, train.logprobs(batch)[batch.action_mask], atol=1e-5, rtol=0)


def test_tokens_do_not_depend_on_batch_size_order_or_neighbours(
    lively_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    sampling = Sampling(max_tokens=20)
    requests = requests_for(PROMPTS, n=3)

    def run(size: int, some: list[Request]) -> dict[tuple[str, int], Completion]:
        engine = LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine(max_batch_size=size))
        return by_sample(list(engine.generate(some, sampling)))

    alone: dict[tuple[str, int], Completion] = {}
    for request in requests:
        alone |= run(128, [request])
    for size in (1, 2, 4, 128):
        for some in (requests, requests[::-1]):
            together = run(size, some)
            assert together.keys() == alone.keys()
            for key, completion in together.items():
                assert completion.token_ids == alone[key].token_ids, (size, key)
                # the same sums with other rows beside them
                assert completion.logprobs == pytest.approx(alone[key].logprobs, abs=1e-5)
    assert len({c.token_ids for c in alone.values()}) == len(alone), (
        "samples differ from each other"
    )


def test_a_larger_n_begins_with_the_same_samples(engine: LocalRolloutEngine) -> None:
    two = by_sample(list(engine.generate([Request("r", (7, 8), n=2, seed=5)], Sampling(12))))
    five = by_sample(list(engine.generate([Request("r", (7, 8), n=5, seed=5)], Sampling(12))))
    assert all(five[key].token_ids == two[key].token_ids for key in two)


def test_the_next_generate_does_not_depend_on_the_last(engine: LocalRolloutEngine) -> None:
    request = [Request("r", (7, 8, 9), n=2, seed=5)]
    first = by_sample(list(engine.generate(request, Sampling(12))))
    list(engine.generate(requests_for(PROMPTS, n=4), Sampling(30)))
    abandoned = engine.generate(requests_for(PROMPTS), Sampling(30))
    next(abandoned)
    abandoned.close()
    assert by_sample(list(engine.generate(request, Sampling(12)))) == first
    engine.sleep()
    engine.wake()
    assert by_sample(list(engine.generate(request, Sampling(12)))) == first


def test_a_decoded_token_takes_one_copy_from_the_device(
    engine: LocalRolloutEngine, host_reads: Any
) -> None:
    """For any number of sequences: a copy waits for all kernels launched before."""
    counts = []
    for steps in (8, 16):
        with host_reads() as reads:
            requests = [Request(f"r{i}", (7, 8, 9)) for i in range(3)]
            done = list(engine.generate(requests, Sampling(steps, 0.0)))
        assert [len(c.token_ids) for c in done] == [steps] * 3
        counts.append((len(reads.lists), reads.values))
    assert counts[1][0] - counts[0][0] == 8 and counts[1][1] == counts[0][1]


def test_code_between_completions_runs_with_gradients(engine: LocalRolloutEngine) -> None:
    completions = engine.generate(requests_for(PROMPTS, n=2), Sampling(8))
    next(completions)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        next(completions)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


# ---- how a response ends
# ---------------------------------------------------------------------------


def unstopped(engine: LocalRolloutEngine, count: int = 30) -> Completion:
    engine._end_tokens = set()
    (done,) = engine.generate([Request("r", (7, 8, 9), seed=3)], Sampling(count))
    assert done.finish_reason == "length" and len(done.token_ids) == count
    return done


def test_a_response_ends_with_the_end_token_and_keeps_it(
    engine: LocalRolloutEngine, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    free = unstopped(engine)
    end = free.token_ids[6]
    engine._end_tokens = {end}
    (done,) = engine.generate([Request("r", (7, 8, 9), seed=3)], Sampling(30))
    cut = free.token_ids.index(end) + 1
    assert done.token_ids == free.token_ids[:cut] and done.finish_reason == "stop"
    assert len(done.logprobs) == cut
    fresh = LocalRolloutEngine(engine.model, tiny_tokenizer, LocalEngine())
    assert fresh._end_tokens == {tiny_tokenizer.eos_token_id}


def test_stop_token_ids_end_a_response_and_stay_in_it(engine: LocalRolloutEngine) -> None:
    free = unstopped(engine)
    wanted = free.token_ids[9], free.token_ids[4]
    sampling = Sampling(30, stop_token_ids=wanted)
    (done,) = engine.generate([Request("r", (7, 8, 9), seed=3)], sampling)
    cut = min(free.token_ids.index(t) for t in wanted) + 1
    assert done.token_ids == free.token_ids[:cut] and done.finish_reason == "stop"


@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_a_stop_string_over_several_tokens_ends_a_response_and_stays_in_it(
    length: int, engine: LocalRolloutEngine, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """One token is one character here, so a string of 2 spans two tokens."""
    free = unstopped(engine)
    pieces = [tiny_tokenizer.decode([t]) for t in free.token_ids]
    stop = "".join(pieces[10 : 10 + length])
    (done,) = engine.generate([Request("r", (7, 8, 9), seed=3)], Sampling(30, stop=("??", stop)))
    cut = next(k for k in range(1, 31) if stop in "".join(pieces[:k]))
    assert done.finish_reason == "stop" and done.token_ids == free.token_ids[:cut]


def test_a_stop_string_is_looked_for_in_the_response_only(
    engine: LocalRolloutEngine, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    free = unstopped(engine)
    astride = tiny_tokenizer.decode([9]) + tiny_tokenizer.decode([free.token_ids[0]])
    assert astride not in free.text
    (done,) = engine.generate([Request("r", (7, 8, 9), seed=3)], Sampling(30, stop=(astride,)))
    assert done.token_ids == free.token_ids


def test_one_token_is_a_response(engine: LocalRolloutEngine) -> None:
    done = list(engine.generate(requests_for(PROMPTS, n=3), Sampling(1)))
    assert len(done) == 15 and all(len(c.token_ids) == len(c.logprobs) == 1 for c in done)


def test_the_end_token_at_the_last_place_counts_as_stop(engine: LocalRolloutEngine) -> None:
    free = unstopped(engine, 4)
    assert free.token_ids.index(free.token_ids[-1]) == 3
    sampling = Sampling(4, stop_token_ids=(free.token_ids[-1],))
    (done,) = engine.generate([Request("r", (7, 8, 9), seed=3)], sampling)
    assert done.finish_reason == "stop" and len(done.token_ids) == 4


# ---- what is refused
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "sampling", "message"),
    [
        (Request("odd", ()), Sampling(4), "odd has an empty prompt"),
        (
            Request("long", (7,) * 500),
            Sampling(13),
            r"500 tokens .* 13 = 513, .* positions for 512",
        ),
        (Request("none", (7,)), Sampling(0), "max_tokens=0"),
    ],
)
def test_requests_that_cannot_run_are_refused_before_anything_is_sampled(
    request_: Request, sampling: Sampling, message: str, engine: LocalRolloutEngine
) -> None:
    with pytest.raises(ValueError, match=message):
        next(engine.generate([Request("fine", (7, 8)), request_], sampling))


def test_a_response_may_fill_the_last_position(engine: LocalRolloutEngine) -> None:
    engine._end_tokens = set()
    (done,) = engine.generate([Request("r", (7,) * 500)], Sampling(12))
    assert len(done.token_ids) == 12


# ---- half precision
# --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # logits here are about 0.3 and hidden states about 1: some tens of roundings of 2^-9 (bf16) or
    # 2^-12 (fp16)
    [("bf16", 0.05), ("fp16", 0.008)],
)
def test_half_precision_samples_with_logprobs_close_to_fp32(
    dtype: Dtype,
    tolerance: float,
    tiny_config: ModelConfig,
    make_engine: Callable[..., TorchTrainEngine],
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = load_causal_lm(tiny_config, dtype=dtype)
    engine = LocalRolloutEngine(model, tiny_tokenizer, LocalEngine(max_batch_size=5))
    done = list(engine.generate(requests_for(PROMPTS, n=3), Sampling(20)))
    prompts = {f"r{i}": p for i, p in enumerate(PROMPTS)}
    rows = [[*prompts[c.request_id], *c.token_ids] for c in done]
    prompt_lens = [len(prompts[c.request_id]) for c in done]
    masks = [[i >= p for i in range(len(r))] for r, p in zip(rows, prompt_lens, strict=True)]
    batch = rows_to_batch(rows, masks, prompt_lens=prompt_lens)
    ours = torch.tensor([x for c in done for x in c.logprobs])
    exact = make_engine().logprobs(batch)[batch.action_mask]
    assert float((ours - exact).abs().max()) < tolerance
    assert not torch.equal(ours, exact)


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_responses_continue_when_a_shared_module_changes(
    half: bool,
    keep_cache: bool,
    lively_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the head changes, so old keys are those of the new weights. In fp16 the engine computes
    with fp32 copies of the weights."""
    if half:
        for parameter in lively_model.parameters():
            parameter.data = parameter.data.half()
        assert use_fp32_products(lively_model)
    engine = LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine())
    assert isinstance(engine.batch, RunningBatch)
    admitted: list[int] = []
    admit = engine.batch._admit
    monkeypatch.setattr(engine.batch, "_admit", lambda v: (admitted.append(v), admit(v)))
    request = Request("r", (7, 9, 12))
    engine.submit([request], GREEDY)
    for _ in range(5):
        assert not engine.poll()
    with torch.no_grad():
        lively_model.lm_head.weight.copy_(lively_model.lm_head.weight.flip(0))
    engine.weights_changed(3, keep_cache=keep_cache)
    (done,) = [c for _ in range(40) for c in engine.poll()]
    assert admitted == ([0] if keep_cache else [0, 3]), "prefilled once, or again"
    assert done.versions == (0,) * 5 + (3,) * (len(done.token_ids) - 5)
    longer = replace(request, prompt_ids=(*request.prompt_ids, *done.token_ids[:5]))
    (new,) = engine.generate([replace(longer, max_tokens=19)], GREEDY)
    assert (new.token_ids, new.logprobs) == (done.token_ids[5:], done.logprobs[5:])


def test_row_by_row_no_response_is_in_progress_at_an_update(
    lively_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine(), decoding="cached")
    assert not engine.keeps_cache_on_update
    engine.submit([Request("r", (7, 9, 12), n=2)], Sampling(8))
    (first,) = engine.poll()
    engine.weights_changed(1, keep_cache=True)
    (second,) = engine.poll()
    assert (set(first.versions), set(second.versions)) == ({0}, {1})


def test_prefills_by_flash_attention_equal_those_of_sdpa(
    lively_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU; here by plain matmuls, which are not batch invariant."""
    config = LocalEngine(batch_invariant=False)
    requests = requests_for(PROMPTS, n=2)
    plain = LocalRolloutEngine(lively_model, tiny_tokenizer, config)
    assert plain.network.flash is None
    expected = by_sample(list(plain.generate(requests, GREEDY)))
    calls: list[int] = []
    forward = flash._Part.forward

    def counted(part: Any, qkv: Any, scale: float) -> Any:
        calls.append(len(qkv[0]))
        return forward(part, qkv, scale)

    monkeypatch.setattr(flash._Part, "forward", counted)
    with on_cpu():
        ours = LocalRolloutEngine(lively_model, tiny_tokenizer, config)
        assert ours.network.flash is not None
        results = by_sample(list(ours.generate(requests, GREEDY)))
        assert LocalRolloutEngine(lively_model, tiny_tokenizer, LocalEngine()).network.flash is None
    assert calls and sum(calls) == lively_model.config.num_hidden_layers * sum(map(len, PROMPTS))
    for key, sample in expected.items():
        assert results[key].token_ids == sample.token_ids
        # (sums in another order)
        assert results[key].logprobs == pytest.approx(sample.logprobs, abs=1e-5)
