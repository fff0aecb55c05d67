"""The gradient of one step does not depend on how its rows were split, laid out or ordered.

The oracle is the model of transformers run on each row alone, with plain ``log_softmax``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.config.algorithm import AlgorithmConfig, KlConfig
from burnish.config.model import LoraConfig, ModelConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm
from burnish.steps.objectives import (
    policy_objective,
    reward_model_objective,
    sft_objective,
    value_objective,
)
from burnish.train.base import Loss, Outputs, Role
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

# fp32 sums over some hundred tokens in another order, relative to the largest entry where that is
# above 1
FP32 = 1e-6
LAYOUTS = ("padded", "packed", "shared_prefix")
SPLITS = [
    *[{"micro": rows} for rows in range(1, 9)],
    *[{"max_tokens_per_micro_batch": budget} for budget in (1, 7, 16, 33, 64)],
]
MakeEngine = Callable[..., TorchTrainEngine]


def policy_loss(aggregation: str) -> Loss:
    config = AlgorithmConfig(
        loss_aggregation=aggregation,
        entropy_coef=0.01,
        kl=KlConfig(init_kl_coef=0.1),
    )
    return policy_objective(config, max_len=16, kl_coef=lambda: 0.1)


LOSSES: dict[str, tuple[Role, Loss]] = {
    "policy, sequence_mean": ("policy", policy_loss("sequence_mean")),
    "policy, token_mean": ("policy", policy_loss("token_mean")),
    "policy, sequence_sum_constant": ("policy", policy_loss("sequence_sum_constant")),
    "sft": ("policy", sft_objective()),
    "reward model": ("reward", reward_model_objective()),
    "critic": ("critic", value_objective(value_clip=0.2)),
}


def with_rl_columns(batch: Batch, logprobs: Tensor) -> Batch:
    """Old, reference and sampler log-probs a little off the model's own, and random advantages."""
    generator = torch.Generator().manual_seed(3)

    def near() -> Tensor:
        noise = 0.3 * torch.randn(logprobs.shape, generator=generator)
        return torch.where(batch.action_mask, logprobs + noise, 0.0)

    return replace(
        batch,
        old_logprobs=near(),
        ref_logprobs=near(),
        sampler_logprobs=near(),
        advantages=torch.randn(logprobs.shape, generator=generator),
    )


def with_value_columns(batch: Batch, values: Tensor) -> Batch:
    """Values of before the update around the critic's own, some clipped and some not, and random
    returns."""
    generator = torch.Generator().manual_seed(4)

    def noise() -> Tensor:
        return torch.where(batch.action_mask, torch.randn(len(values), generator=generator), 0.0)

    return replace(batch, values=values + 0.3 * noise(), returns=noise())


def batch_for(name: str, engine: TorchTrainEngine, batch: Batch) -> Batch:
    if name == "reward model":
        return replace(batch, rows_per_unit=2, margins=torch.linspace(0, 1, batch.num_rows))
    if name == "critic":
        return with_value_columns(batch, engine.values(batch))
    return with_rl_columns(batch, engine.logprobs(batch)) if name.startswith("policy") else batch


def row_slices(batch: Batch) -> list[slice]:
    ends = batch.offsets.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def plain_values(engine: TorchTrainEngine, batch: Batch) -> Tensor:
    """A reward model's score of the last token of each row; a critic's value of the token before
    each action, at the action's position."""
    values = []
    for rows in row_slices(batch):
        scores = engine.model.score(engine.model.model(batch.tokens[rows][None])[0][0])[:, 0]
        if engine.role == "reward":
            values.append(torch.cat([scores.new_zeros(len(scores) - 1), scores[-1:]]))
        else:
            before = torch.cat([scores.new_zeros(1), scores[:-1]])
            values.append(torch.where(batch.action_mask[rows], before, 0.0))
    return torch.cat(values)


def plain_outputs(engine: TorchTrainEngine, batch: Batch, temperature: float = 1.0) -> Outputs:
    """Every row separately through the plain model; the first token of a row is not predicted."""
    if engine.scalar:
        return Outputs(values=plain_values(engine, batch))
    logprobs, entropies = [], []
    for rows in row_slices(batch):
        tokens = batch.tokens[rows]
        log_p = (engine.model(tokens[None]).logits[0] / temperature).log_softmax(-1)[:-1]
        zero = log_p.new_zeros(1)
        logprobs.append(torch.cat([zero, log_p.gather(-1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]))
    mask = batch.action_mask
    return Outputs(
        logprobs=torch.where(mask, torch.cat(logprobs), 0.0),
        entropy=torch.where(mask, torch.cat(entropies), 0.0),
    )


def plain_gradient(
    engine: TorchTrainEngine, batch: Batch, loss: Loss
) -> tuple[dict[str, Tensor], Stats]:
    scalar, stats = loss(plain_outputs(engine, batch), batch)
    scalar.backward()
    return taken_gradient(engine), stats


def taken_gradient(engine: TorchTrainEngine) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()
    return found


def assert_same_gradient(
    ours: dict[str, Tensor], expected: dict[str, Tensor], what: object
) -> None:
    assert ours.keys() == expected.keys()
    largest = max(1.0, *(float(g.abs().max()) for g in expected.values()))
    for name, gradient in expected.items():
        error = float((ours[name] - gradient).abs().max())
        assert error <= FP32 * largest, f"{what}: {name} is off by {error:.2e}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_each_row_alone_for_every_split(
    name: str, layout: str, make_engine: MakeEngine, ragged_batch: Batch
) -> None:
    role, loss = LOSSES[name]
    first = make_engine(role=role)
    batch = batch_for(name, first, ragged_batch)
    expected, stats = plain_gradient(first, batch, loss)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2, (
        "there is something to compare"
    )
    for split in SPLITS:
        engine = make_engine(role=role, layout=layout, **split)
        ours = engine.forward_backward(batch, loss)
        assert_same_gradient(taken_gradient(engine), expected, (name, layout, split))
        # sums of about 40 terms of size 1 in another order
        assert ours.floats() == pytest.approx(stats.floats(), abs=2e-5), (name, layout, split)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_checkpointing_recomputes_layers_with_equal_gradients(
    layout: str, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    gradients, calls = [], []
    for checkpointing in (False, True):
        engine = make_engine(layout=layout, gradient_checkpointing=checkpointing, micro=3)
        count: list[int] = []
        engine.body.layers[0].mlp.register_forward_pre_hook(lambda *_, c=count: c.append(1))
        engine.forward_backward(ragged_batch, nll)
        gradients.append(taken_gradient(engine))
        calls.append(len(count))
    assert calls == [3, 6], "three micro-batches, each computed again in backward"
    assert_same_gradient(gradients[1], gradients[0], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_invariant_to_row_order(
    layout: str, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    expected, _ = plain_gradient(make_engine(), ragged_batch, nll)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [4, 0, 5, 1, 6, 2, 7, 3]):
        engine = make_engine(layout=layout, micro=3)
        engine.forward_backward(ragged_batch.select(order), nll)
        assert_same_gradient(taken_gradient(engine), expected, order)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_without_an_action_token_do_not_change_the_gradient(
    layout: str, make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    """A long row without action tokens (which, padded, makes every row wider), alone in a pass and
    with others."""
    expected, _ = plain_gradient(make_engine(), ragged_batch, nll)
    rows = [ragged_batch.tokens[s].tolist() for s in row_slices(ragged_batch)]
    masks = [ragged_batch.action_mask[s].tolist() for s in row_slices(ragged_batch)]
    wider = rows_to_batch(
        [*rows, [9] * 40],
        [*masks, [False] * 40],
        prompt_lens=[*ragged_batch.prompt_lens.tolist(), 40],
        group_ids=[*ragged_batch.group_ids.tolist(), 99],
    )
    assert wider.num_tokens == ragged_batch.num_tokens
    for micro in (None, 8, 1):
        engine = make_engine(layout=layout, micro=micro)
        engine.forward_backward(wider, nll)
        assert_same_gradient(taken_gradient(engine), expected, micro)


def test_an_empty_response_in_a_group_does_not_change_the_gradient(
    make_engine: MakeEngine, nll: Loss
) -> None:
    prompt = [7, 8, 9]
    rows = [prompt, [*prompt, 10, 11], prompt, [*prompt, 12]]
    masks = [[False] * 3 + [True] * (len(r) - 3) for r in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[3] * 4, group_ids=[0] * 4)
    expected, _ = plain_gradient(make_engine(), batch, nll)
    for layout in LAYOUTS:
        engine = make_engine(layout=layout)
        engine.forward_backward(batch, nll)
        assert_same_gradient(taken_gradient(engine), expected, layout)


def test_calls_of_forward_backward_add_up_until_the_step(
    make_engine: MakeEngine, ragged_batch: Batch, nll: Loss
) -> None:
    expected, _ = plain_gradient(make_engine(), ragged_batch, nll)
    engine = make_engine()
    engine.forward_backward(ragged_batch.select([0, 1, 2]), nll)
    engine.forward_backward(ragged_batch.select([3, 4, 5, 6, 7]), nll)
    assert_same_gradient(taken_gradient(engine), expected, "two calls")


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_are_those_of_the_plain_model(
    layout: str, temperature: float, make_engine: MakeEngine, ragged_batch: Batch
) -> None:
    engine = make_engine(layout=layout, temperature=temperature, micro=3, logprob_chunk_tokens=5)
    with torch.no_grad():
        expected = plain_outputs(engine, ragged_batch, temperature)
    ours = engine.logprobs(ragged_batch)
    assert ours.dtype == torch.float32 and not ours.requires_grad
    assert bool((ours[~ragged_batch.action_mask] == 0).all())
    # log-probs of size 4: a few ulps of 4 x 6e-8 through two layers and a softmax of 53
    torch.testing.assert_close(ours, expected.logprobs, atol=3e-6, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_at_action_states_and_scores_on_last_tokens(
    layout: str, make_engine: MakeEngine, ragged_batch: Batch
) -> None:
    reward = make_engine(role="reward", layout=layout, micro=3)
    with torch.no_grad():
        expected = plain_values(reward, ragged_batch)
    torch.testing.assert_close(reward.values(ragged_batch), expected, atol=FP32, rtol=0)

    critic = make_engine(role="critic", layout=layout, micro=3)
    with torch.no_grad():
        expected = plain_values(critic, ragged_batch)
    torch.testing.assert_close(critic.values(ragged_batch), expected, atol=FP32, rtol=0)


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(
    groups=GROUPS,
    layout=st.sampled_from(LAYOUTS),
    budget=st.none() | st.integers(1, 64),
    micro=st.none() | st.integers(1, 8),
    holes=st.integers(0, 2**16),
    shuffle=st.booleans(),
)
def test_any_ragged_batch_in_any_layout_has_the_gradient_of_its_rows_alone(
    groups: list[tuple[int, list[int]]],
    layout: str,
    budget: int | None,
    micro: int | None,
    holes: int,
    shuffle: bool,
) -> None:
    """Random prompts, responses (some empty), gaps in the action mask, splits and row orders."""
    generator = torch.Generator().manual_seed(holes)
    batch = random_groups(groups, generator)
    if not batch.num_tokens:
        return
    if shuffle:
        batch = batch.select(torch.randperm(batch.num_rows, generator=generator).tolist())
    config = ModelConfig(scratch=ScratchConfig(hidden_size=16, num_layers=2))
    train = TrainConfig(layout=layout, max_tokens_per_micro_batch=budget)
    spec = EngineSpec(TrainRole.alone("policy", train, config), micro_batch_size=micro)
    engine = TorchTrainEngine(load_causal_lm(config), spec)
    batch = with_rl_columns(batch, engine.logprobs(batch))
    loss = policy_loss("sequence_mean")
    expected, _ = plain_gradient(engine, batch, loss)
    engine.forward_backward(batch, loss)
    assert_same_gradient(taken_gradient(engine), expected, (layout, budget, micro))


def random_groups(groups: list[tuple[int, list[int]]], generator: torch.Generator) -> Batch:
    rows, masks, prompt_lens, ids = [], [], [], []
    for group, (prompt_len, lengths) in enumerate(groups):
        prompt = torch.randint(6, 50, (prompt_len,), generator=generator).tolist()
        for length in lengths:
            rows.append(prompt + torch.randint(6, 50, (length,), generator=generator).tolist())
            chosen = (torch.rand(length, generator=generator) < 0.8).tolist()
            masks.append([False] * prompt_len + chosen)
            prompt_lens.append(prompt_len)
            ids.append(group)
    return rows_to_batch(rows, masks, prompt_lens=prompt_lens, group_ids=ids)


def test_rows_of_a_group_with_different_prompts_do_not_share_a_prefix(
    make_engine: MakeEngine, nll: Loss
) -> None:
    """Same group id and prompt length, other tokens: sharing the first one's prompt would be
    wrong."""
    rows = [[7, 8, 9, 20, 21], [7, 8, 10, 20, 21], [7, 8, 10, 22]]
    masks = [[False] * 3 + [True] * (len(r) - 3) for r in rows]
    batch = rows_to_batch(rows, masks, prompt_lens=[3] * 3, group_ids=[0] * 3)
    engine = make_engine(layout="shared_prefix")
    expected, _ = plain_gradient(engine, batch, nll)
    engine.forward_backward(batch, nll)
    assert_same_gradient(taken_gradient(engine), expected, "other prompts")


def test_an_action_as_first_token_of_a_row_is_refused(make_engine: MakeEngine, nll: Loss) -> None:
    batch = rows_to_batch([[7, 8], [9, 9]], [[False, True], [True, True]], prompt_lens=[1, 0])
    with pytest.raises(ValueError, match="first token of a row"):
        make_engine().forward_backward(batch, nll)


def test_lora_gradients_do_not_depend_on_the_split(
    make_engine: MakeEngine, tiny_config: ModelConfig, ragged_batch: Batch, nll: Loss
) -> None:
    config = tiny_config.model_copy(update={"lora": LoraConfig(lora_rank=4)})
    gradients = []
    for micro in (None, 1):
        torch.manual_seed(0)  # adapters start from the global generator
        engine = make_engine(config=config, micro=micro, gradient_checkpointing=micro == 1)
        engine.forward_backward(ragged_batch, nll)
        gradients.append(taken_gradient(engine))
    assert gradients[0] and all(".lora_" in name for name in gradients[0])
    assert_same_gradient(gradients[1], gradients[0], "lora")
