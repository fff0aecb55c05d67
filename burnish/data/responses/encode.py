"""Prompts with one given response each (job score), as groups for the rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from transformers import PreTrainedTokenizerBase

from burnish.data.chat import encode_completion, response_text
from burnish.data.encoded import EncodedTable
from burnish.data.prompts.encode import PromptEncoder, check_label_key
from burnish.data.prompts.generation import OWN_COLUMNS
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.rows import column
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.transcript import FinishReason
from burnish.types import Group, Prompt, Sample
from burnish.vocabulary import num_tokens


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

    def encode(self, row: Row, ref: RowRef) -> GivenResponse:
        text = column(row, self._config.response_key, "response_key")
        if not isinstance(text, str):
            raise DataError(
                f"column {self._config.response_key!r} (response_key) has a "
                f"{type(text).__name__}, and a response is a text; correct the column, or set "
                "response_key to another one"
            )
        ended = self._finish_reason(row)
        prompt = self._prompts.encode(row, ref)
        prompt = replace(prompt, metadata=self._metadata(prompt))
        ids = self._response_ids(row, prompt, text, ended=ended == "stop")
        if not self.scanned:
            line = f"{prompt.id} {prompt.token_ids} {ids} {row.columns!r}\n"
            self.digest.update(line.encode(errors="replace"))
        sample = Sample(
            sample_id=f"{ref.id}/0",
            prompt_id=prompt.id,
            group_id=ref.row,
            prompt_ids=prompt.token_ids,
            response_ids=ids,
            sampler_logprobs=(0.0,) * len(ids),
            action_mask=(True,) * len(ids),
            versions=(0,) * len(ids),
            text=text,
            finish_reason=ended,
        )
        return GivenResponse(Group(ref.row, prompt, (sample,)), dict(row.columns))

    def length(self, item: GivenResponse) -> int:
        return len(item.group.prompt.token_ids)

    def truncate(self, item: GivenResponse) -> GivenResponse | None:
        raise NotImplementedError("overlong: truncate_left is refused when the recipe is loaded")

    def _finish_reason(self, row: Row) -> FinishReason:
        key = self._config.finish_reason_key
        optional = not self._config.is_own("finish_reason_key")
        if key is None or (optional and row.values.get(key) is None):
            return "stop"
        value, known = row.values.get(key), get_args(FinishReason)
        if value not in known:
            raise DataError(
                f"column {key!r} (finish_reason_key) has {value!r}, which is none of "
                f"{', '.join(known)}; correct the column, or set data.finish_reason_key=null to "
                "score every response as ended"
            )
        return cast(FinishReason, value)

    def _metadata(self, prompt: Prompt) -> dict[str, Any]:
        """Return the columns that a reward received when the response was sampled."""
        own = OWN_COLUMNS | {self._config.response_key, self._config.finish_reason_key}
        return {key: value for key, value in prompt.metadata.items() if key not in own}

    def _response_ids(self, row: Row, prompt: Prompt, text: str, *, ended: bool) -> tuple[int, ...]:
        """Return the sampled ids if the row has them and they decode to ``text``; else the tokens
        of ``text``."""
        head, given = prompt.token_ids, row.values.get(f"{self._config.response_key}_tokens")
        if isinstance(given, (list, tuple)) and all(type(i) is int for i in given):
            ids = tuple(given)
            in_vocabulary = not ids or 0 <= min(ids) <= max(ids) < num_tokens(self._tokenizer)
            if in_vocabulary and response_text(self._tokenizer, head, ids) == text:
                return ids
        ids_and_mask = encode_completion(
            self._tokenizer, head, text, prompt=prompt.text, add_eos=ended
        )
        return tuple(ids_and_mask[0][len(head) :])


def make_encoder(
    config: ResponseDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> ResponseEncoder:
    """Return the encoder of given responses, see ``data/encoders.py``."""
    return ResponseEncoder(config, tokenizer)
