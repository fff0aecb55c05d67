"""Prompts of batch inference (job generate), with the data that is copied to the output rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.forms import SYSTEMS
from burnish.config.generate import ConditionConfig
from burnish.data.encoded import EncodedTable
from burnish.data.episode_rows import EPISODE_COLUMNS, TOOLS
from burnish.data.messages import as_messages
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptEncoder, check_label_key
from burnish.data.rows import prompt_column, system_of
from burnish.data.sources import DataError, Row
from burnish.data.stream import RowRef
from burnish.types import Prompt

Content = str | list[dict[str, Any]]
"""A prompt as data: text, or chat messages."""

OWN_COLUMNS = frozenset(
    {
        *("prompt_id", "sample", "prompt", "response", "finish_reason", "reward", "rewards"),
        *("prompt_tokens", "response_tokens", "label", "margin"),
        *(f"{side}{suffix}" for side in ("chosen", "rejected") for suffix in ("", "_tokens")),
        *(f"{side}_{what}" for side in ("chosen", "rejected") for what in ("reward", "rewards")),
        *(f"{side}_finish_reason" for side in ("chosen", "rejected")),
        "messages",
    }
)
"""Column names that the data may not pass through to output rows, in any mode.

The output writes all of them except ``messages``. ``messages`` is excluded because SFT would prefer
it to ``prompt`` and ``response``. System messages in columns of their own are excluded, too: the
prompt that is written is complete, and the next job would read them again.
"""

COLUMNS_OF_EPISODES = OWN_COLUMNS | EPISODE_COLUMNS
"""The same, if the output rows are episodes."""


@dataclass(frozen=True)
class GenerationPrompt:
    """A prompt with its content as data and its other columns.

    Example: a row ``{"q": "1+1", "label": "2", "level": 3}`` with ``prompt_key: q`` and
    ``apply_chat_template``::

        GenerationPrompt(Prompt("data:0@0", ...), content=[{"role": "user", "content": "1+1"}],
                         unconditioned=<the same>, label="2", has_label=True,
                         columns={"level": 3})
    """

    prompt: Prompt
    """Input of the engine and of the rewards."""
    content: Content
    """The same prompt as data. A job that reads it gets the same tokens without prompt_template or
    system_prompt."""
    unconditioned: Content
    """``content`` without a stated reward."""
    label: Any
    has_label: bool
    columns: Mapping[str, Any]
    """The row's other columns, except for those that the output writes."""


class GenerationPrompts(EncodedTable[GenerationPrompt]):
    """All prompts of a recipe. Prompts that exceed the length limit are dropped."""

    def __init__(  # house: ok the options of one table
        self,
        config: PromptDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit: int | None = None,
        condition: ConditionConfig | None = None,
        one_form: bool = False,
        in_episodes: bool = False,
        problem_of: Callable[[Prompt], str | None] = lambda prompt: None,
    ) -> None:
        """``one_form``: require all prompts to be texts or all to be messages, because a column of
        a Parquet file has one type. ``in_episodes``: the prompts start episodes.
        ``problem_of``: reason why the rewards cannot use a prompt's label.

        Raises one DataError for all unusable prompts.
        """
        encoder = _GenerationPromptEncoder(config, tokenizer, condition, in_episodes=in_episodes)
        super().__init__(
            config, encoder, limit=limit, problem_of=lambda item: problem_of(item.prompt)
        )
        check_label_key(config, self.sources)
        if one_form and len(encoder.forms) > 1:
            raise DataError(
                "some prompts are texts and others messages, but a column of a Parquet file has "
                "one type; set apply_chat_template: true to make all of them messages, or an "
                "output that ends in .jsonl"
            )
        self.digest = encoder.digest.hexdigest()
        """Digest of all prompt ids, tokens, labels and other columns. A resumed run must have the
        same digest."""
        self.left_out = sorted(encoder.left_out)
        """Columns of the data that are not copied to the output (:data:`OWN_COLUMNS`)."""
        encoder.scanned = True


def with_reward(content: Content, template: str, reward: float) -> Content:
    """Return a prompt that states a reward.

    ``template`` is filled with the reward and the text; for messages, with the text of the last
    user message, which it replaces. Raises DataError if there is no user message or its content is
    not text.
    """
    if isinstance(content, str):
        return template.format(prompt=content, reward=reward)
    asked = [i for i, message in enumerate(content) if message["role"] == "user"]
    if not asked or not isinstance(content[asked[-1]].get("content"), str):
        raise DataError(
            "condition.template is applied to the text of the last user message, but the prompt "
            f"has none (roles: {', '.join(m['role'] for m in content)}); remove such rows"
        )
    last = content[asked[-1]]
    stated = template.format(prompt=last["content"], reward=reward)
    return [*content[: asked[-1]], {**last, "content": stated}, *content[asked[-1] + 1 :]]


class _GenerationPromptEncoder:
    unit = "prompt"
    limit_name = "prompt_max_len"

    def __init__(
        self,
        config: PromptDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        condition: ConditionConfig | None,
        *,
        in_episodes: bool,
    ) -> None:
        self.limit = config.prompt_max_len
        self._in_episodes = in_episodes
        self.own_columns = (COLUMNS_OF_EPISODES if in_episodes else OWN_COLUMNS) | set(SYSTEMS)
        if config.tools_key != TOOLS:  # the next job would read it
            self.own_columns |= {TOOLS}
        self.digest = hashlib.sha256()
        self.left_out: set[str] = set()
        self.forms: set[bool] = set()
        self.scanned = False
        self._config, self._condition = config, condition
        self._of_text = PromptEncoder(config, tokenizer, in_episodes=in_episodes)
        complete = config.model_copy(update={"apply_chat_template": False})
        self._of_messages = PromptEncoder(complete, tokenizer)

    def encode(self, row: Row, ref: RowRef) -> GenerationPrompt:
        config, condition = self._config, self._condition
        row_prompt = prompt_column(row, config.prompt_key, config.prompt_template)
        plain = isinstance(row_prompt, str) and not config.apply_chat_template
        content = row_prompt
        system = system_of(row, config, row_prompt)
        if not plain:
            content, system = as_messages(row_prompt, system_prompt=system), None
        unconditioned = content
        if condition is not None:  # even if only rows state a reward: errors precede sampling
            stated = with_reward(content, condition.template, condition.wanted_reward or 0.0)
            content = stated if condition.wanted_reward is not None else content
        encoder = self._of_text if plain else self._of_messages
        prompt = encoder.with_content(row, ref, content, system=system)
        columns = self._columns(row.columns)
        if prompt.tools is not None and not self._in_episodes:
            columns.setdefault(TOOLS, [dict(tool) for tool in prompt.tools])
        if not self.scanned:
            self.forms.add(plain)
            line = f"{prompt.id} {prompt.token_ids} {prompt.label!r} {columns!r}\n"
            self.digest.update(line.encode(errors="replace"))
        return GenerationPrompt(
            prompt,
            content=content,
            unconditioned=unconditioned,
            label=prompt.label,
            has_label=config.label_key in row.values,
            columns=columns,
        )

    def length(self, item: GenerationPrompt) -> int:
        return len(item.prompt.token_ids)

    def truncate(self, item: GenerationPrompt) -> GenerationPrompt | None:
        raise NotImplementedError("overlong: truncate_left is refused when the recipe is loaded")

    def _columns(self, values: Mapping[str, Any]) -> dict[str, Any]:
        used = {self._config.prompt_key, self._config.label_key}
        other: Sequence[str] = [key for key in values if key not in used]
        if not self.scanned:
            self.left_out |= self.own_columns & set(other)
        return {key: values[key] for key in other if key not in self.own_columns}
