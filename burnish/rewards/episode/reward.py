"""Scores that the environment or the agent of a multi-turn episode gave.

An episode that ended by itself (``done``) must have the reward in one of its turns: 0 would hide a
wrong name, or an agent without a result. An episode that a limit ended may lack it, because nobody
could judge it: its score is 0. It is counted if it has rewards of other names only. Names that no
entry of the recipe has are logged once: they may be misspelled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from burnish.config.explain import nearest
from burnish.rewards.base import RewardInput, SampleError
from burnish.rewards.build import RewardInputs
from burnish.rewards.episode.config import EpisodeReward
from burnish.transcript import Episode, Turn

log = logging.getLogger("burnish")

MISSING = "missing"
"""Count of the episodes that a limit ended and that have rewards of other names only."""


_MOST_NAMES = 50
"""Names after which further ones are not logged."""


class EpisodeScorer:
    """The sum of an environment's rewards over the turns of an episode."""

    def __init__(
        self,
        reward: str | None,
        *,
        name: str,
        per_turn: bool = False,
        listed: Collection[str] = (),
    ) -> None:
        """``reward``: name of one of the environment's rewards. None: the sum of all. ``per_turn``:
        credit each turn with its own part. ``listed``: names that other entries count."""
        self.reward, self.name, self.per_turn = reward, name, per_turn
        self._names = {*listed, *(() if reward is None else (reward,))}
        self._counts: Counter[str] = Counter()
        self._has_warned = False

    def score(self, items: Sequence[RewardInput]) -> list[float | SampleError]:
        """Return one score per episode; a SampleError for an episode that ended by itself without
        this reward, and for a single-turn response."""
        self._note_names(items)
        return [self._score(item) for item in items]

    def of_turns(self, item: RewardInput) -> tuple[float, ...]:
        """Return the reward of each turn. A turn without this reward has 0."""
        turns = self._episode(item).turns
        if self.reward is None:
            return tuple(sum(turn.rewards.values()) for turn in turns)
        return tuple(turn.rewards.get(self.reward, 0.0) for turn in turns)

    def take_counts(self) -> Mapping[str, int]:
        """Return the number of episodes with other rewards only since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def _score(self, item: RewardInput) -> float | SampleError:
        try:
            episode = self._episode(item)
        except SampleError as error:
            return error
        if not any(self._is_in(turn) for turn in episode.turns):
            names = tuple(dict.fromkeys(name for turn in episode.turns for name in turn.rewards))
            if episode.status == "done":
                return self._missing(item, names)
            if names:
                self._counts[MISSING] += 1
            if names and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "reward %r: an episode that ended with %s has no reward %r, only %s%s; its "
                    "score is 0. This is logged once; reward/%s/%s counts such episodes",
                    *(self.name, episode.status, self.reward, ", ".join(names)),
                    *(nearest(self.reward or "", names), self.name, MISSING),
                )
        return sum(self.of_turns(item))

    def _episode(self, item: RewardInput) -> Episode:
        episode = item.sample.episode
        if episode is None:
            raise SampleError(
                self,
                item,
                "found no episode: the response was sampled in a single turn",
                advice="set rollout.episodes, or use another kind of reward",
            )
        return episode

    def _is_in(self, turn: Turn) -> bool:
        return bool(turn.rewards) if self.reward is None else self.reward in turn.rewards

    def _missing(self, item: RewardInput, names: Sequence[str]) -> SampleError:
        """Return the error for an episode that ended by itself without this reward."""
        if names:
            problem = f"found no reward {self.reward!r} in the episode; it has {', '.join(names)}"
            problem += nearest(self.reward or "", names)
        else:
            problem = (
                "found no reward in the episode: the environment gave none in any step, or the "
            )
            problem += "agent returned None"
        return SampleError(
            self,
            item,
            problem,
            advice="set `reward` of this entry to a name that exists; give the reward in every "
            "episode that ends, also if it is 0.0; or use another kind of reward",
        )

    def _note_names(self, items: Sequence[RewardInput]) -> None:
        """Log each name once that no entry of the recipe has. The only name of a sum is expected:
        further ones are not."""
        episodes = [item.sample.episode for item in items if item.sample.episode is not None]
        turns = [
            turn
            for episode in episodes
            for turn in episode.turns
            if self.reward is None or any(map(self._is_in, episode.turns))  # else it is missing
        ]
        new = dict.fromkeys(name for turn in turns for name in turn.rewards)
        new = {name: None for name in new if name not in self._names}
        is_first = self.reward is None and not self._names
        if not new or len(self._names) >= _MOST_NAMES:
            return
        hint = nearest(next(iter(new)), self._names)
        self._names |= set(new)
        if is_first and len(new) == 1:
            return
        effect = "which no entry of rewards names, so they do not count"
        if self.reward is None:
            effect = "all of which are summed" if is_first else "which are added to the sum"
        log.warning(
            "reward %r: episodes have the rewards %s%s, %s. Set `reward` of this entry to the name "
            "that counts, and add an entry for each other one that does (logged once)",
            *(self.name, ", ".join(new), hint, effect),
        )

    def close(self) -> None:
        """Do nothing."""


def make_reward(config: EpisodeReward, inputs: RewardInputs) -> EpisodeScorer:
    listed = [e.reward for e in inputs.entries if isinstance(e, EpisodeReward)]
    names = [reward for reward in listed if reward is not None]
    return EpisodeScorer(config.reward, name=inputs.name, per_turn=config.per_turn, listed=names)
