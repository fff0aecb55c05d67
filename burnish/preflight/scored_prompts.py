"""Prompts that the chat template of a reward model rejects, such as a system message: found before
the run, which would fail at the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from burnish.config import JobConfig
from burnish.config.model import ModelConfig
from burnish.models.load import ModelError, load_tokenizer
from burnish.rewards.model.rows import prompt_problem
from burnish.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scorers = tuple[tuple[str, ModelConfig], ...]
"""(name of a reward, its model)."""
_MOST_FORMS = 256


def scorers_of(config: JobConfig) -> Scorers:
    """Return the reward models of a job that render its prompts. Empty if the run drops the groups
    of failed rewards, and with episodes, which may begin with other messages."""
    scoring = config.scoring
    if scoring.on_failure.then == "drop_group" or scoring.in_episodes:
        return ()
    rewards = enumerate(scoring.rewards)
    names = [entry.name or f"rewards.{i}" for i, entry in rewards if entry.kind == "model"]
    roles = config.resolve().train_roles  # in the order of the rewards
    models = [role.model for role in roles if role.kind == "reward" and not role.trainable]
    return tuple(zip(names, models, strict=False))


class ScoredPrompts:
    """The check of prompts: of those with the same roles, until one can be read."""

    def __init__(self, scorers: Scorers) -> None:
        self._tokenizers: list[tuple[str, PreTrainedTokenizerBase]] = []
        for name, model in scorers:
            try:
                tokenizer = load_tokenizer(model)
            except ModelError:  # loading the reward raises it
                continue
            if tokenizer.chat_template is not None:
                self._tokenizers.append((name, tokenizer))
        self._readable: set[Sequence[object]] = set()

    def problem(self, prompt: Prompt) -> str | None:
        """Return why a reward model cannot read a prompt; None if all of them can."""
        if prompt.messages is None or not self._tokenizers:
            return None
        form = (*(message["role"] for message in prompt.messages), prompt.tools is not None)
        if form in self._readable:
            return None
        problems = (self._problem(name, t, prompt) for name, t in self._tokenizers)
        problem = next(filter(None, problems), None)
        if problem is None and len(self._readable) < _MOST_FORMS:
            self._readable.add(form)
        return problem

    def _problem(self, name: str, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | None:
        problem = prompt_problem(tokenizer, prompt)
        return problem and (
            f"the reward {name!r} could not score it: {problem}. Set its model.chat_template "
            "to one that takes such messages, remove them from the data, or set "
            "on_reward_failure.then=drop_group"
        )
