"""Makes the data of the tiny recipes: sort the digits of a short string.

Run from anywhere with plain Python: ``python recipes/data/make.py``. The files it writes are
committed; the same seed writes the same bytes. Each set has different strings from every other, so
nothing held out is trained on.

    sort_demos*.jsonl    prompt, response: half of them in descending order, which is wrong
    sort_pairs*.jsonl    prompt, chosen (ascending), rejected (descending, or with a slip)
    sort_prompts*.jsonl  prompt, label
    sort_scores*.jsonl   prompt, response, order (share of neighbors in order), digits (share of
                         the digits that the response has), correct
    sort_steps*.jsonl    prompt, completions, labels: insertion sort, one digit more in every
                         step; from a slip on every step is wrong. In sort_steps_soft a label
                         is the share of 8 attempts that get to the right answer from there (drawn:
                         0.9 each from a right step, 0.05 from a wrong one)
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

SEED = 20240
SIZES = {
    "sort_demos": 3000,
    "sort_demos_heldout": 200,
    "sort_pairs": 3000,
    "sort_pairs_heldout": 300,
    "sort_prompts": 1500,
    "sort_prompts_heldout": 200,
    "sort_steps": 2000,
    "sort_steps_heldout": 200,
    "sort_steps_soft": 2000,
    "sort_scores": 2000,
    "sort_scores_heldout": 200,
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


def steps(digits: str, rng: random.Random) -> dict[str, object]:
    """Insertion sort, in two of three rows with one slip; a label for every step."""
    slipped = rng.randrange(len(digits)) if rng.random() < 2 / 3 else len(digits)
    done: list[str] = []
    written, labels = [], []
    for k, digit in enumerate(digits):
        done = sorted([*done, digit]) if k < slipped else insert(done, digit)
        if k == slipped:
            done = slip(done, rng) if len(set(done)) > 1 else [*done, rng.choice("0123456789")]
        written.append("".join(done))
        labels.append(k < slipped)
    return {"prompt": f"{digits}>", "completions": written, "labels": labels}


def insert(done: list[str], digit: str) -> list[str]:
    """``done``, sorted or not, with the digit in front of the first larger one."""
    place = next((i for i, other in enumerate(done) if other > digit), len(done))
    return [*done[:place], digit, *done[place:]]


def soft_steps(digits: str, rng: random.Random) -> dict[str, object]:
    """The same with shares of 8 attempts for labels."""
    row = steps(digits, rng)
    hard = row["labels"]
    assert isinstance(hard, list)
    share = [sum(rng.random() < (0.9 if label else 0.05) for _ in range(8)) / 8 for label in hard]
    return {**row, "labels": share}


def scores(digits: str, rng: random.Random) -> dict[str, object]:
    """Half of the answers right; the others shuffled, or with up to three slips."""
    right = sorted(digits)
    answer, kind = list(right), rng.randrange(4)
    if kind == 2:
        rng.shuffle(answer)
    elif kind == 3:
        for _ in range(rng.randint(1, 3)):
            if len(set(answer)) > 1:
                answer = slip(answer, rng)
    neighbors = list(pairwise(answer))
    order = sum(a <= b for a, b in neighbors) / len(neighbors) if neighbors else 1.0
    kept = sum(min(answer.count(d), right.count(d)) for d in set(right)) / len(right)
    rated = {"order": round(order, 3), "digits": round(kept, 3), "correct": answer == right}
    return {"prompt": f"{digits}>", "response": "".join(answer), **rated}


MAKERS: dict[str, Callable[[str, random.Random], Mapping[str, object]]] = {
    "sort_demos": demonstration,
    "sort_pairs": pair,
    "sort_prompts": prompt,
    "sort_steps": steps,
    "sort_steps_soft": soft_steps,
    "sort_scores": scores,
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
