"""Prompts with one given response each (job score), as groups for the rewards."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.chat_message import REASONING
from burnish.compact import IntRuns
from burnish.data.chat import (
    encode_completion,
    encode_conversation,
    encode_prompt,
)
from burnish.data.decoding import response_decoder, response_text
from burnish.data.encoded import EncodedTable
from burnish.data.episode_rows import TOKENS_TURNS, episode_of, sampled_row
from burnish.data.messages import as_messages
from burnish.data.notices import known_end
from burnish.data.prompts.encode import PromptEncoder, check_label_key
from burnish.data.prompts.generation import COLUMNS_OF_EPISODES, OWN_COLUMNS
from burnish.data.rendering import Tools
from burnish.data.response_rows import num_repeating
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.rows import column, system_of, tools_column
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.transcript import CUT, Episode, FinishReason
from burnish.types import Group, Prompt, Sample, TokenRow
from burnish.vocabulary import num_tokens

_log = logging.getLogger("burnish")


@dataclass(frozen=True)
class GivenResponse:
    """One row to score: a group of one sample, with the columns of the row."""

    group: Group
    columns: Mapping[str, Any]
    """Columns of the row in its file."""


class GivenResponses(EncodedTable[GivenResponse]):
    """All rows of a recipe. Rows whose prompt exceeds the length limit are dropped."""

    def __init__(
        self,
        config: ResponseDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit: int | None = None,
        problem_of: Callable[[Prompt], str | None] = lambda prompt: None,
    ) -> None:
        """``problem_of``: reason why the rewards cannot use a prompt's label. Raises one DataError
        for all unusable rows."""
        encoder = ResponseEncoder(config, tokenizer)
        super().__init__(
            config, encoder, limit=limit, problem_of=lambda item: problem_of(item.group.prompt)
        )
        check_label_key(config, self.sources)
        for source in self.sources:
            repeats, num = num_repeating(source, config, [config.response_key])
            if 2 * repeats > num:
                _log.warning(
                    "data source %r: the responses of %d of the first %d rows begin with their "
                    "prompt, which rewards then read twice (rm and preference strip it: "
                    "repeated_prompt); remove it from the column %r if it is no part of the "
                    "response",
                    *(source.name, repeats, num, config.response_key),
                )
        self.digest = encoder.digest.hexdigest()
        """Digest of all rows. A resumed run must have the same digest."""
        encoder.scanned = True


class ResponseEncoder:
    """An encoder of given responses. Implements ``data.encoded.Encoder``."""

    unit = "row"
    limit_name = "prompt_max_len"

    def __init__(self, config: ResponseDataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.limit = config.prompt_max_len
        self.digest = hashlib.sha256()
        self.scanned = False
        self._config, self._tokenizer = config, tokenizer
        self._prompts = PromptEncoder(config, tokenizer)
        self._starts = PromptEncoder(config, tokenizer, in_episodes=True)

    def encode(self, row: Row, ref: RowRef) -> GivenResponse:
        text = column(row, self._config.response_key, "response_key")
        if not isinstance(text, str):
            raise DataError(
                f"column {self._config.response_key!r} (response_key) has a "
                f"{type(text).__name__}, and a response is a text; correct the column, or set "
                "response_key to another one"
            )
        finish = self._finish_reason(row)
        episode = self._episode(row, finish)
        prompts = self._prompts if episode is None else self._starts
        prompt = prompts.encode(row, ref)
        # Rewards get the columns that they received when the response was sampled.
        written = OWN_COLUMNS if episode is None else COLUMNS_OF_EPISODES
        hidden = written | {self._config.response_key, self._config.finish_reason_key}
        metadata = {key: value for key, value in prompt.metadata.items() if key not in hidden}
        prompt = replace(prompt, metadata=metadata)
        if episode is not None:
            tokens, text = self._episode_tokens(row, episode)
            finish = "length" if episode.status in CUT else "stop"
        else:
            ids = self._response_ids(row, prompt, text, ended=finish == "stop")
            tokens = replace(_tokens(prompt.token_ids, ids, (True,) * len(ids)), turns=())
        if not self.scanned:
            line = f"{prompt.id} {prompt.token_ids} {tokens.response_ids} {row.columns!r}\n"
            self.digest.update(line.encode(errors="replace"))
        sample = Sample(
            sample_id=f"{ref.id}/0",
            prompt_id=prompt.id,
            group_id=ref.row,
            **vars(tokens),
            text=text,
            finish_reason=finish,
            episode=episode,
        )
        return GivenResponse(Group(ref.row, prompt, (sample,)), dict(row.columns))

    def _episode(self, row: Row, finish: FinishReason) -> Episode | None:
        """Return the episode of a row, as the recipe reads it. None: the row has none, or the
        recipe names another column with the response."""
        config = self._config
        episode = None
        if not config.is_own("response_key"):
            episode = episode_of(row.columns, finish=finish)
        if episode is None:
            return None
        system = system_of(row, config, episode.start)
        if system is not None and episode.turns[-1].is_text:
            raise DataError(
                "there is a system message (system_prompt of the recipe, or a column system or "
                "system_prompt), but the row is plain text (plain_text: true), which is used "
                "unchanged; remove it"
            )
        start = as_messages(episode.start, system_prompt=system)
        return replace(episode, start=tuple(start), tools=tuple(tools_column(row, config) or ()))

    def _episode_tokens(self, row: Row, episode: Episode) -> tuple[TokenRow, str]:
        """Return the token row of an episode, and the text of its last response: as sampled if the
        row has its tokens, else its last response, rendered."""
        tokenizer, last = self._tokenizer, episode.turns[-1]
        trained = [len(episode.messages_before(turn)) for turn in range(len(episode.turns))]
        sampled = sampled_row(row, tokenizer, episode.messages, episode.tools, trained=trained)
        if sampled is not None:
            begin = sampled.prompt_len
            begins = {turn["begin"] - begin for turn in row.values[TOKENS_TURNS]}
            tokens = _tokens(sampled.ids[:begin], sampled.ids[begin:], sampled.mask[begin:], begins)
            return tokens, response_decoder(tokenizer)(tokens.last_response[1])
        number = len(episode.turns) - 1
        plain, tools = episode.text_before(number), episode.tools_of(number) or None
        if plain is None and (REASONING[0] in last.message or "tool_calls" in last.message):
            return self._rendered_tokens(episode, tools)
        text = last.message["content"]
        content = episode.messages_before(number) if plain is None else plain
        prompt, head = encode_prompt(tokenizer, content, tools=tools, refused=())
        ids, _ = encode_completion(
            tokenizer, head, text, prompt=prompt, add_eos=last.finish_reason == "stop"
        )
        response = ids[len(head) :]
        return _tokens(head, response, (True,) * len(response)), text

    def _rendered_tokens(self, episode: Episode, tools: Tools) -> tuple[TokenRow, str]:
        """Return a last response with reasoning or tool calls as the template writes it: what a
        policy samples in its place."""
        last = episode.turns[-1]
        message = {**last.message, "finish_reason": last.finish_reason}
        history = episode.messages_before(len(episode.turns) - 1)
        ids, mask = encode_conversation(
            self._tokenizer, [*history, message], only_last=True, tools=tools, refused=()
        )
        begin, end = mask.index(True), len(mask) - mask[::-1].index(True)
        tokens = _tokens(ids[:begin], ids[begin:end], mask[begin:end])
        return tokens, response_decoder(self._tokenizer)(tokens.last_response[1])

    def length(self, item: GivenResponse) -> int:
        return len(item.group.prompt.token_ids)

    def truncate(self, item: GivenResponse) -> GivenResponse | None:
        raise NotImplementedError("overlong: truncate_left is refused when the recipe is loaded")

    def _finish_reason(self, row: Row) -> FinishReason:
        key = self._config.finish_reason_key
        optional = not self._config.is_own("finish_reason_key")
        if key is None or (optional and row.values.get(key) is None):
            return "stop"
        if (value := row.values.get(key)) is None:
            raise DataError(
                f"column {key!r} (finish_reason_key) is empty here; correct the column, or set "
                "data.finish_reason_key=null to score every response as ended"
            )
        return known_end(value)

    def _response_ids(self, row: Row, prompt: Prompt, text: str, *, ended: bool) -> tuple[int, ...]:
        """Return the sampled ids if the row has them and they decode to ``text``; else the tokens
        of ``text``."""
        head, row_ids = prompt.token_ids, row.values.get(f"{self._config.response_key}_tokens")
        if isinstance(row_ids, (list, tuple)) and all(type(i) is int for i in row_ids):
            ids = tuple(row_ids)
            in_vocabulary = not ids or 0 <= min(ids) <= max(ids) < num_tokens(self._tokenizer)
            if in_vocabulary and response_text(self._tokenizer, head, ids) == text:
                return ids
        ids_and_mask = encode_completion(
            self._tokenizer, head, text, prompt=prompt.text, add_eos=ended
        )
        return tuple(ids_and_mask[0][len(head) :])


def _tokens(
    prompt: Sequence[int], ids: Sequence[int], mask: Sequence[bool], begins: Collection[int] = ()
) -> TokenRow:
    """Return a row of which each run of sampled tokens is a turn. ``begins``: indices in ``ids`` at
    which another turn begins, also directly after one."""
    turns, number = [], -1
    for place, (before, is_sampled) in enumerate(pairwise([False, *mask])):
        number += is_sampled and (not before or place in begins)
        turns.append(number if is_sampled else -1)
    return TokenRow(
        prompt_ids=tuple(prompt),
        response_ids=tuple(ids),
        sampler_logprobs=(0.0,) * len(ids),
        action_mask=tuple(mask),
        versions=(0,) * len(ids),
        turns=IntRuns(turns),
    )


def make_encoder(
    config: ResponseDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> ResponseEncoder:
    """Return the encoder of given responses, see ``data/encoded.py``."""
    return ResponseEncoder(config, tokenizer)
