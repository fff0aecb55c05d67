"""Cost of batch invariance on a CPU: user-CPU seconds of ``engine.generate``, on against off.

    python benchmarks/batch_invariance.py [--rounds 9] [--only WORDS]

Two engines on one model made from scratch, in fp32 on one thread, take turns in one process. All
requests are submitted at once, and each runs to its length. The ratio is the median of the ratios
of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass
from typing import Any

from common import cpu_seconds, markdown_table, versions


@dataclass(frozen=True)
class Case:
    """Sizes of a model and of a rollout."""

    hidden: int
    heads: int
    kv_heads: int
    prompts: int
    samples: int
    prompt_tokens: int
    """Longest prompt; the shortest has half as many tokens."""
    max_new: int
    """Most new tokens of a sample; the fewest are an eighth of it."""

    def __str__(self) -> str:
        return (
            f"width {self.hidden}, {self.heads} / {self.kv_heads} heads: {self.prompts} x "
            f"{self.samples}, prompts of {self.prompt_tokens}, up to {self.max_new} new tokens"
        )


CASES = (
    Case(64, 4, 2, 32, 8, 40, 32),
    Case(64, 4, 2, 8, 8, 16, 96),
    Case(64, 4, 2, 1, 1, 64, 96),
    Case(64, 4, 2, 32, 1, 400, 8),
    Case(256, 4, 2, 32, 8, 40, 32),
    Case(256, 4, 2, 8, 8, 100, 96),
    Case(256, 8, 8, 8, 8, 40, 64),
    Case(576, 9, 3, 4, 8, 100, 48),
)


def engines_for(case: Case) -> dict[str, Any]:
    """Return an engine with batch invariance and one without, on the same weights."""
    from burnish.config.model import ModelConfig, ScratchConfig
    from burnish.models.load import load_causal_lm, load_tokenizer
    from burnish.rollout.local.config import LocalEngine
    from burnish.rollout.local.engine import LocalRolloutEngine

    scratch = ScratchConfig(
        hidden_size=case.hidden,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        max_position_embeddings=1024,
    )
    config = ModelConfig(scratch=scratch)
    model, tokenizer = load_causal_lm(config, dtype="fp32"), load_tokenizer(config)
    made = {}
    for name, flag in (("on", True), ("off", False)):
        engine = LocalRolloutEngine(model, tokenizer, LocalEngine(batch_invariant=flag))
        engine._end_tokens = set()  # each sample runs to its length
        made[name] = engine
    return made


def requests_for(case: Case) -> list[Any]:
    """Return one request per prompt, with random lengths of the prompt and of its samples."""
    from burnish.rollout.base import Request

    draw = random.Random(0)
    return [
        Request(
            str(i),
            tuple(draw.randrange(6, 50) for _ in range(draw.randint(*_range(case.prompt_tokens)))),
            case.samples,
            i,
            draw.randint(max(1, case.max_new // 8), case.max_new),
        )
        for i in range(case.prompts)
    ]


def _range(most: int) -> tuple[int, int]:
    return max(1, most // 2), most


def measure(case: Case, rounds: int) -> tuple[float, float, float]:
    """Return the median user-CPU seconds with and without, and the median ratio."""
    from burnish.rollout.base import Sampling

    engines, requests = engines_for(case), requests_for(case)
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(rounds + 1):
        for name in sorted(engines, reverse=bool(i % 2)):
            begin = cpu_seconds()
            tokens = sum(
                len(c.token_ids) for c in engines[name].generate(requests, Sampling(case.max_new))
            )
            assert tokens
            if i:  # the first round warms up
                spent[name].append(cpu_seconds() - begin)
    ratios = [a / b for a, b in zip(spent["on"], spent["off"], strict=True)]
    return (
        statistics.median(spent["on"]),
        statistics.median(spent["off"]),
        statistics.median(ratios),
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if args.only in str(case):
            on, off, ratio = measure(case, args.rounds)
            rows.append([str(case), f"{on:.3f}", f"{off:.3f}", f"{ratio:.3f}"])
            print(rows[-1], flush=True)
    print(versions("torch", "transformers"))
    print(*markdown_table(["user-CPU s", "on", "off", "ratio"], rows), sep="\n")


if __name__ == "__main__":
    main()
