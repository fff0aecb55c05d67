"""Makes the data of the calculator recipes: sums of two numbers of four digits.

Run from anywhere with plain Python: ``python recipes/data/make_sums.py``. The files it writes are
committed; the same seed writes the same bytes. No sum is in two files.

    sum_demos.jsonl            messages, tools: a call of the tool, its result and the answer
    sum_prompts.jsonl          prompt, label
    sum_prompts_heldout.jsonl  prompt, label
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

SEED = 20261123
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute a sum, difference or product.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def sums(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Pairs of numbers, none twice."""
    seen: set[tuple[int, int]] = set()
    while True:
        pair = rng.randint(1000, 9999), rng.randint(1000, 9999)
        if pair not in seen:
            seen.add(pair)
            yield pair


def demo(a: int, b: int) -> dict[str, object]:
    """A conversation in which the policy calls the tool and repeats its result."""
    function = {"name": "calculate", "arguments": {"expression": f"{a} + {b}"}}
    call = {"id": "call_1", "type": "function", "function": function}
    result = str(a + b)
    messages = [
        {"role": "user", "content": f"{a} + {b} = ?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
        {"role": "assistant", "content": result},
    ]
    return {"messages": messages, "tools": [TOOL]}


def prompt(a: int, b: int) -> dict[str, object]:
    """A sum with its value."""
    return {"prompt": f"{a} + {b} = ?", "label": str(a + b)}


FILES = {
    "sum_demos": (32, demo),
    "sum_prompts": (500, prompt),
    "sum_prompts_heldout": (50, prompt),
}


def main() -> None:
    """Write every file next to this one."""
    source = sums(random.Random(SEED))
    for name, (size, make) in FILES.items():
        rows = [json.dumps(make(*next(source))) + "\n" for _ in range(size)]
        Path(__file__).with_name(f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
