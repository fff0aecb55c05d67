"""Advantages of a million tokens on one core: from rewards to whitened token advantages.

    python benchmarks/advantages.py [--tokens 1048576] [--rounds 15]

For three shapes (many short responses, few very long ones), without gaps and with gaps in the mask
(multi-turn): token rewards with a KL penalty, GAE or return-to-go, whitening; and the group
baselines. CPU milliseconds of this process (user and system), median and best of the rounds, one
thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import markdown_table, versions
from torch import Tensor

from burnish.algorithms.advantages import gae, grpo, return_to_go, rloo, token_rewards
from burnish.tensors import whiten

SAMPLES = 8


def measure(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median and least CPU milliseconds of a call."""
    work()
    spent = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        spent.append(1e3 * (time.process_time() - begin))
    return statistics.median(spent), min(spent)


def cases(rows: int, length: int, gaps: bool) -> dict[str, Callable[[], object]]:
    """Return the measured functions, on random rewards of ``rows`` responses of at most ``length``
    tokens."""
    g = torch.Generator().manual_seed(0)
    values, kl = torch.randn(2, rows, length, generator=g)
    scores = torch.randn(rows, generator=g)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=g)
    mask = torch.arange(length) < lengths
    if gaps:
        mask &= torch.arange(length) % 16 < 12
    ids = torch.arange(rows) // SAMPLES

    def spread(per_row: Tensor) -> Tensor:
        return torch.where(mask, per_row[:, None], 0.0)

    def ppo() -> Tensor:
        rewards = token_rewards(scores, mask, kl, 0.01)
        advantages, _ = gae(rewards, values, mask, gamma=0.99, lam=0.95)
        return whiten(advantages, mask)

    def reinforce_pp() -> Tensor:
        rewards = token_rewards(scores, mask, kl, 0.01)
        return whiten(return_to_go(rewards, mask, gamma=0.99), mask)

    return {
        "gae alone": lambda: gae(values, kl, mask, gamma=0.99, lam=0.95),
        "PPO: token rewards, gae, whitening": ppo,
        "REINFORCE++: token rewards, return-to-go, whitening": reinforce_pp,
        "grpo, spread over tokens": lambda: spread(grpo(scores, ids)),
        "rloo, spread over tokens": lambda: spread(rloo(scores, ids)),
    }


def main() -> None:
    """Parse, measure, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    heads = ["CPU ms, median (best)"]
    for length in (128, 1024, 16384):
        for gaps in (False, True):
            rows = args.tokens // length
            heads.append(f"{rows} x {length}" + (", gaps" if gaps else ""))
            for name, work in cases(rows, length, gaps).items():
                median, best = measure(work, args.rounds)
                found.setdefault(name, []).append(f"{median:.1f} ({best:.1f})")
    print(versions("torch"))
    print("\n".join(markdown_table(heads, [[name, *cells] for name, cells in found.items()])))


if __name__ == "__main__":
    main()
