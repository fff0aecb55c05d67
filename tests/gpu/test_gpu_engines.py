"""The engines on CUDA: the CPU in fp32 is the oracle. Needs a device (``make test-gpu``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.train.base import Loss
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=64, tie_word_embeddings=False))
PROMPTS = [(7,), (9, 12, 30), tuple(range(6, 40)), (11, 11), (45, 6, 8, 9, 10, 33, 21)]
REQUESTS = [Request(f"r{i}", p, n=3, seed=i) for i, p in enumerate(PROMPTS)]


@pytest.fixture(autouse=True)
def exact_fp32() -> Iterator[None]:
    """No TF32: its 10 bits of mantissa would be all that a comparison shows."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def model_on(device: str, dtype: Dtype = "fp32") -> LlamaForCausalLM:
    model = load_causal_lm(MODEL, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # away from uniform, so that errors show
    return model


def train_engine(device: str, dtype: Dtype = "fp32", **train: object) -> TorchTrainEngine:
    spec = EngineSpec(
        TrainRole.alone(
            "policy",
            TrainConfig(**{"lr": 1e-3, **train}),
            MODEL,
            precision=PrecisionConfig(dtype=dtype),
        ),
        micro_batch_size=3,
    )
    return TorchTrainEngine(model_on(device), spec)


def sampled(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    **config: object,
) -> dict[tuple[str, int], Completion]:
    engine = LocalRolloutEngine(model, tokenizer, LocalEngine(**config))
    return {(c.request_id, c.index): c for c in engine.generate(REQUESTS, sampling)}


def as_batch(done: dict[tuple[str, int], Completion]) -> tuple[Batch, torch.Tensor]:
    prompts = {r.request_id: r.prompt_ids for r in REQUESTS}
    rows = [[*prompts[name], *c.token_ids] for (name, _), c in done.items()]
    starts = [len(prompts[name]) for name, _ in done]
    masks = [[i >= s for i in range(len(r))] for r, s in zip(rows, starts, strict=True)]
    logprobs = torch.tensor([x for c in done.values() for x in c.logprobs])
    return rows_to_batch(rows, masks, prompt_lens=starts), logprobs


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_fp32_logprobs_and_gradients_are_those_of_the_cpu(
    layout: str, ragged_batch: Batch, nll: Loss
) -> None:
    cpu, gpu = train_engine("cpu", layout=layout), train_engine("cuda", layout=layout)
    # logits of size 10 in fp32, summed in another order
    torch.testing.assert_close(
        gpu.logprobs(ragged_batch), cpu.logprobs(ragged_batch), atol=2e-5, rtol=0
    )
    for engine in (cpu, gpu):
        engine.forward_backward(ragged_batch, nll)
    for ours, exact in zip(gpu.model.parameters(), cpu.model.parameters(), strict=True):
        assert ours.grad is not None and exact.grad is not None
        scale = max(1.0, float(exact.grad.abs().max()))
        torch.testing.assert_close(ours.grad.cpu(), exact.grad, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("max_batch_size", [3, 128])
def test_greedy_tokens_are_those_of_the_cpu(
    cuda_graphs: bool, max_batch_size: int, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """80 tokens cross the 64-token bucket of the graphs."""
    greedy = Sampling(80, 0.0)
    expected = sampled(model_on("cpu"), tiny_tokenizer, greedy)
    ours = sampled(
        model_on("cuda"),
        tiny_tokenizer,
        greedy,
        cuda_graphs=cuda_graphs,
        max_batch_size=max_batch_size,
    )
    assert {k: c.token_ids for k, c in ours.items()} == {
        k: c.token_ids for k, c in expected.items()
    }


def test_graphs_see_new_weights_and_serve_a_second_call(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    engine = LocalRolloutEngine(model_on("cuda"), tiny_tokenizer, LocalEngine(max_batch_size=5))
    sampling = Sampling(40)

    def tokens() -> dict[tuple[str, int], tuple[int, ...]]:
        return {(c.request_id, c.index): c.token_ids for c in engine.generate(REQUESTS, sampling)}

    first = tokens()
    assert tokens() == first
    weights = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    engine.load_weights(1, [(n, 0.5 * w if w.ndim == 2 else w) for n, w in weights.items()])
    assert tokens() != first
    engine.load_weights(2, weights.items())
    assert tokens() == first
    engine.sleep()
    assert tokens() == first


@pytest.mark.parametrize("keep_cache", [True, False])
def test_graphs_continue_responses_under_new_weights(
    keep_cache: bool, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Only the head changes, so old keys are those of the new weights. It changes after one token
    of the prefill and a block of eight."""
    engine = LocalRolloutEngine(model_on("cuda"), tiny_tokenizer, LocalEngine())
    weights = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    request, greedy = Request("r", (7, 9, 12)), Sampling(24, 0.0)
    engine.submit([request], greedy)
    for _ in range(2):
        assert not engine.poll()
    new = weights | {"lm_head.weight": weights["lm_head.weight"].flip(0)}
    engine.load_weights(3, new.items(), keep_cache=keep_cache)
    (done,) = [c for _ in range(40) for c in engine.poll()]
    assert done.versions == (0,) * 9 + (3,) * (len(done.token_ids) - 9)
    longer = replace(request, prompt_ids=(7, 9, 12, *done.token_ids[:9]), max_tokens=15)
    (fresh,) = engine.generate([longer], greedy)
    assert fresh.token_ids == done.token_ids[9:]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(300, 0.7),
        Sampling(40, top_p=0.9),
        Sampling(40, 1.3, top_k=7, min_p=0.01),
        Sampling(40, top_k=9, sampling_mask=True),
        Sampling(40, top_p=0.9, sampling_mask=True),
        Sampling(40, stop=("1", "ab"), stop_token_ids=(9, 30)),
    ],
)
def test_recorded_draws_are_those_of_single_steps(
    sampling: Sampling, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Three cache sizes with 300 tokens. fp32 logits of size 10 from kernels that read other
    numbers of keys."""
    recorded, single = (
        sampled(model_on("cuda"), tiny_tokenizer, sampling, cuda_graphs=graphs)
        for graphs in (True, False)
    )
    assert recorded.keys() == single.keys()
    for key, one in single.items():
        assert recorded[key].token_ids == one.token_ids
        assert recorded[key].logprobs == pytest.approx(one.logprobs, abs=5e-5)
        assert recorded[key].kept_ids == one.kept_ids


def test_compiled_steps_are_those_of_single_steps(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """fp32 in another order, over logits of size 10. Three cache sizes with 300 tokens."""
    recorded, single = (
        sampled(model_on("cuda"), tiny_tokenizer, Sampling(300, 0.7), **config)
        for config in ({"compile": "layers"}, {"cuda_graphs": False})
    )
    for key, one in single.items():
        assert recorded[key].token_ids == one.token_ids
        assert recorded[key].logprobs == pytest.approx(one.logprobs, abs=5e-5)


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # logits of size 10 from hidden states rounded some tens of times to 2^-9 (bf16) or 2^-12 (fp16)
    [("fp32", 5e-5), ("bf16", 1.0), ("fp16", 0.15)],
)
def test_sampler_logprobs_are_near_the_fp32_train_engines(
    dtype: Dtype, tolerance: float, cuda_graphs: bool, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    done = sampled(model_on("cuda", dtype), tiny_tokenizer, Sampling(40), cuda_graphs=cuda_graphs)
    batch, ours = as_batch(done)
    exact = train_engine("cuda").logprobs(batch)[batch.action_mask]
    assert float((ours - exact).abs().max()) < tolerance
    assert len({c.token_ids for c in done.values()}) == len(done)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_half_precision_step_moves_the_fp32_masters(
    dtype: Dtype, ragged_batch: Batch, nll: Loss
) -> None:
    engine = train_engine("cuda", dtype, gradient_checkpointing=True)
    before = float(engine.logprobs(ragged_batch).sum())
    for _ in range(3):
        engine.forward_backward(ragged_batch, nll)
        assert not engine.optim_step().skipped
    assert float(engine.logprobs(ragged_batch).sum()) > before
    assert engine.optimizer is not None
    assert {m.dtype for m in engine.optimizer.masters} == {torch.float32}
    assert {m.device.type for m in engine.optimizer.masters} == {"cuda"}


@pytest.mark.parametrize(("dtype", "relative"), [("bf16", 0.05), ("fp16", 0.01)])
def test_half_precision_gradients_are_near_the_cpus_in_fp32(
    dtype: Dtype, relative: float, ragged_batch: Batch, nll: Loss
) -> None:
    """The norm of the whole gradient, whose entries are rounded some tens of times to 8 or 11
    bits."""
    norms = []
    for engine in (train_engine("cuda", dtype), train_engine("cpu")):
        engine.forward_backward(ragged_batch, nll)
        norms.append(engine.optim_step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=relative)


def test_an_overflow_on_the_gpu_skips_the_step_and_lowers_the_scale(
    ragged_batch: Batch, nll: Loss
) -> None:
    engine = train_engine("cuda", "fp16")
    before = [p.detach().clone() for p in engine.model.parameters()]
    scales = []
    for _ in range(3):
        engine.forward_backward(
            ragged_batch, lambda o, b: (-1e9 * o.logprobs.sum() / b.num_tokens, Stats())
        )
        stats = engine.optim_step()
        assert stats.skipped and stats.overflow
        scales.append(stats.loss_scale)
    assert scales == [65536, 65536, 32768]
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    engine.forward_backward(ragged_batch, nll)
    assert not engine.optim_step().skipped
