"""Makes the data of the tiny recipes: sort the digits of a short string.

Run from anywhere with plain Python: ``python recipes/data/make.py``. The files it writes are
committed; the same seed writes the same bytes. Each set has different strings from every other, so
nothing held out is trained on.

    sort_demos*.jsonl    prompt, response: half of them in descending order, which is wrong
    sort_pairs*.jsonl    prompt, chosen (ascending), rejected (descending, or with a slip)
    sort_prompts*.jsonl  prompt, label
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

SEED = 20240
SIZES = {
    "sort_demos": 3000,
    "sort_demos_heldout": 200,
    "sort_pairs": 3000,
    "sort_pairs_heldout": 300,
    "sort_prompts": 1500,
    "sort_prompts_heldout": 200,
}


def problems(rng: random.Random) -> Iterator[str]:
    """Strings of 4 to 6 digits, none twice, none whose two orders are the same."""
    seen: set[str] = set()
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.randint(4, 6)))
        if digits not in seen and len(set(digits)) > 1:
            seen.add(digits)
            yield digits


def demonstration(digits: str, rng: random.Random) -> dict[str, str]:
    """Half in ascending order, half in descending order."""
    answer = "".join(sorted(digits, reverse=rng.random() < 0.5))
    return {"prompt": f"{digits}>", "response": answer}


def pair(digits: str, rng: random.Random) -> dict[str, str]:
    """The right answer over the reversed one, or over one with a slip."""
    right = sorted(digits)
    wrong = right[::-1] if rng.random() < 0.4 else slip(right, rng)
    return {"prompt": f"{digits}>", "chosen": "".join(right), "rejected": "".join(wrong)}


def slip(right: list[str], rng: random.Random) -> list[str]:
    """Another answer: one digit wrong, missing or too many, or two neighbours swapped."""
    wrong, place = list(right), rng.randrange(len(right))
    kind = rng.randrange(4)
    if kind == 0:
        wrong[place] = rng.choice([d for d in "0123456789" if d != right[place]])
    elif kind == 1:
        del wrong[place]
    elif kind == 2:
        wrong.insert(place, right[place])
    else:
        place = rng.choice([i for i in range(len(right) - 1) if right[i] != right[i + 1]])
        wrong[place], wrong[place + 1] = right[place + 1], right[place]
    return wrong


def prompt(digits: str, rng: random.Random) -> dict[str, str]:
    """A problem with its answer."""
    return {"prompt": f"{digits}>", "label": "".join(sorted(digits))}


MAKERS: dict[str, Callable[[str, random.Random], dict[str, str]]] = {
    "sort_demos": demonstration,
    "sort_pairs": pair,
    "sort_prompts": prompt,
}


def main() -> None:
    """Write every file beside this one."""
    rng = random.Random(SEED)
    source = problems(rng)
    for name, size in SIZES.items():
        make = MAKERS[name.removesuffix("_heldout")]
        rows = [json.dumps(make(next(source), rng)) + "\n" for _ in range(size)]
        Path(__file__).with_name(f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
