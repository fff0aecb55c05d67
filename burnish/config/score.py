"""Recipe of the job ``score``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.base import PathText
from burnish.config.inference import RowsJob
from burnish.config.rewards import Scoring, ShapingConfig, no_weight_advice, running_norm_rules
from burnish.config.roles import RowLengths, SectionLimits
from burnish.data.responses.config import ResponseDataConfig
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.kinds import RewardConfig


class ScoreConfig(RowsJob):
    """``burnish score``: write the rewards of given responses as rows of a file."""

    without_effect: ClassVar[Mapping[str, str]] = {
        **RowsJob.without_effect,
        "precision.rollout_dtype": "it samples no responses",
        "observe.samples_with_tokens": "it samples no responses",
    }

    job: Literal["score"] = "score"
    """Job of the recipe."""
    data: ResponseDataConfig
    """Rows to score. Read once, in order."""
    num_rows: int | None = Field(None, ge=1)
    """Use only the first this many rows. None: all."""
    batch_size: int = Field(256, ge=1)
    """Rows per step, and per call of each reward."""
    rewards: tuple[RewardConfig, ...] = (FunctionReward(),)
    """Rewards of the responses."""
    shaping: ShapingConfig = ShapingConfig()
    """Clipping and penalties."""
    generate_max_len: int | None = Field(None, ge=1)
    """Length limit of responses, for ``shaping.overlong``."""
    output: PathText = "{run_dir}/scored.jsonl"
    """Output file as in ``generate``: the data's columns, ``reward``, and ``rewards`` by name."""

    def rollout_role(self) -> None:
        return None

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.rewards, on_failure=self.on_reward_failure)

    def section_limits(self, name: str) -> SectionLimits:
        """Return the number of rows. A reward has its own limit of lengths."""
        return SectionLimits((), num_rows=self.num_rows)

    @property
    def row_lengths(self) -> RowLengths:
        return RowLengths(self.data.prompt_max_len, self.generate_max_len or 1024)

    @property
    def rows_per_step(self) -> int:
        return self.batch_size

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if not self.rewards:
            yield "rewards is empty, so nothing would be scored; add an entry"
        if any(reward.kind == "episode" for reward in self.rewards):
            yield (
                "kind=episode is a reward that an environment or agent gives while the episode "
                "runs, and rows do not contain its turns' rewards; remove the entry (the rows of "
                "generate keep the score in their column rewards, which score replaces)"
            )
        yield from running_norm_rules(self.rewards)
        overlong = self.shaping.overlong
        if overlong is not None and self.generate_max_len is None:
            yield (
                f"shaping.overlong.buffer_len={overlong.buffer_len} is counted from "
                "generate_max_len, which "
                "is not set; set it to the limit that the responses were sampled with"
            )
        if overlong is None and self.generate_max_len is not None:
            yield (
                f"generate_max_len={self.generate_max_len} has no effect without "
                "shaping.overlong; remove it"
            )

    def advice(self) -> Iterator[str]:
        yield from no_weight_advice(self.rewards)
