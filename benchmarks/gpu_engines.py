"""Steps of benchmarks/gpu_session.py that compare: engines on the device with the same model on the
CPU, and weights that were handed over with those that were sent.

The reference is transformers' own forward and backward of single rows with fp64 weights on the CPU
(its norms and rotary angles stay fp32). Each format on the device may be as far from it as
``SLACK`` times the same format on the CPU, which rounds as often but sums in another order, or as
``FLOOR`` says, whichever is more.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from gpu_model import (
    Group,
    free,
    make_batch,
    make_engine,
    make_recipe,
    nll,
    synchronize,
)
from gpu_report import Report, Setup
from plan_accuracy import random_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.gpu import set_up_gpu
from burnish.models.load import choose_attention, place
from burnish.models.scratch import scratch_tokenizer
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.rollout.weights import Fingerprint, fingerprint, read_fingerprints
from burnish.sync.checksum import word_sums
from burnish.sync.inproc import InprocWeightSync
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch

FORMATS: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
LAYOUTS = ("padded", "packed", "shared_prefix")
SLACK = 4.0
FLOOR = {"fp32": 2e-5, "bf16": 0.1, "fp16": 0.02}
"""Nats. Logits are of size 10; fp32 has 24 bits, bf16 8 and fp16 11, in some tens of roundings."""
GRADIENT_FLOOR = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}
"""Fractions of the gradient's norm."""
LONG = 40 << 20
"""Values: several chunks of a fingerprint on a GPU."""
NEW_TOKENS = 80
"""More than 64, at which the recorded graphs of the local engine change."""


@dataclass(frozen=True)
class Exact:
    """Results of the reference for a batch."""

    logprobs: Tensor
    """[M] fp64, 0 on prompts"""
    gradients: dict[str, Tensor]


def small_model(*, tiny: bool) -> PreTrainedModel:
    """Make a Qwen3 with large random weights, on the CPU in fp32: its distributions are far from
    uniform, so that errors show."""
    size = 1 if tiny else 8
    config = Qwen3Config(
        vocab_size=64 * size,
        hidden_size=32 * size,
        intermediate_size=64 * size,
        num_hidden_layers=2 if tiny else 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8 * size,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0 if tiny else 2.0)
    return model.eval()  # type: ignore[no-any-return]


def reference_of(model: PreTrainedModel, batch: Batch) -> Exact:
    """Compute log-probs, and gradients of :func:`gpu_model.nll`, in fp64 row by row."""
    exact = plain(model)
    found = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    for row in range(batch.num_rows):
        begin, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        ids = batch.tokens[begin:end]
        logprobs = logprobs_of(exact, ids)
        mask = batch.action_mask[begin:end]
        (-logprobs[mask].sum() / batch.num_tokens).backward()
        found[begin:end][mask] = logprobs[mask].detach()
    grads = {n: p.grad for n, p in exact.named_parameters() if p.grad is not None}
    return Exact(found, grads)


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in fp64, with transformers' own attention."""
    exact: Any = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    return exact  # type: ignore[no-any-return]


def logprobs_of(model: Any, ids: Tensor) -> Tensor:
    """Return [T], the log-prob of each token of a row, 0 for the first."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    picked = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


# ---- engines -------------------------------------------------------------------------------------


def engines(setup: Setup, report: Report) -> None:
    """Compare log-probs, gradients and greedy tokens with the reference."""
    torch.set_float32_matmul_precision("highest")
    set_up_gpu(torch.device(setup.device))
    model = small_model(tiny=setup.tiny)
    size = 1 if setup.tiny else 12
    groups = (Group(3 * size, (5 * size, 1, 2 * size)), Group(2, (7 * size,)), Group(11, (4, 9)))
    batch = make_batch(groups, model.config.vocab_size)
    exact = reference_of(model, batch)
    passed = train_rows(setup, report, (model, batch, exact))
    passed += sample_rows(setup, report, model)
    report.summary(f"{sum(passed)} of {len(passed)} comparisons within tolerance")


def train_rows(
    setup: Setup, report: Report, given: tuple[PreTrainedModel, Batch, Exact]
) -> list[bool]:
    """Return for each format and layout of the train engine whether it is within tolerance."""
    passed = []
    for dtype, layout in itertools.product(FORMATS, LAYOUTS):
        name = f"train engine, {dtype}, {layout}"
        passed.append(False)
        with report.case(name):
            far = train_errors(given, dtype, layout, "cpu")
            found = train_errors(given, dtype, layout, setup.device)
            limits = max(FLOOR[dtype], SLACK * far[0]), max(GRADIENT_FLOOR[dtype], SLACK * far[1])
            passed[-1] = found[0] <= limits[0] and found[1] <= limits[1]  # False of NaN
            report.row(
                "Train engine against fp64 on the CPU",
                **{"format": dtype, "layout": layout, "log-prob error, nats": found[0]},
                **{"at most": limits[0], "gradient error": found[1], "at most ": limits[1]},
                within=passed[-1],
            )
            if not passed[-1]:
                report.problem(f"{name}: errors {found}, at most {limits} expected")
    return passed


def train_errors(
    given: tuple[PreTrainedModel, Batch, Exact], dtype: Dtype, layout: Any, device: str
) -> tuple[float, float]:
    """Return (largest error of a log-prob, error of the gradient over its norm)."""
    model, batch, exact = given
    own = place(copy.deepcopy(model), dtype="fp32", device=device)
    choose_attention(own, "the small model")
    spec = EngineSpec(
        TrainRole.alone(
            "policy",
            TrainConfig(layout=layout),
            ModelConfig(scratch=ScratchConfig()),
            precision=PrecisionConfig(dtype=dtype),
        ),
        micro_batch_size=4,
    )
    engine = TorchTrainEngine(own, spec)
    logprobs = engine.logprobs(batch).cpu().double()
    engine.forward_backward(batch, nll)
    optimizer = engine.optimizer
    assert optimizer is not None
    grads = [g.double().cpu() / optimizer.scaler.scale for g in optimizer.gradients()]
    wanted = [exact.gradients[name] for name in optimizer.names]
    off = sum(float((a - b).square().sum()) for a, b in zip(grads, wanted, strict=True))
    norm = sum(float(b.square().sum()) for b in wanted)
    return float((logprobs - exact.logprobs).abs().max()), (off / norm) ** 0.5


def sample_rows(setup: Setup, report: Report, model: PreTrainedModel) -> list[bool]:
    """Return the same for each format of the rollout engine, with and without CUDA graphs."""
    passed = []
    prompts = ((7,), (9, 12, 30), tuple(range(6, 40)), (45, 6, 8, 9, 10, 33, 21))
    requests = [Request(f"{i}", p, n=2, seed=i) for i, p in enumerate(prompts)]
    exact = plain(model)
    for dtype, graphs in itertools.product(FORMATS, (True, False)):
        name = f"rollout engine, {dtype}, cuda_graphs={graphs}"
        passed.append(False)
        with report.case(name):
            on_cpu = greedy(model, dtype, "cpu", requests, graphs=False)
            far = sample_errors(on_cpu, requests, exact)
            done = greedy(model, dtype, setup.device, requests, graphs=graphs)
            found = sample_errors(done, requests, exact)
            limit = max(FLOOR[dtype], SLACK * max(far))
            passed[-1] = all(value <= limit for value in found)  # False of NaN
            report.row(
                "Rollout engine against fp64 on the CPU, greedy",
                **{"format": dtype, "CUDA graphs": graphs, "log-prob error, nats": found[0]},
                **{"below the best token, nats": found[1], "at most": limit},
                within=passed[-1],
            )
            if not passed[-1]:
                report.problem(f"{name}: errors {found}, at most {limit} expected")
    return passed


def greedy(
    model: PreTrainedModel, dtype: Dtype, device: str, requests: list[Request], *, graphs: bool
) -> list[Completion]:
    """Sample greedy completions with the local engine."""
    own = place(copy.deepcopy(model), dtype=dtype, device=device)
    choose_attention(own, "the small model")
    config = LocalEngine(cuda_graphs=graphs, max_batch_size=5)
    engine = LocalRolloutEngine(own, scratch_tokenizer("01"), config)
    return list(engine.generate(requests, Sampling(NEW_TOKENS, 0.0)))


@torch.no_grad()
def sample_errors(
    done: list[Completion], requests: list[Request], exact: Any
) -> tuple[float, float]:
    """Return (largest error of a log-prob, largest distance of a chosen token from the best)."""
    prompts = {request.request_id: request.prompt_ids for request in requests}
    error = below = 0.0
    for one in done:
        prompt = prompts[one.request_id]
        ids = torch.tensor([*prompt, *one.token_ids])
        logits = exact(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.double().log_softmax(-1)
        chosen = logprobs.gather(1, ids[len(prompt) :, None])[:, 0]
        reported = torch.tensor(one.logprobs, dtype=torch.float64)
        error = max(error, float((reported - chosen).abs().nan_to_num(torch.inf).max()))
        below = max(below, float((logprobs.amax(-1) - chosen).max()))
    return error, below


# ---- hand-over -----------------------------------------------------------------------------------


def sync(setup: Setup, report: Report) -> None:
    """Time each part of a hand-over of the 0.6B model's weights."""
    engine = make_engine(setup, with_entropy=False)
    weights = dict(engine.weights())
    half = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    num_bytes = sum(weight.nbytes for weight in half.values())
    flat = torch.cat([weight.reshape(-1).view(torch.uint8) for weight in half.values()])
    sampler = place(
        random_model(make_recipe(setup), torch.device(setup.device)),
        dtype="bf16",
        device=setup.device,
    ).requires_grad_(False)
    local = LocalRolloutEngine(sampler, scratch_tokenizer("01"), LocalEngine())
    link = InprocWeightSync(engine, local)
    cases: dict[str, Callable[[], Any]] = {
        "fingerprint, from bf16": lambda: fingerprints(half),
        "checksum on the device": lambda: word_sums(flat),
        "copy to a bf16 model in this process": link.push,
        "to host memory": lambda: flat.cpu(),
    }
    rates = []
    for name, run in cases.items():
        with report.case(name):
            seconds = median(_seconds(setup, run) for _ in range(4))
            rate = num_bytes / seconds / 1e9
            report.row("Weight sync", part=name, GB=num_bytes / 1e9, seconds=seconds, GB_per_s=rate)
            rates.append(f"{name} {rate:.3g} GB/s")
    with report.case("equality"):
        off = [n for n, w in sampler.named_parameters() if not torch.equal(w, half[n])]
        if off:
            report.problem(f"{len(off)} weights differ after the copy, e.g. {off[0]}")
        by_size = sorted(half, key=lambda name: half[name].numel())
        some = {name: half[name] for name in by_size[:8]}
        some["largest"] = half[by_size[-1]].reshape(-1)[:LONG]
        if fingerprints(some) != fingerprints({name: w.cpu() for name, w in some.items()}):
            report.problem("the fingerprint on the device differs from the CPU's")
    report.summary("; ".join(rates))
    free(setup)


def fingerprints(weights: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
    """Return the numbers by which weights for vLLM are compared."""
    return read_fingerprints({n: fingerprint(w, torch.bfloat16) for n, w in weights.items()})


def _seconds(setup: Setup, run: Callable[[], Any]) -> float:
    synchronize(setup)
    begun = time.perf_counter()
    run()
    synchronize(setup)
    return time.perf_counter() - begun
