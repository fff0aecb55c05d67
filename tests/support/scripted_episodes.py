"""Finished episodes of a scripted policy, made from the calls that the loop of an episode makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.data.chat import encode_prompt
from burnish.data.decoding import response_decoder
from burnish.data.pieces import encode_piece
from burnish.episodes.loop import EngineCall, EpisodeResult
from burnish.episodes.renderer import ChatRenderer, History
from burnish.episodes.runner import episode_sample
from burnish.rollout.base import Completion, VersionSpan
from burnish.transcript import CUT, Episode, EpisodeStatus, FinishReason, Turn
from burnish.types import Ids, Prompt, Sample

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Scripted:
    """One response of the policy and the messages that answer it."""

    text: str
    answer: Sequence[Message] = ()
    finish: FinishReason = "stop"
    prompt: Sequence[Message] | None = None
    """Messages of a call that does not continue the turn before it."""
    has_end: bool = True
    """False: a stop string ended the response, not the end token."""
    end: int | None = None
    """Token that ends the response. None: that of the template."""


@dataclass
class Player:
    """Plays episodes with a tokenizer and its chat template."""

    tokenizer: Any
    history: History | None = None
    renderer: ChatRenderer = field(init=False)

    def __post_init__(self) -> None:
        self.renderer = ChatRenderer(self.tokenizer, history=self.history)

    @property
    def end(self) -> int:
        """Id of the token that ends a turn."""
        return min(self.renderer.stop_token_ids)

    def ids(self, turn: Scripted, prompt: Ids) -> tuple[int, ...]:
        """Return the sampled ids of a turn."""
        ids = encode_piece(self.tokenizer, turn.text, after=list(prompt[-1:]))
        ended = turn.finish == "stop" and turn.has_end
        end = self.end if turn.end is None else turn.end
        return (*ids, end) if ended else tuple(ids)

    def single(self, prompt: Prompt, turn: Scripted) -> Sample:
        """Return a turn as the single response to a prompt."""
        ids = self.ids(turn, prompt.token_ids)
        return Sample(
            **{"sample_id": f"{prompt.id}/0", "prompt_id": prompt.id, "group_id": 0},
            **{"prompt_ids": prompt.token_ids, "response_ids": ids},
            **{"sampler_logprobs": (-1.0,) * len(ids), "action_mask": (True,) * len(ids)},
            **{"versions": (0,) * len(ids), "text": self._text(ids)},
            finish_reason=turn.finish,
        )

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Return messages as a prompt of a data row."""
        text, ids = encode_prompt(self.tokenizer, messages)
        return Prompt("rows:0@0", tuple(ids), text, messages=tuple(messages), source="rows")

    def episode(
        self,
        start: Sequence[Message],
        turns: Sequence[Scripted],
        *,
        status: EpisodeStatus = "done",
        prompt: Prompt | None = None,
    ) -> Sample:
        """Return an episode of ``turns``, which answer ``start``."""
        calls: list[EngineCall] = []
        records: list[Turn] = []
        ids = self.renderer.render(start)
        for number, turn in enumerate(turns):
            if turn.prompt is not None:
                ids = self.renderer.render(turn.prompt)
            elif number and self.renderer.history == "template":
                ids = self.renderer.render(
                    Episode("done", tuple(start), turns=tuple(records)).messages
                )
            elif number:
                before = calls[-1]
                ids = self.renderer.bridge(
                    before.prompt_ids,
                    before.completion.token_ids,
                    turns[number - 1].answer,
                    ended=before.completion.finish_reason == "stop",
                )
            sampled = self.ids(turn, ids)
            ended = turn.finish == "stop"
            message = self.renderer.parse(sampled, prompt_ids=ids, ended=ended).message
            calls.append(EngineCall(ids, self._completion(sampled, turn.finish)))
            records.append(
                Turn(
                    message,
                    tuple(turn.answer),
                    turn.prompt and tuple(turn.prompt),
                    finish_reason=turn.finish,
                )
            )
        record = Episode(status, tuple(start), turns=tuple(records))
        result = EpisodeResult(record, tuple(calls))
        sample = episode_sample(prompt or self.prompt(start), "rows:0@0/0", result)
        assert (sample.finish_reason == "length") == (status in CUT)
        return sample

    def _completion(self, ids: Ids, finish: FinishReason) -> Completion:
        span = (VersionSpan(0, 0, len(ids)),)
        return Completion("r", 0, ids, (-1.0,) * len(ids), finish, self._text(ids), span)

    def _text(self, ids: Ids) -> str:
        return response_decoder(self.tokenizer)(ids)
