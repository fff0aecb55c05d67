"""Mistakes for the relations of episodes of one turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import burnish.data.selection as selection
from burnish.data import decoding, episode_rows, rows
from burnish.types import Sample

Patch = pytest.MonkeyPatch


def the_status_is_the_end_of_the_response(patch: Patch) -> None:
    """The last response of every episode counts as cut."""
    patch.setattr(Sample, "is_cut", property(lambda sample: sample.episode is not None))


def rows_of_episodes_have_no_end(patch: Patch) -> None:
    """The rows of episodes do not say how the response ended."""
    own = selection.conversation_columns
    patch.setattr(
        selection, "conversation_columns", lambda *of: own(*of) | {"finish_reason": "stop"}
    )


def texts_have_no_special_tokens(patch: Patch) -> None:
    """The text of a response lacks its tags of reasoning, if they are special tokens."""
    patch.setattr(decoding, "_without_tags", lambda tokenizer: None)


def texts_have_no_channels(patch: Patch) -> None:
    """The text of a response lacks the tokens of its channels."""
    patch.setattr(decoding, "writes_channels", lambda tokenizer: False)


def reward_models_learn_sampled_ids(patch: Patch) -> None:
    """A reward model is trained on all sampled ids, as a policy."""
    patch.setattr(rows, "RewardData", type(None))


def edits_of_messages_are_not_seen(patch: Patch) -> None:
    """The tokens of a row count as those of any messages."""
    patch.setattr(episode_rows, "_digest", lambda messages, tools: "")


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "one_turn_is_a_single_response": (the_status_is_the_end_of_the_response, tuple(range(12))),
    "one_turn_is_a_row_of_a_response": (rows_of_episodes_have_no_end, tuple(range(24))),
    "a_reward_model_learns_what_it_reads": (reward_models_learn_sampled_ids, tuple(range(24))),
    "tokens_follow_messages_and_settings": (edits_of_messages_are_not_seen, tuple(range(24))),
    "every_part_of_an_answer_is_trained_once": (texts_have_no_channels, (222, 279, 285)),
    "answers_follow_their_reasoning": (texts_have_no_special_tokens, tuple(range(8))),
}
