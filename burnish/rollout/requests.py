"""Rules shared by all rollout engines: valid requests, tokens that end a response, and stop
conditions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import GenerationConfig, PreTrainedTokenizerBase

from burnish.rollout.base import Request, Sampling
from burnish.types import FinishReason


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    limit: int | None,
    holder: str = "the model has",
) -> None:
    """Raise ValueError if a prompt is empty, if ``max_tokens`` is below 1, or if prompt plus
    response exceed ``limit`` positions.

    ``holder`` starts the clause about the limit in the message.
    """
    for request in requests:
        room = request.limit(sampling)
        if room < 1:
            raise ValueError(
                f"request {request.request_id}: max_tokens={room}: a response has at least "
                "one token; use 1 or more"
            )
        if not request.prompt_ids:
            raise ValueError(
                f"request {request.request_id} has an empty prompt; give at least one token"
            )
        need = len(request.prompt_ids) + room
        if limit is not None and need > limit:
            raise ValueError(
                f"request {request.request_id}: prompt of {len(request.prompt_ids)} tokens + "
                f"generate_max_len {room} = {need}, but {holder} positions for {limit}; "
                "shorten one of them"
            )


def end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the token ids that end a response: the tokenizer's and the generation config's."""
    ends = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    more = config.eos_token_id if config is not None else None
    return ends | set([more] if isinstance(more, int) else more or [])


class StopRule:
    """Stop conditions of responses: an end or stop token, a stop string, or the length limit.

    Stop tokens and stop strings remain in the response.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, ends: Iterable[int]
    ) -> None:
        self.tokenizer, self.strings = tokenizer, sampling.stop
        self.tokens = set(ends) | set(sampling.stop_token_ids)
        # Every token has at least one byte, so a stop string spans at most this many tokens.
        self._window = max((len(s.encode()) for s in sampling.stop), default=0) + 4

    def finished(self, tokens: Sequence[int], limit: int) -> FinishReason | None:
        """Return why the response ``tokens`` ends with its last token; None if it continues."""
        if tokens[-1] in self.tokens:
            return "stop"
        if self.strings:
            tail = str(self.tokenizer.decode(list(tokens[-self._window :])))
            if any(string in tail for string in self.strings):
                return "stop"
        return "length" if len(tokens) >= limit else None
