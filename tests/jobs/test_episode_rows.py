"""The sample is the episode: how its calls are divided into rows changes no gradient.

An episode is a prompt and turns, each with sampled tokens and then an observation. Calls that
extend each other are one row, or each begins a row whose prompt is everything before it. The tiny
model is evaluated on both forms through the functions of an RL step: ``groups_to_batch``,
``assign_advantages``, ``minibatches``, ``split_over_ranks``, the objectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from burnish.algorithms.advantages import time_order
from burnish.batches import groups_to_batch
from burnish.config import RLConfig, load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm
from burnish.models.value_head import load_scalar_model
from burnish.rewards.reward_set import NoRewards
from burnish.steps.credit import assign_advantages
from burnish.steps.no_signal import reward_signal
from burnish.steps.objectives import policy_objective, value_objective
from burnish.steps.rl import advantage_by_sample, batch_metrics, minibatches
from burnish.train.base import Loss
from burnish.train.batching import split_over_ranks
from burnish.train.forward import Forward
from burnish.transcript import Episode as Record
from burnish.types import Batch, Group, Prompt, Sample, TokenRow

MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=16, num_layers=1, tie_word_embeddings=False))
PROMPTS = ((7, 8, 9), (10, 11))

KL = {"init_kl_coef": 0.3, "placement": "loss"}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "kl": KL},
    "dr_grpo": {"advantage": "dr_grpo", "entropy_coef": 0.1},
    "opo": {"advantage": "opo"},
    "rloo": {"advantage": "rloo"},
    "rloo, KL in the reward": {"advantage": "rloo"},
    "grpo, KL in the reward": {"advantage": "grpo"},
    "reinforce_pp": {"advantage": {"kind": "reinforce_pp", "gamma": 0.9}},
    "reinforce_pp, turns": {
        "advantage": {"kind": "reinforce_pp", "gamma": 0.5, "discount": "turn"},
        "turn_rewards": True,
    },
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "gae": {"advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.8}},
    "gae, turns": {
        "advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.8, "discount": "turn"},
        "turn_rewards": True,
    },
}
_IN_REWARD = {name for name in ADVANTAGES if name.endswith("KL in the reward")}
for _name in (*_IN_REWARD, "reinforce_pp, turns", "gae", "gae, turns"):
    ADVANTAGES[_name]["kl"] = {"init_kl_coef": 0.3, "placement": "reward", "estimator": "k1"}

LOSSES: dict[str, Any] = {
    "ppo": {"kind": "ppo", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": 3.0},
    "gspo": {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.2},
    "reinforce": "reinforce",
}
AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum_constant"]
CORRECTIONS: list[dict[str, Any] | None] = [
    None,
    {"level": "token", "mode": "mask", "low": 0.8, "high": 1.2},
    {"level": "sequence", "mode": "truncate", "high": 1.05},
    {"level": "geometric", "mode": "mask", "low": 0.95, "high": 1.05},
]


@dataclass(frozen=True)
class Turn:
    """Tokens that the policy sampled, then tokens that the environment wrote."""

    action: tuple[int, ...]
    observation: tuple[int, ...]
    reward: float = 0.0


Episode = tuple[Turn, ...]


def drawn(seed: int, members: Sequence[int] = (3, 2)) -> list[list[Episode]]:
    """Groups of ``members`` episodes of 1 to 4 turns, the first with 4."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(6, 50, (count,), generator=g).tolist())

    def episode(turns: int) -> Episode:
        return tuple(
            Turn(tokens(number(1, 5)), tokens(number(0, 4)), number(-4, 5) / 4)
            for _ in range(turns)
        )

    groups = [[episode(number(1, 5)) for _ in range(n)] for n in members]
    groups[0][0] = episode(4)
    return groups


def rows_of(prompt: tuple[int, ...], episode: Episode, cuts: set[int]) -> list[TokenRow]:
    """A new row begins at every turn in ``cuts``. A row ends with its last sampled token."""
    rows: list[TokenRow] = []
    context, response, turns = prompt, list[int](), list[int]()
    for number, turn in enumerate(episode):
        if number in cuts:
            rows.append(_row(context, response, turns))
            context, response, turns = (*context, *response), [], []
        if number:
            before = episode[number - 1].observation
            if response:
                response, turns = [*response, *before], turns + [-1] * len(before)
            else:
                context = (*context, *before)
        response, turns = [*response, *turn.action], turns + [number] * len(turn.action)
    return [*rows, _row(context, response, turns)]


def _row(context: tuple[int, ...], response: Sequence[int], turns: Sequence[int]) -> TokenRow:
    return TokenRow(
        prompt_ids=context,
        response_ids=tuple(response),
        sampler_logprobs=(0.0,) * len(response),
        action_mask=tuple(turn >= 0 for turn in turns),
        versions=(0,) * len(response),
        turns=tuple(turns),
    )


def groups_of(
    episodes: Sequence[Sequence[Episode]], cuts: Sequence[set[int]], *, turn_rewards: bool
) -> list[Group]:
    """Scored groups: ``cuts`` of every episode in order; rewards are those of the turns and 0.5 for
    every second episode."""
    groups, number = [], 0
    for g, (prompt, members) in enumerate(zip(PROMPTS, episodes, strict=True)):
        samples = []
        for episode in members:
            *earlier, last = rows_of(prompt, episode, cuts[number])
            rewards = tuple(turn.reward for turn in episode)
            samples.append(
                Sample(
                    sample_id=f"s{number}",
                    prompt_id=f"p{g}",
                    group_id=g,
                    **vars(last),
                    text="",
                    finish_reason="stop",
                    reward=sum(rewards) + 0.5 * (number % 2),
                    earlier_rows=tuple(earlier),
                    turn_rewards=rewards if turn_rewards else (),
                )
            )
            number += 1
        groups.append(Group(g, Prompt(f"p{g}", prompt, ""), tuple(samples)))
    return groups


def config_of(advantage: str, **algorithm: Any) -> RLConfig:
    given = ADVANTAGES[advantage] | algorithm
    given.pop("turn_rewards", None)
    made = load_config(
        {
            "job": "rl",
            "max_steps": 1,
            "model": {"scratch": {}},
            "data": {"sources": ["x.jsonl"]},
            "rollout": {
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 3,
                "generate_max_len": 32,
            },
            "algorithm": given,
            "train": {"train_batch_size": 6, "lr": 1e-3},
        }
    )
    assert isinstance(made, RLConfig)
    return made


# ---- one RL step on a real model
# ------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy() -> nn.Module:
    return _uneven(load_causal_lm(MODEL), seed=1)


@pytest.fixture(scope="module")
def critic() -> nn.Module:
    return _uneven(load_scalar_model(MODEL, new_head="random"), seed=2)


def _uneven(model: nn.Module, *, seed: int) -> nn.Module:
    """Weights so large that distributions are far from uniform."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=g))
    return model.eval()


def forward_of(model: nn.Module, role: Any, layout: Any = "packed") -> Forward:
    return Forward(model, role, TrainConfig(lr=1e-3, layout=layout), temperature=1.0)  # type: ignore[arg-type]


def noise(count: int, seed: int, size: float) -> Tensor:
    return size * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def with_columns(batch: Batch, logprobs: Tensor) -> Batch:
    """Columns that are equal for equal tokens of an episode, whatever its rows. ``logprobs`` [A]:
    those of the policy, in the order of time."""
    assert batch.turn_ids is not None
    order = time_order(batch.token_samples, batch.turn_ids, batch.action_mask)

    def put(values: Tensor) -> Tensor:
        return torch.zeros(batch.tokens.numel()).index_copy(0, order, values)

    count = order.numel()
    old = logprobs + noise(count, 3, 0.1)
    return replace(
        batch,
        old_logprobs=put(old),
        sampler_logprobs=put(old + noise(count, 4, 0.1)),
        ref_logprobs=put(old + noise(count, 5, 0.3)),
        values=put(noise(count, 6, 1.0)),
    )


def logprobs_in_time(batch: Batch, model: nn.Module) -> Tensor:
    assert batch.turn_ids is not None
    order = time_order(batch.token_samples, batch.turn_ids, batch.action_mask)
    with torch.no_grad():
        found = forward_of(model, "policy")(batch, with_entropy=False).logprobs
    assert found is not None
    return found[order]


@dataclass(frozen=True)
class Split:
    """Division of an optimizer step into passes."""

    ranks: int = 1
    micro: int | None = None
    max_tokens: int | None = None
    layout: Any = "packed"


def passes(step: Batch, split: Split) -> list[list[int]]:
    parts = split_over_ranks(
        step,
        ranks=split.ranks,
        micro_batch_size=split.micro,
        max_tokens=split.max_tokens,
        layout=split.layout,
    )
    return [rows for part in parts for rows in part if rows]


def gradient(
    model: nn.Module, role: Any, step: Batch, loss: Loss, split: Split
) -> tuple[float, Tensor]:
    """The loss of an optimizer step and its gradient: sums over all passes of all ranks."""
    forward, total = forward_of(model, role, split.layout), 0.0
    model.zero_grad()
    for rows in passes(step, split):
        micro = step.select(rows)
        value, _ = loss(forward(micro, with_entropy=role == "policy"), micro)
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total, torch.cat(found)


def rl_losses(config: RLConfig) -> dict[str, Loss]:
    policy_loss = policy_objective(
        config.algorithm, max_len=config.rollout.generate_max_len, kl_coef=lambda: 0.3
    )
    return {"policy": policy_loss, "critic": value_objective(value_clip=0.2)}


def credited(rows: Batch, config: RLConfig, logprobs: Tensor) -> Batch:
    return assign_advantages(with_columns(rows, logprobs), config.algorithm, kl_coef=0.3)


def close(found: tuple[float, Tensor], wanted: tuple[float, Tensor]) -> None:
    """2e-5 of the largest entry, and 1e-5 of the loss: both are fp32 sums of about 100 tokens in
    another order, of log-probs from another layout. Measured in 1,200 cases: at most 3.0e-6 and
    1.2e-6."""
    size = float(wanted[1].abs().max())
    assert float((found[1] - wanted[1]).abs().max()) <= 2e-5 * size
    assert found[0] == pytest.approx(wanted[0], abs=1e-5)


SPLITS = st.builds(
    Split,
    ranks=st.integers(1, 2),
    micro=st.none() | st.integers(1, 4),
    max_tokens=st.none() | st.integers(1, 120),
    layout=st.sampled_from(["padded", "packed", "shared_prefix"]),
)
CUTS = st.lists(st.sets(st.integers(1, 3)), min_size=5, max_size=5)


def own_cuts(episodes: Sequence[Sequence[Episode]], cuts: Sequence[set[int]]) -> list[set[int]]:
    lengths = [len(episode) for members in episodes for episode in members]
    return [{cut for cut in own if cut < n} for own, n in zip(cuts, lengths, strict=True)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_the_gradient_does_not_depend_on_the_rows_of_an_episode(
    advantage: str, loss: str, policy: nn.Module, critic: nn.Module, data: st.DataObject
) -> None:
    """Joined into one row per episode, in one pass; against any division into rows, any order of
    them, micro-batches, ranks and layouts."""
    config = config_of(
        advantage,
        policy_loss=LOSSES[loss],
        loss_aggregation=data.draw(st.sampled_from(AGGREGATIONS)),
        correction=data.draw(st.sampled_from(CORRECTIONS)),
    )
    episodes = drawn(data.draw(st.integers(0, 20)))
    by_turn = bool(ADVANTAGES[advantage].get("turn_rewards"))
    cuts = own_cuts(episodes, data.draw(CUTS))
    joined = groups_of(episodes, [set()] * 5, turn_rewards=by_turn)
    divided = groups_of(episodes, cuts, turn_rewards=by_turn)

    one, several = (groups_to_batch(groups) for groups in (joined, divided))
    several = several.select(data.draw(st.permutations(range(several.num_rows))))
    assert one.num_rows == 5 and several.num_rows == 5 + sum(map(len, cuts))
    logprobs = logprobs_in_time(one, policy)
    (whole,) = minibatches(credited(one, config, logprobs), config, step=1)
    (step,) = minibatches(credited(several, config, logprobs), config, step=1)
    split = data.draw(SPLITS)
    for role, model in (("policy", policy), ("critic", critic)):
        if role == "critic" and one.returns is None:
            continue
        objective = rl_losses(config)[role]
        close(
            gradient(model, role, step, objective, split),
            gradient(model, role, whole, objective, Split()),
        )


# ---- what a naive count of rows would change
# -------------------------------------------------------


def _with_cuts(cuts: set[int], **algorithm: Any) -> tuple[RLConfig, list[Group]]:
    config, episodes = config_of("grpo", **algorithm), drawn(3)
    all_cuts = own_cuts(episodes, [cuts] + [set()] * 4)
    return config, groups_of(episodes, all_cuts, turn_rewards=False)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum_constant"])
def test_an_episode_of_many_rows_weighs_as_one(aggregation: str, policy: nn.Module) -> None:
    """Counting its 4 rows as samples gives another gradient, by more than a tenth of the largest
    entry, which is 5,000 times the tolerance above."""
    config, groups = _with_cuts({1, 2, 3}, loss_aggregation=aggregation)
    rows = groups_to_batch(groups)
    batch = credited(rows, config, logprobs_in_time(rows, policy))
    naive = replace(batch, sample_ids=None, sample_tokens=None, turn_ids=None)
    naive = assign_advantages(naive, config.algorithm, kl_coef=0.3)
    objective = rl_losses(config)["policy"]
    found = []
    for one in (batch, naive):
        (step,) = minibatches(one, config, step=1)
        found.append(gradient(policy, "policy", step, objective, Split())[1])
    assert float((found[0] - found[1]).abs().max()) > 0.1 * float(found[0].abs().max())


@settings(max_examples=50, deadline=None)
@given(cuts=CUTS, seed=st.integers(0, 20), split=SPLITS, together=st.booleans())
def test_each_sampled_token_is_trained_exactly_once(
    cuts: list[set[int]], seed: int, split: Split, together: bool
) -> None:
    """Tokens as (sample, turn, place in the turn), over all passes of all ranks; and with
    ``samples_together`` no sample is in two passes."""
    episodes = drawn(seed)
    config = config_of("opo", policy_loss=LOSSES["gspo" if together else "ppo"])
    batch = groups_to_batch(groups_of(episodes, own_cuts(episodes, cuts), turn_rewards=False))
    (step,) = minibatches(batch, config, step=1)
    assert step.samples_together == together and step.num_sequences == 5
    trained: Counter[tuple[int, int, int]] = Counter()
    seen: Counter[int] = Counter()
    for rows in passes(step, split):
        micro = step.select(rows)
        assert micro.turn_ids is not None and micro.sample_ids is not None
        seen.update(set(micro.sample_ids.tolist()))
        order = time_order(micro.token_samples, micro.turn_ids, micro.action_mask)
        places: Counter[tuple[int, int]] = Counter()
        pairs = (micro.token_samples[order].tolist(), micro.turn_ids[order].tolist())
        for sample, turn in zip(*pairs, strict=True):
            trained[sample, turn, places[sample, turn]] += 1
            places[sample, turn] += 1
    flat = [episode for members in episodes for episode in members]
    wanted = {
        (s, t, k)
        for s, episode in enumerate(flat)
        for t, turn in enumerate(episode)
        for k in range(len(turn.action))
    }
    assert trained == Counter(dict.fromkeys(wanted, 1))
    assert not together or set(seen.values()) == {1}


# ---- measurements per sample


def test_sample_files_and_metrics_have_one_number_per_episode() -> None:
    """s0 with 4 rows counts once: rewards of 5 samples, and the mean advantage of all tokens."""
    _, groups = _with_cuts({1, 2, 3})
    batch = groups_to_batch(groups)
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([sample.reward for sample in samples])
    assert batch.num_rows == 8
    found = batch_metrics(batch)
    # 1e-6: fp32 statistics of five numbers
    assert found["reward/trained_mean"] == pytest.approx(float(rewards.mean()), rel=1e-6)
    assert found["reward/std"] == pytest.approx(float(rewards.std()), rel=1e-6)

    assert batch.sample_ids is not None
    tokens = torch.arange(float(batch.tokens.numel()))
    by_sample = advantage_by_sample(groups, replace(batch, advantages=tokens))
    assert list(by_sample) == [sample.sample_id for sample in samples]
    of_first = tokens[batch.action_mask & (batch.token_samples == 0)]
    assert by_sample["s0"] == pytest.approx(float(of_first.mean()), rel=1e-6)  # as above


def test_rewards_of_turns_are_a_signal_where_totals_are_equal() -> None:
    """For returns per token; a group's baseline uses the totals alone."""
    groups = groups_of(drawn(3), [set()] * 5, turn_rewards=True)
    groups = [
        replace(group, samples=tuple(replace(s, reward=1.0) for s in group.samples))
        for group in groups
    ]
    by_advantage = {
        name: reward_signal(groups, config_of(name).algorithm, NoRewards())
        for name in ("grpo", "reinforce_pp", "gae")
    }
    fracs = {name: found.frac for name, found in by_advantage.items() if found is not None}
    assert fracs == {"grpo": 1.0, "reinforce_pp": 0.0, "gae": 0.0}


def test_episodes_with_the_same_last_message_are_not_identical() -> None:
    groups = groups_of(
        [[episode[:1]] * 2 for episode, *_ in drawn(3)], [set()] * 4, turn_rewards=False
    )
    other = groups_of([episodes[:2] for episodes in drawn(3)], [set()] * 4, turn_rewards=False)
    for scored, cause in ((groups, "are identical"), (other, "every response in them has")):
        same = [
            replace(
                group,
                samples=tuple(
                    replace(s, reward=1.0, episode=Record("done", ())) for s in group.samples
                ),
            )
            for group in scored
        ]
        found = reward_signal(same, config_of("grpo").algorithm, NoRewards())
        assert found is not None and cause in found.why


def test_a_loss_over_samples_refuses_rows_that_may_have_been_separated(policy: nn.Module) -> None:
    config, groups = _with_cuts({1}, policy_loss=LOSSES["gspo"])
    rows = groups_to_batch(groups)
    batch = credited(rows, config, logprobs_in_time(rows, policy))
    outputs = forward_of(policy, "policy")(batch, with_entropy=True)
    with pytest.raises(AssertionError, match="a sample may have been split"):
        rl_losses(config)["policy"](outputs, batch)
