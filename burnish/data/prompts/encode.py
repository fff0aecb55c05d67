"""Prompts for rollouts (an endless stream) and for evaluation (all prompts once)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.explain import nearest
from burnish.data.chat import check_tokenizer, encode_prompt
from burnish.data.decoding import text_behind, tokenizer_text
from burnish.data.encoded import EncodedStream, load_all
from burnish.data.forms import open_rows
from burnish.data.messages import as_messages
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.rows import note_unused_template, prompt_column, system_of, tools_column
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.model_text import ModelTextError, Pattern
from burnish.types import Prompt


class PromptStream(EncodedStream[Prompt]):
    """An endless stream of prompts, each row once per epoch of its source. Resumes at the exact
    prompt."""

    def __init__(
        self,
        config: PromptDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        in_episodes: bool = False,
    ) -> None:
        """``in_episodes``: the prompts start episodes. Raises DataError if a source, the tokenizer
        or ``label_key`` cannot be used."""
        encoder = PromptEncoder(config, tokenizer, in_episodes=in_episodes)
        super().__init__(config, encoder, seed=seed)
        check_label_key(config, self.sources.values())

    def next(self, num: int) -> list[Prompt]:
        """Return the next ``num`` prompts. Their ids are ``source:row@epoch``."""
        return self.take(num)


def load_prompts(
    config: PromptDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int | None = None,
    section: str = "data",
    in_episodes: bool = False,
) -> list[Prompt]:
    """Return all prompts once, in file order, at most ``limit``. ``in_episodes``: they start
    episodes.

    Raises DataError as the stream does.
    """
    sources = open_rows(config)
    check_label_key(config, sources)
    encoder = PromptEncoder(config, tokenizer, in_episodes=in_episodes)
    return load_all(sources, config, encoder, limit=limit, section=section)


class PromptEncoder:
    """An encoder of prompts. Implements ``data.encoded.Encoder``."""

    unit = "prompt"
    limit_name = "prompt_max_len"

    def __init__(
        self,
        config: PromptDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        in_episodes: bool = False,
    ) -> None:
        """``in_episodes``: the prompts start episodes, which render texts as messages."""
        check_tokenizer(tokenizer)
        self.limit = config.prompt_max_len
        self._in_episodes = in_episodes
        self._config, self._tokenizer = config, tokenizer

    def encode(self, row: Row, ref: RowRef) -> Prompt:
        config = self._config
        content = prompt_column(row, config.prompt_key, config.prompt_template)
        return self.with_content(row, ref, content, system=system_of(row, config, content))

    def with_content(self, row: Row, ref: RowRef, content: Any, *, system: str | None) -> Prompt:
        """Encode the row with ``content`` (text or messages) in place of its own prompt, and a
        ``system`` message before it."""
        config = self._config
        tools = tools_column(row, config)
        is_plain = isinstance(content, str) and not config.apply_chat_template
        text, ids = encode_prompt(
            self._tokenizer,
            content,
            system_prompt=system,
            apply_chat_template=config.apply_chat_template,
            tools=None if is_plain and self._in_episodes else tools,
        )
        messages = None
        if is_plain:
            if not self._in_episodes:
                note_unused_template(self._tokenizer, ids, config)
        else:
            messages = tuple(as_messages(content, system_prompt=system))
        if not ids:
            raise DataError("the prompt has no tokens, so there is nothing to generate from")
        return Prompt(
            id=ref.id,
            token_ids=tuple(ids),
            text=text,
            label=label_of(row, config),
            metadata=self._metadata(row),
            source=ref.source,
            messages=messages,
            tools=None if tools is None or (is_plain and not self._in_episodes) else tuple(tools),
        )

    def length(self, item: Prompt) -> int:
        return len(item.token_ids)

    def truncate(self, item: Prompt) -> Prompt | None:
        ids = item.token_ids[-self.limit :]
        decode = partial(tokenizer_text, self._tokenizer)
        return replace(item, token_ids=ids, text=text_behind(self._tokenizer, (), ids, decode))

    def _metadata(self, row: Row) -> dict[str, Any]:
        """Return the columns other than the label and the prompt, plus the row's environment."""
        used = {self._config.label_key}
        if self._config.prompt_template is None:
            used.add(self._config.prompt_key)
        rest = {key: value for key, value in row.values.items() if key not in used}
        return rest if row.environment is None else {**rest, "environment": row.environment}


def label_of(row: Row, config: PromptDataConfig) -> Any:
    """Return the label of a row, or None if it has none.

    Raises DataError if ``label_pattern`` is set and does not match.
    """
    value = row.values.get(config.label_key)
    if isinstance(value, bytes):
        raise DataError(
            f"column {config.label_key!r} (label_key) has bytes that are not UTF-8; write the "
            "label as text or a number"
        )
    if config.label_pattern is None:
        return value
    pattern = Pattern(config.label_pattern, is_own=False)
    try:
        matches = pattern.finditer("" if value is None else str(value))
    except ModelTextError as error:
        raise DataError(f"column {config.label_key!r} (label_key): {error}") from error
    if not matches or matches[-1][1] is None:
        raise DataError(
            f"column {config.label_key!r} (label_key) contains {repr(value)[-80:]}, in which "
            f"label_pattern={config.label_pattern!r} finds no label; correct the pattern, or "
            "remove the row"
        )
    return matches[-1][1].strip()


def check_label_key(config: PromptDataConfig, sources: Iterable[Source]) -> None:
    """Raise DataError if an explicitly set ``label_key`` is a column of none of the sources."""
    if not config.is_own("label_key"):
        return
    firsts = [source[0] for source in sources]
    if not any(config.label_key in row.values for row in firsts):
        columns = list(dict.fromkeys(key for row in firsts for key in row.values))
        raise DataError(
            f"{firsts[0].where}: there is no column {config.label_key!r} (label_key); the columns "
            f"are {', '.join(columns)}{nearest(config.label_key, columns)}. If there are no "
            "labels, remove label_key"
        )


def make_encoder(
    config: PromptDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> PromptEncoder:
    """Return the encoder of prompts, see ``data/encoded.py``."""
    return PromptEncoder(config, tokenizer, in_episodes=in_episodes)
