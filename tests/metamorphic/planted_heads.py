"""Mistakes that the relations of heads and ends find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import burnish.checkpoint.export as export_module
import burnish.models.tied_ends as tied_ends
import burnish.models.value_head as value_head
import burnish.special_tokens as special

Patch = pytest.MonkeyPatch


def only_named_tokens_end_a_turn(patch: Patch) -> None:
    """Added special tokens without a name do not end a response."""
    own = special.turn_end_ids

    def named(tokenizer: Any) -> frozenset[int]:
        return own(tokenizer) & set(tokenizer.all_special_ids)

    patch.setattr("burnish.models.end_tokens.turn_end_ids", named)


def heads_are_exported_rounded(patch: Patch) -> None:
    """The head of an exported reward model is rounded to bf16."""
    own = export_module._weights

    def rounded(*arguments: Any) -> dict[str, Any]:
        tensors = own(*arguments)
        tensors["score.weight"] = tensors["score.weight"].bfloat16().float()
        return tensors

    patch.setattr(export_module, "_weights", rounded)


def ends_that_the_config_ties_are_equal(patch: Patch) -> None:
    """The stored ends of a model whose config ties them are not compared."""
    patch.setattr(tied_ends, "_equal", lambda *_: True)


def tensors_that_are_not_read_are_ignored(patch: Patch) -> None:
    """A folder's tensors outside of its body are not looked at."""
    patch.setattr(value_head, "_check_no_head", lambda *_: None)


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "trained_end_is_a_stop": (only_named_tokens_end_a_turn, tuple(range(24))),
    "ends_of_a_folder": (ends_that_the_config_ties_are_equal, tuple(range(30))),
    "heads_of_other_forms": (tensors_that_are_not_read_are_ignored, (0, 1)),
    "exported_reward_model": (heads_are_exported_rounded, (0, 1, 2, 3)),
}
