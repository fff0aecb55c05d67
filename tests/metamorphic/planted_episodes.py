"""Mistakes for the relations of episodes."""

from __future__ import annotations

from typing import Any

import pytest

import burnish.agents.session as session
import burnish.environments.results as results
import burnish.episodes.parsing as parsing
import burnish.episodes.renderer as renderer
import burnish.rollout.sample_state as sample_state
from burnish.episodes.template import ChatTemplate
from burnish.jobs.evaluate import Evaluator
from burnish.transcript import Episode

Patch = pytest.MonkeyPatch


def calls_are_in_the_order_of_their_end(patch: Patch) -> None:
    """Turns are in the order in which the replies were sampled."""
    patch.setattr(session, "sorted", list, raising=False)


def records_are_rebuilt_from_pairs(patch: Patch) -> None:
    """Counts are stored as the numbers of their pairs."""
    own = sample_state.episode_to_plain

    def stored(episode: Any) -> dict[str, Any]:
        state = own(episode)
        turns = [{**t, "counts": dict.fromkeys(t["counts"], 1)} for t in state["turns"]]
        return {**state, "turns": turns}

    patch.setattr(sample_state, "episode_to_plain", stored)


def tools_are_those_of_the_first_call(patch: Patch) -> None:
    """An episode has the tools of its first call."""
    patch.setattr(Episode, "tools_of", lambda episode, number: episode.tools)


def failed_episodes_are_left_out(patch: Patch) -> None:
    """The numbers of an evaluation are those of the prompts with a score."""
    own = Evaluator._measured

    def measured(self: Any, step: int, name: str, prompts: Any) -> Any:
        scored = {group.prompt.id for group in self.runner.run(prompts).groups}
        self.runner.scores = [
            row
            for prompt, row in zip(prompts, self.runner.scores, strict=True)
            if prompt.id in scored
        ]
        return own(self, step, name, [p for p in prompts if p.id in scored])

    patch.setattr(Evaluator, "_measured", measured)


def objects_are_written_by_their_address(patch: Patch) -> None:
    """An object without a text has that of Python."""
    patch.setattr(results, "_own_text", repr)


def tags_open_reasoning_anywhere(patch: Patch) -> None:
    """A tag in an answer begins reasoning again."""
    patch.setattr(parsing, "REASONING_TAGS", ())


def a_new_message_may_be_anywhere(patch: Patch) -> None:
    """A text counts as rendered wherever the template writes it."""
    patch.setattr(ChatTemplate, "_check_places", lambda *_: None)


def every_marker_is_a_format(patch: Patch) -> None:
    """The format of a marker is taken without reading a call back."""
    patch.setattr(renderer, "reads_rendered_call", lambda *_: True)


def new_messages_stand_behind_a_question(patch: Patch) -> None:
    """Text behind a turn is rendered behind a short question in place of the conversation."""
    patch.setattr(ChatTemplate, "_behind", lambda *_, after, **__: after)


PLANTED = {
    "prompts_end_as_complete_renderings": (
        new_messages_stand_behind_a_question,
        tuple(range(12)),
    ),
    "calls_in_any_order": (calls_are_in_the_order_of_their_end, tuple(range(12))),
    "episodes_in_a_checkpoint": (records_are_rebuilt_from_pairs, tuple(range(24))),
    "rows_of_agents_are_what_the_policy_read": (
        tools_are_those_of_the_first_call,
        tuple(range(12)),
    ),
    "failures_are_not_passed": (failed_episodes_are_left_out, tuple(range(12))),
    "tool_results_have_one_text": (objects_are_written_by_their_address, tuple(range(24))),
    "rendered_answers_are_read_back": (tags_open_reasoning_anywhere, tuple(range(12))),
    "offered_tools_have_calls_that_are_read": (every_marker_is_a_format, tuple(range(24))),
    "new_messages_are_in_the_next_prompt": (a_new_message_may_be_anywhere, tuple(range(12))),
}
