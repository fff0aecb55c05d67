"""Detect and strip prompts that responses repeat, as in some preference data sets (hh-rlhf).

Without stripping, the prompt would occur twice in the encoded text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from burnish.data.config import DataConfig
from burnish.data.rows import Exchange, content_column, is_text, prompt_column
from burnish.data.sources import DataError, Source
from burnish.data.streamed import num_first

_log = logging.getLogger("burnish")

_LOOKED_AT = 100
"""Number of rows of a source that are examined."""


class RepeatedPrompts:
    """The sources whose responses begin with their prompt.

    A single row is not enough evidence, because an answer may begin with the words of a short
    prompt. A source counts only if all of its first 100 rows repeat the prompt."""

    def __init__(
        self,
        config: DataConfig,
        keys: Sequence[str],
        sources: Sequence[Source],
        choice: Literal["auto", "strip", "keep"],
    ) -> None:
        """``keys``: the columns with responses. ``choice``: the key ``repeated_prompt``."""
        self._config, self._keys = config, keys
        self._sources = {
            source.name
            for source in sources
            if choice == "strip" or (choice == "auto" and self._all_repeat(source))
        }

    def strip(self, source: str, given: Exchange) -> Exchange:
        """Remove the prompt from the beginning of the response, if its source repeats prompts."""
        prompt, response = given.prompt, given.response
        if source not in self._sources or given.response_ids or not is_text(prompt, response):
            return given
        return replace(given, response=response.removeprefix(prompt))

    def _all_repeat(self, source: Source) -> bool:
        num = num_first(source, _LOOKED_AT)
        repeats = sum(self._repeats(source, i) for i in range(num))
        if repeats == num:
            _log.warning(
                "data source %r: every response of the first %d rows begins with its prompt, which "
                "is stripped; set repeated_prompt: keep if it belongs to the response",
                *(source.name, num),
            )
        elif 2 * repeats > num:
            _log.warning(
                "data source %r: the responses of %d of the first %d rows begin with their prompt, "
                "which is kept; set repeated_prompt: strip if the data repeats the prompt",
                *(source.name, repeats, num),
            )
        return repeats == num

    def _repeats(self, source: Source, i: int) -> bool:
        config = self._config
        try:
            row = source[i]
            prompt = prompt_column(row, config.prompt_key, config.prompt_template)
            responses = [content_column(row, key, "") for key in self._keys]
        except DataError:  # encoding the row reports the error
            return False
        if not prompt or not is_text(prompt, *responses):
            return False
        return all(text.startswith(prompt) and text != prompt for text in responses)
