"""Mistakes for the relations of rewards."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from metamorphic import relations_rewards
from metamorphic.base import CLOSERS

import burnish.rewards.math.reward as math_reward
import burnish.rewards.math.text as math_text
import burnish.rewards.python_code.reward as python_code
from burnish.config.rewards import FailurePolicy
from burnish.jobs import rl
from burnish.rewards.model import rows
from burnish.rewards.model.rows import SampledRows
from burnish.rewards.reward_set import RewardSet

Patch = pytest.MonkeyPatch


def bases_are_ignored(patch: Patch) -> None:
    """The subscript of a number is no part of it."""
    patch.setattr(math_text, "quantities_equal", lambda a, b: a.digits == b.digits)


def the_first_block_is_the_code(patch: Patch) -> None:
    """The code is taken from the first block, also of the thoughts."""
    patch.setattr(python_code, "read_code", lambda text, _: text.split("```")[1].partition("\n")[2])


def errors_have_no_attributes(patch: Patch) -> None:
    """The judge gives the tests errors without their arguments."""
    _change_judge(patch, "error.args = arguments\n", "pass\n")


def changes_stay_on_their_side(patch: Patch) -> None:
    """The judge copies containers, and sends no change of them."""
    _change_judge(patch, "changed = block.changed()\n", "changed = []\n")


def _change_judge(patch: Patch, line: str, other: str) -> None:
    """Replace a line of the judge."""
    source = python_code._JUDGE.read_text(encoding="utf-8")
    assert line in source
    folder = Path(tempfile.mkdtemp(prefix="metamorphic-"))
    CLOSERS.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    judge = folder / "judge.py"
    judge.write_text(source.replace(line, other), encoding="utf-8")
    patch.setattr(python_code, "_JUDGE", judge)


def boxes_are_searched_from_every_place(patch: Patch) -> None:
    """Each position of the text is searched to its end."""
    own = math_text._last_boxes

    def boxes(text: str) -> Any:
        sum(text[place:].count(mark) for place in range(len(text)) for mark in "}{\\$#")
        return own(text)

    patch.setattr(math_text, "_last_boxes", boxes)
    patch.setattr(relations_rewards, "CPU_S", 0.2)


def every_label_is_usable(patch: Patch) -> None:
    """The check of the data accepts all labels."""
    patch.setattr(math_reward, "check_label", lambda prompt: None)


def failures_always_drop_their_group(patch: Patch) -> None:
    """A run whose policy is to fail continues."""
    own = RewardSet.__init__

    def init(self: RewardSet, rewards: Any, **options: Any) -> None:
        own(self, rewards, **options | {"on_failure": FailurePolicy(then="drop_group")})

    patch.setattr(RewardSet, "__init__", init)


def sampled_ids_are_always_read(patch: Patch) -> None:
    """With the same tokens and template, no row is rendered."""
    patch.setattr(SampledRows, "_is_as_sampled", lambda self, item: True)


def formulas_have_no_sign(patch: Patch) -> None:
    """A sign in words before a formula is left out."""
    own = math_text.with_signs
    patch.setattr(math_text, "with_signs", lambda text: text if "$" in text else own(text))


def plain_sums_decide(patch: Patch) -> None:
    """The filter compares the sums of scores that are not normalized."""
    own = rl.GroupFilter
    patch.setattr(rl, "GroupFilter", lambda config, each_reward: own(config))


def short_names_are_products(patch: Patch) -> None:
    """A label of three letters is a product."""
    patch.setattr(math_text, "_is_word", lambda letters: False)


def every_classifier_is_an_export(patch: Patch) -> None:
    """Rows end at the end token of the answer."""
    patch.setattr(rows, "_to_last_token", lambda encode, *_: encode)


PLANTED = {
    "published_classifiers_read_the_rendering": (every_classifier_is_an_export, tuple(range(24))),
    "names_are_their_letters_in_order": (short_names_are_products, tuple(range(12))),
    "marks_around_numbers_are_no_part_of_them": (formulas_have_no_sign, tuple(range(60))),
    "groups_that_differ_in_training_are_kept": (plain_sums_decide, tuple(range(60))),
    "numbers_are_their_values": (bases_are_ignored, tuple(range(12))),
    "code_surroundings": (the_first_block_is_the_code, tuple(range(12))),
    "code_passes_as_in_python": (errors_have_no_attributes, tuple(range(60))),
    "shared_data_is_as_in_python": (changes_stay_on_their_side, tuple(range(12))),
    "answers_are_found_in_bounded_time": (boxes_are_searched_from_every_place, (0, 1)),
    "labels_are_refused_before_the_run": (every_label_is_usable, tuple(range(12))),
    "failures_follow_their_policy": (failures_always_drop_their_group, tuple(range(12))),
    "model_rewards_read_trained_rows": (sampled_ids_are_always_read, tuple(range(24))),
}
