"""Score responses with the environment that created their prompt, found in its metadata."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.environments.base import StepResult
from burnish.environments.make import make_environment
from burnish.reasoning_tags import after_reasoning
from burnish.rewards.base import RewardInput, SampleError, late
from burnish.rewards.build import RewardInputs
from burnish.rewards.environment.config import EnvironmentReward
from burnish.rewards.texts import prompt_end
from burnish.user_calls import CallTimeoutError, UserCalls


class EnvironmentScorer:
    """A reward that scores each response, without its reasoning, with the environment that created
    its prompt.

    ``prompt.metadata["environment"]`` is ``{"name", "options", "size", "seed", "index"}``, written
    by data sources of kind ``environment``. Only single-turn environments are supported.
    """

    def __init__(self, *, name: str = "environment", timeout_s: float = 1800.0) -> None:
        self.name = name
        self._calls = UserCalls(f"reward {name!r} (an environment's step)", limit_s=timeout_s)

    def score(self, items: Sequence[RewardInput]) -> list[float]:
        """Return one score per item.

        Raises SampleError if a prompt has no environment, or if the environment raises or requests
        another turn.
        """
        try:
            return self._calls.run(lambda: [self._score_one(item) for item in items])
        except CallTimeoutError as error:
            raise late(self, items[0], len(items), error) from error

    def close(self) -> None:
        """End the thread of the calls. The environments are shared with the data sources."""
        self._calls.close()

    def _score_one(self, item: RewardInput) -> float:
        origin = item.prompt.metadata.get("environment")
        if origin is None:
            raise SampleError(
                self,
                item,
                "found no key 'environment' in the prompt's metadata (source "
                f"{item.prompt.source!r}); only data sources of kind environment write it",
                advice="use a data source of kind environment, or another kind of reward",
            )
        try:
            environment = make_environment(
                origin["name"], origin["options"], size=origin["size"], seed=origin["seed"]
            )
            result = environment.step(origin["index"], answer_of(item))
        except BaseException as error:
            problem = f"raised {type(error).__name__}: {error} (environment {origin})"
            raise SampleError(self, item, problem) from error
        if not isinstance(result, StepResult):
            problem = f"got {result!r} from environment {origin['name']} instead of a StepResult"
            raise SampleError(self, item, problem)
        if not result.done:
            raise SampleError(
                self,
                item,
                f"got done=False from environment {origin['name']}, which requests another turn; "
                "only single-turn environments can be scored",
                advice="return done=True from step(), or write a multi-turn environment for "
                "rollout.episodes (docs/environments.md)",
            )
        return result.reward


def answer_of(item: RewardInput) -> str:
    """Return a response without its reasoning, as episodes pass it to an environment."""
    text = item.sample.text
    answer = after_reasoning(text, prompt_end(item, None))
    return text if answer == text else answer.lstrip()


def make_reward(config: EnvironmentReward, inputs: RewardInputs) -> EnvironmentScorer:
    return EnvironmentScorer(name=inputs.name, timeout_s=config.timeout_s)
