"""End-to-end PPO on a problem whose optimum is known by hand: its advantages, its policy loss, its
value loss and its denominators have to work together, or the policy ends elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.algorithms.advantages import gae, return_to_go
from burnish.algorithms.policy_losses import ppo
from burnish.algorithms.reduce import reduce
from burnish.algorithms.value_losses import clipped_value_loss
from burnish.tensors import whiten

REWARDS = torch.tensor([[0.5, 0.0], [0.0, 1.0]])
"""[state, action]. Action a leads to state a. Staying in state 0 pays 0.5 at once; moving to state
1 pays nothing, and staying there 1 a step."""
STEPS, GAMMA, LAM = 4, 0.9, 0.8
OPTIMUM = GAMMA + GAMMA**2 + GAMMA**3
"""From state 0 with 4 steps: move (0), then stay three times: 0.9 + 0.81 + 0.729 = 2.439. Staying
in state 0 gives 0.5 (1 + 0.9 + 0.81 + 0.729) = 1.7195, moving a step later 0.5 + 1.539 = 2.039."""


def play(logits: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions and rewards [rows, STEPS] of the policy ``logits`` [STEPS, state, action]."""
    state = torch.zeros(rows, dtype=torch.int64)
    states, actions = [], []
    for t in range(STEPS):
        probabilities = logits[t].softmax(-1)[state]
        action = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        states.append(state)
        actions.append(action)
        state = action
    s, a = torch.stack(states, 1), torch.stack(actions, 1)
    return s, a, REWARDS[s, a]


def with_gaps(x: Tensor) -> Tensor:
    """A turn in two, with two tokens of a tool between steps 1 and 2: [rows, STEPS + 2]."""
    gap = torch.full((len(x), 2), 7, dtype=x.dtype)
    return torch.cat([x[:, :2], gap, x[:, 2:]], 1)


@pytest.mark.parametrize("gaps", [False, True], ids=["one turn", "two turns"])
def test_ppo_finds_the_optimum_of_a_two_state_problem(gaps: bool) -> None:
    """The greedy policy moves to state 1 and stays: return 2.439. The critic converges to the
    remaining return: at the first step in state 0 OPTIMUM, at the last step in state 1 its reward
    of 1."""
    spread = with_gaps if gaps else (lambda x: x)
    logits = torch.zeros(STEPS, 2, 2, requires_grad=True)
    values = torch.zeros(STEPS, 2, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    generator, rows, time = torch.Generator().manual_seed(0), 64, torch.arange(STEPS)
    mask = spread(torch.ones(rows, STEPS)) == 1
    counts = {"num_tokens": rows * STEPS, "num_sequences": rows}
    for _ in range(60):
        s, a, r = play(logits.detach(), generator, rows)

        def now(s: Tensor = s, a: Tensor = a) -> tuple[Tensor, Tensor]:
            logprobs = logits.log_softmax(-1)[time, s, a]
            return spread(logprobs), spread(values[time, s])

        old_logprobs, old_values = (x.detach() for x in now())
        advantages, returns = gae(spread(r), old_values, mask, gamma=GAMMA, lam=LAM)
        advantages = whiten(advantages, mask)
        for _ in range(4):
            logprobs, guessed = now()
            policy, _ = ppo(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
            critic, _ = clipped_value_loss(guessed, old_values, returns, mask, value_clip=0.5)
            loss = reduce(policy + critic, mask, aggregation="token_mean", **counts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    s, a, r = play(1e6 * logits.detach(), generator, 1)  # greedy
    # 1e-6: fp32
    assert return_to_go(r, r > -1, gamma=GAMMA)[0, 0].item() == pytest.approx(OPTIMUM, abs=1e-6)
    assert s.tolist() == [[0, 1, 1, 1]] and a.tolist() == [[1, 1, 1, 1]]
    assert logits.softmax(-1)[0, 0, 1].item() > 0.9
    # 0.1: the policy that the critic follows is not greedy yet, and Adam's steps are of 0.1
    assert values[0, 0].item() == pytest.approx(OPTIMUM, abs=0.1)
    assert values[-1, 1].item() == pytest.approx(1.0, abs=0.1)
