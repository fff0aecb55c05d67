"""The same optimizer steps as TRL's own trainers: loss, norm of the gradient and weights after it.

TRL is an oracle here: an implementation by others, run as its users run it, on the same tiny Llama
and the same rows. If its conventions differ from ours, the test says so and uses TRL's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

pytest.importorskip("trl")

from burnish.algorithms import ADVANTAGES
from burnish.config.algorithm import AlgorithmConfig
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.preference_losses import PreferenceLossConfig
from burnish.data.batches import load_batch
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.preferences.unpaired import load_unpaired
from burnish.jobs.preference import preference_objective, preparation
from burnish.models.load import load_causal_lm
from burnish.steps.objectives import policy_objective
from burnish.train.base import Loss
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, rows_to_batch

_SPEC = importlib.util.spec_from_file_location(
    "trl_steps", Path(__file__).with_name("trl_steps.py")
)
assert _SPEC is not None and _SPEC.loader is not None
trl_steps: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["trl_steps"] = trl_steps  # its dataclass looks there
_SPEC.loader.exec_module(trl_steps)

pytestmark = pytest.mark.slow

POLICY = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_layers=2))
REFERENCE = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_layers=2, seed=1))
PAIRS = [
    {"prompt": "12+3=", "chosen": "15", "rejected": "6 or so"},
    {"prompt": "what is 7?", "chosen": "a number, and odd", "rejected": "no"},
    {"prompt": "2*8=", "chosen": "16", "rejected": "28"},
]
MAX_LEN = 12
SUMMED = {
    "hinge": 0.5, "exo_pair": 0.7, "nca_pair": 0.3, "bco_pair": 0.2, "sppo_hard": 0.01,
    "apo_zero": 0.4, "apo_down": 0.6, "discopop": 0.8,
}  # fmt: skip
"""Losses that a test adds to another one, with their weights."""
MASKED = 0.01
"""Nats per token beyond which samples with a negative advantage leave the loss."""

Make = Callable[..., TorchTrainEngine]


def lively(config: ModelConfig) -> LlamaForCausalLM:
    """With larger weights than a fresh model's, so that log-probs of policy and reference differ by
    a lot."""
    model = load_causal_lm(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model


def engine_of(make_engine: Make, config: ModelConfig) -> TorchTrainEngine:
    engine = make_engine(
        config=config, lr_scheduler="constant", max_grad_norm=None, **trl_steps.ADAM
    )
    engine.model.load_state_dict(lively(config).state_dict())
    return engine


def step(engine: TorchTrainEngine, batch: Batch, loss: Loss) -> tuple[float, float]:
    """One update: its loss, and the norm of its gradient."""
    stats = engine.forward_backward(batch, loss)
    return stats.floats()["loss"], engine.optim_step().grad_norm


def assert_same_step(engine: TorchTrainEngine, ours: tuple[float, float], seen: Any) -> None:
    """Against TRL's step of the same number."""
    number = engine.version - 1
    # 1e-5: fp32 sums of a few dozen log-probs in another order (padded there, packed here)
    assert ours[0] == pytest.approx(seen.losses[number], rel=1e-5, abs=1e-6)
    assert ours[1] == pytest.approx(seen.grad_norms[number], rel=1e-4)
    theirs = seen.weights[number]
    assert set(theirs) == set(engine.model.state_dict())
    for name, weight in engine.model.state_dict().items():
        # 2e-5 = lr / 500: rounding of 1e-7 beside Adam's eps of 1e-4 moves a weight by lr / 1000
        torch.testing.assert_close(weight, theirs[name], atol=2e-5, rtol=0, msg=name)


def moved(engine: TorchTrainEngine, config: ModelConfig) -> float:
    before = lively(config).state_dict()
    return max((w - before[n]).abs().max().item() for n, w in engine.model.state_dict().items())


def rows_of(inputs: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """Tokens and masks of TRL's padded rows, without the padding."""
    kept = inputs["attention_mask"].bool()
    return [
        (ids[k].tolist(), mask[k].bool().tolist())
        for ids, mask, k in zip(inputs["input_ids"], inputs["completion_mask"], kept, strict=True)
    ]


def rows_in(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    cuts = batch.offsets[1:-1].tolist()
    tokens, masks = (x.tensor_split(cuts) for x in (batch.tokens, batch.action_mask))
    return [(t.tolist(), m.tolist()) for t, m in zip(tokens, masks, strict=True)]


def preference(kind: str, **options: Any) -> PreferenceLossConfig:
    return TypeAdapter(PreferenceLossConfig).validate_python({"kind": kind, **options})


def data(folder: Path, rows: list[dict[str, Any]], **options: Any) -> PreferenceDataConfig:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return PreferenceDataConfig(sources=[str(path)], **options)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"kind": "dpo", "beta": 0.3}, {"loss_type": "sigmoid", "beta": 0.3}),
        ({"kind": "ipo", "beta": 0.2, "mean_logprobs": True}, {"loss_type": "ipo", "beta": 0.2}),
        (
            {"kind": "robust", "beta": 0.3, "label_smoothing": 0.1},
            {"loss_type": ["robust", *SUMMED], "loss_weights": [1.0, *SUMMED.values()],
             "beta": 0.3, "label_smoothing": 0.1, "ld_alpha": 0.4},
        ),
        ({"kind": "dpo", "beta": 0.3}, {"beta": 0.3, "use_weighting": True}),
        *(
            ({"kind": kind, "beta": 0.3, "label_smoothing": 0.1},
             {"loss_type": kind, "beta": 0.3, "label_smoothing": 0.1})
            for kind in ("aot", "aot_unpaired")
        ),
    ],
    ids=["dpo", "ipo", "sum", "wpo", "aot", "aot_unpaired"],
)  # fmt: skip
def test_a_step_of_dpo_and_its_relatives_equals_trls(  # house: ok fixtures
    ours: dict[str, Any],
    theirs: dict[str, Any],
    make_engine: Make,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    """TRL's IPO compares means over the response: ``mean_logprobs`` here (the paper's own form,
    sums, is our default). Its rows are all chosen ones, then all rejected; ours alternate. ``sum``
    adds nine losses with weights, of log-probs with less weight beyond the shorter response."""
    models = lively(POLICY), lively(REFERENCE)
    seen = trl_steps.preference_steps("dpo", *models, tiny_tokenizer, PAIRS, tmp_path, **theirs)
    batch = load_batch(data(tmp_path, PAIRS), tiny_tokenizer).with_global_counts()
    rows = rows_of(seen.inputs[0])
    assert rows_in(batch) == [row for pair in zip(rows[:3], rows[3:], strict=True) for row in pair]

    engine, reference = engine_of(make_engine, POLICY), engine_of(make_engine, REFERENCE)
    config, options = preference(**ours), {"ld_alpha": theirs.get("ld_alpha", 1.0)}
    weigh = engine if theirs.get("use_weighting") else None
    prepare = preparation(config, engine, reference, max_len=512, weigh=weigh, **options)
    options["weight_pairs"] = weigh is not None
    if config.kind == "robust":
        noise = {"exo_pair": {"label_smoothing": 0.1}}
        options["added"] = [
            (preference(k, beta=0.3, **noise.get(k, {})), w) for k, w in SUMMED.items()
        ]
    objective = preference_objective(config, **options)
    engine.forward.entropy_order = 2  # without gradient
    ready, engine.forward.entropy_order = prepare(batch), 1
    assert_same_step(engine, step(engine, ready, objective), seen)
    assert moved(engine, POLICY) > 1e-3


@pytest.mark.parametrize("beta", [0.02, 0.1])
def test_a_step_of_kto_equals_trls(
    beta: float,
    make_engine: Make,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    """Both estimate the KL on the step's own responses behind other prompts: ours each behind the
    row before it, TRL's behind the row after it. So TRL gets the rows in reverse. The weights of
    both verdicts differ, and their numbers too."""
    options = {"beta": beta, "desirable_weight": 1.5, "undesirable_weight": 0.8}
    rows = [
        {"prompt": p["prompt"], "response": p[side], "label": side == "chosen"}
        for p, side in zip(PAIRS, ("chosen", "rejected", "chosen"), strict=True)
    ]
    theirs = [
        {"prompt": r["prompt"], "completion": r["response"], "label": r["label"]}
        for r in reversed(rows)
    ]
    models = lively(POLICY), lively(REFERENCE)
    options_of_trl = {**options, "loss_type": "kto"}
    seen = trl_steps.preference_steps(
        "kto", *models, tiny_tokenizer, theirs, tmp_path, **options_of_trl
    )
    config = data(tmp_path, rows, label_key="label")
    batch = load_unpaired(config, tiny_tokenizer).with_global_counts()
    assert rows_in(batch) == rows_of(seen.inputs[0])[::-1]

    engine, reference = engine_of(make_engine, POLICY), engine_of(make_engine, REFERENCE)
    loss = preference("kto", **options)
    ready = preparation(loss, engine, reference, max_len=512)(batch)
    assert_same_step(engine, step(engine, ready, preference_objective(loss)), seen)
    assert moved(engine, POLICY) > 1e-3


def rollout(inputs: dict[str, Any], rewards: dict[tuple[int, ...], float]) -> Batch:
    """TRL's rollout as a batch of ours. Its rows are shuffled; groups are those of one prompt."""
    rows, masks, prompt_lens = [], [], []
    parts = (inputs[k] for k in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
    for prompt, prompt_mask, response, response_mask in zip(*parts, strict=True):
        begin, end = prompt[prompt_mask.bool()].tolist(), response[response_mask.bool()].tolist()
        rows.append(begin + end)
        masks.append([False] * len(begin) + [True] * len(end))
        prompt_lens.append(len(begin))
    prompts = [tuple(row[:n]) for row, n in zip(rows, prompt_lens, strict=True)]
    names = list(dict.fromkeys(prompts))
    batch = rows_to_batch(
        rows, masks, prompt_lens=prompt_lens, group_ids=[names.index(p) for p in prompts]
    )
    given = [rewards[tuple(row[n:])] for row, n in zip(rows, prompt_lens, strict=True)]
    return replace(batch, rewards=torch.tensor(given))


def spread(per_row: Tensor, batch: Batch) -> Tensor:
    return torch.where(batch.action_mask, per_row[batch.row_ids], 0.0)


@pytest.mark.parametrize(
    ("aggregation", "loss_type", "advantage", "scale"),
    [
        ("sequence_mean", "grpo", "grpo", "group"),
        ("token_mean", "dapo", "grpo", "group"),
        ("sequence_sum_constant", "dr_grpo", "dr_grpo", "none"),
        ("sequence_mean", "sapo", "grpo", "group"),
        ("token_mean", "vespo", "grpo", "group"),
    ],
)
def test_two_steps_of_grpo_equal_trls(  # house: ok fixtures
    aggregation: str,
    loss_type: str,
    advantage: str,
    scale: str,
    make_engine: Make,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    """The rollout is TRL's: its samples, and rewards of a function of theirs. Its std has n - 1, as
    ours, and an eps of 1e-4 instead of our 1e-6. Step 1 is on the policy that sampled and has no KL
    yet; step 2 is off it: ratios up to the clip and beyond, and a KL (k3) to the reference. TRL's
    own default multiplies that KL by the ratio; ours is the plain estimator. With sapo and vespo
    that default, and the mask of samples far from the policy, are on in both."""
    beta, model, weighted = 0.1, lively(POLICY), loss_type in ("sapo", "vespo")
    seen, rewards = trl_steps.grpo_steps(
        model, tiny_tokenizer, ["12+3=", "what is 7?", "2*8="], tmp_path,
        num_generations=4, beta=beta, epsilon=0.05, epsilon_high=0.1,
        loss_type=loss_type, scale_rewards=scale, use_bias_correction_kl=weighted,
        off_policy_mask_threshold=MASKED if weighted else None,
    )  # fmt: skip
    batch = rollout(seen.inputs[0], rewards)
    per_row = ADVANTAGES[advantage](batch.rewards, batch.group_ids, eps=1e-4)
    # 1e-5: fp32
    torch.testing.assert_close(per_row, seen.inputs[0]["advantages"], atol=1e-5, rtol=1e-5)

    engine, reference = engine_of(make_engine, POLICY), engine_of(make_engine, POLICY)
    batch = replace(
        batch,
        advantages=spread(per_row, batch),
        old_logprobs=engine.logprobs(batch),
        ref_logprobs=reference.logprobs(batch),
    )
    config = AlgorithmConfig.model_validate(
        {
            "policy_loss": loss_type
            if weighted
            else {"kind": "ppo", "clip_low": 0.05, "clip_high": 0.1},
            "loss_aggregation": aggregation,
            "kl": {"init_kl_coef": beta, "bias_correction": weighted},
            "off_policy_mask": MASKED if weighted else None,
        }
    )
    objective = policy_objective(config, max_len=MAX_LEN, kl_coef=lambda: beta)
    for number in range(2):
        stats = engine.forward_backward(batch, objective).floats()
        done = stats["loss"], engine.optim_step().grad_norm
        assert_same_step(engine, done, seen)
        off = stats["off_policy_mask_frac" if weighted else "clip_frac"]
        assert (stats["kl"] > 1e-3) == (off > 0.1) == (number == 1)
    assert moved(engine, POLICY) > 1e-3
