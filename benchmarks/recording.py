"""Measure the size and the time of a recorded rollout (``observe.record_rollouts``).

    python benchmarks/recording.py --prompts 128 --samples 8 --prompt-tokens 200 --tokens 1000

writes one step of random tokens, and prints its bytes by part and the seconds to write and to read
it. Texts have four characters per token.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from burnish.driver.records import RecordedRollout, read_rollout, write_rollout
from burnish.rollout.runner import Rollout
from burnish.types import Group, Prompt, Sample, Stats


def group(number: int, size: int, prompt_tokens: int, tokens: int) -> Group:
    """Return a group of random tokens and fp32 log-probs."""
    name, draw = f"rows:{number}@0", random.Random(number)
    prompt = Prompt(
        name,
        tuple(draw.choices(range(150_000), k=prompt_tokens)),
        "word" * prompt_tokens,
        label="42",
        source="rows",
    )
    samples = [
        Sample(
            f"{name}/{k}",
            name,
            number,
            prompt.token_ids,
            tuple(draw.choices(range(150_000), k=tokens)),
            tuple(-draw.randrange(1 << 20) / (1 << 16) for _ in range(tokens)),
            (True,) * tokens,
            (number % 3,) * tokens,
            "word" * tokens,
            "stop",
            reward=draw.random(),
            reward_parts={"right": draw.random()},
        )
        for k in range(size)
    ]
    return Group(number, prompt, tuple(samples))


def main() -> None:
    """Write, read and measure one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    groups = tuple(
        group(i, args.samples, args.prompt_tokens, args.tokens) for i in range(args.prompts)
    )
    recorded = RecordedRollout(Rollout(groups, Stats(), ages={0: 2, 1: 1, 2: 0}), {})
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        written = write_rollout(Path(folder), 1, recorded, {})
        wrote = time.perf_counter()
        read_rollout(Path(folder), 1)
        read = time.perf_counter()
        parts = {path.name: path.stat().st_size for path in sorted(written.iterdir())}
        tensors = load_file(written / "groups.safetensors")
        arrays = {name: tensor.nbytes for name, tensor in sorted(tensors.items())}
    num_samples = args.prompts * args.samples
    found = {
        "files": parts,
        "arrays": arrays,
        "bytes_per_response_token": round(sum(parts.values()) / num_samples / args.tokens, 2),
        "write_s": round(wrote - began, 2),
        "read_s": round(read - wrote, 2),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
