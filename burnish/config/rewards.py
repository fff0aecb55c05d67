"""Config of rewards: the functions, models and servers that score a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from burnish.config.algorithm import AdvantageConfig
from burnish.config.base import Node, OlderKeys, switched_by
from burnish.config.model import ModelConfig
from burnish.config.paths import client_advice, client_problems, code_problem
from burnish.config.sandbox import BubblewrapSandbox, SandboxConfig

_EXAMPLE = "http://host:5000/get_reward"

StepAggregation = Literal["min", "product", "last", "mean"]

RESERVED_NAMES = (
    *("mean", "std", "trained_mean", "shaping", "truncated_frac", "groups_dropped"),
    *("equal_groups_frac",),
)
"""Names used by metrics and samples, which no reward may have."""


class _Reward(Node):
    """Keys and facts of every reward."""

    runs_alone: ClassVar[bool] = True
    """False if it needs a server, a model or an episode, so that ``burnish check`` cannot call it
    on a row."""

    name: str | None = None
    """Name in metrics and samples. None: derived from the kind."""
    weight: float = 1.0
    """The total reward is the weighted sum of all rewards."""
    running_norm: Literal["mean_std", "std"] | None = None
    """Normalize before the weight by mean and standard deviation of all scores of the run so far,
    this step's included. mean_std: (score - mean) / std. std: score / std, which keeps the sign.
    Saved in checkpoints. The metric ``reward/<name>``, the column ``reward_parts`` of samples,
    dynamic sampling's bounds and evaluation use the plain score; ``reward/mean``, ``reward/std``
    and the column ``reward`` the normalized one. Refused in generate and score. None: off."""

    @property
    def needs_callable(self) -> bool:
        """Return whether it calls a function that the recipe does not name."""
        return False

    @property
    def credits_turns(self) -> bool:
        """Return whether each turn of an episode is credited with its own reward."""
        return False


class FunctionReward(_Reward):
    """A Python function, sync or async, for one response or a batch.

    One: ``def f(prompt, response, label) -> float``. Batch: ``def f(prompts, responses, labels) ->
    list[float]``. ``metadata`` (batch: ``metadatas``) receives the row's other columns. The
    parameter names select the form."""

    kind: Literal["function"] = "function"
    function: str | None = None
    """``path/to/file.py:name`` or ``package.module:name``. None: a callable passed to
    ``burnish.run``. ``openrlhf:path/to/file.py``: the ``reward_func`` of a reward file of
    OpenRLHF."""
    timeout_s: float = Field(1800.0, gt=0)
    """Maximum seconds of a call with all responses of a batch. A longer one is a failure
    (``on_reward_failure``). After 30 s the console names the function."""

    @property
    def needs_callable(self) -> bool:
        return self.function is None

    @property
    def user_code(self) -> list[tuple[str, str]]:
        return [] if self.function is None else [("function", self.function)]

    def rules(self) -> Iterator[str]:
        for key, spec in self.user_code:
            if problem := code_problem(spec):
                yield f"{key}: {problem}"


class ModelReward(_Reward):
    """A reward model from ``burnish rm``, or a HuggingFace sequence classifier."""

    runs_alone: ClassVar[bool] = False

    kind: Literal["model"] = "model"
    model: ModelConfig
    """Reward model."""
    micro_batch_size: int = Field(8, ge=1)
    """Rows per forward pass."""
    normalize: bool = False
    """Use (score - mean) / std with ``reward_mean`` and ``reward_std`` of the model's config
    (process reward models: ``process_reward_stats``), from ``burnish rm`` with ``eval.data`` and
    ``burnish export``."""
    output_weights: dict[str, float] | None = None
    """Reward of a classifier with several outputs: their weighted sum, by name (``id2label``), such
    as ``{good: 1, bad: -1}`` for the log-odds. None: ``reward_weights`` of the model's config."""
    step_aggregation: StepAggregation | None = None
    """Score from a process reward model's step probabilities (``process_reward`` in its config):
    minimum, product, last or mean. None: min; required for other models."""
    step_separator: str | None = Field(None, min_length=1)
    """Process reward models: separator of a response's steps. None: that of training."""

    def rules(self) -> Iterator[str]:
        if self.normalize and self.output_weights is not None:
            yield (
                "normalize=true uses the mean and standard deviation of the model's own weights, "
                "but output_weights sets others; use running_norm, or remove one"
            )
        if self.normalize and self.running_norm is not None:
            yield (
                f"normalize=true and running_norm={self.running_norm} would both normalize the "
                "score; remove one (normalize: by the held-out rows of burnish rm)"
            )


class MathReward(_Reward):
    """1 if the response's last answer equals the label mathematically (math-verify), else 0.
    Answers are searched for after the last closing tag of reasoning, such as ``</think>``: the
    last box, ``<answer>``, ``####`` or text after "answer is"; else the last formula or number.
    Boxes with only spaces, punctuation, "and" or "or" between them are one answer, a list.
    Quotes and backticks around an answer are not part of it, and "negative 7" is -7. Labels that
    are words or dates are compared as text. Missing labels, lists of several and sentences are
    data errors."""

    kind: Literal["math"] = "math"
    timeout_s: float = Field(5.0, gt=0)
    """Maximum seconds per comparison; a longer one counts as wrong."""
    num_workers: int = Field(1, ge=1)
    """Worker processes."""


class PythonCodeReward(_Reward):
    """Run the response's Python code against the tests in the label, in a sandbox.

    Tests are asserts, pairs of stdin and stdout, or unit tests (docs/rewards.md lists the forms). A
    response without code scores 0."""

    kind: Literal["python_code"] = "python_code"
    code: Literal["last_block", "all"] = "last_block"
    """Code in the response. last_block: the last fenced block of Python or of no language, after
    the last closing tag of reasoning; a block that is not closed ends with the response. all: all
    text after that tag."""
    score: Literal["all", "share"] = "all"
    """all: 1 if every test passes, else 0; the first failure ends the tests. share: the share of
    tests that pass."""
    test_timeout_s: float = Field(5.0, gt=0)
    """Maximum seconds of CPU time of one test, and a third of its maximum total time. A longer test
    fails."""
    timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds of all tests of a response. Tests that have not run by then fail."""
    sandbox: SandboxConfig = Field(default_factory=BubblewrapSandbox)
    """Sandbox in which code and tests run."""

    def rules(self) -> Iterator[str]:
        if self.test_timeout_s > self.timeout_s:
            yield (
                f"test_timeout_s={self.test_timeout_s:g} exceeds timeout_s={self.timeout_s:g}, "
                "the limit of all tests; lower test_timeout_s, or raise timeout_s"
            )


class EnvironmentReward(_Reward):
    """Score computed by the prompt's own environment."""

    kind: Literal["environment"] = "environment"
    timeout_s: float = Field(1800.0, gt=0)
    """Maximum seconds of the environment's steps for all responses of a batch."""


class EpisodeReward(_Reward):
    """Rewards that the environment of a multi-turn episode gave in its steps
    (``rollout.episodes``)."""

    runs_alone: ClassVar[bool] = False

    kind: Literal["episode"] = "episode"
    reward: str | None = None
    """Name of the environment's reward. None: the sum of all its rewards."""
    per_turn: bool = False
    """Credit each turn with its own reward, at its last token, instead of the episode's sum at the
    end. For advantages on tokens (gae, reinforce_pp)."""

    @property
    def credits_turns(self) -> bool:
        return self.per_turn

    def rules(self) -> Iterator[str]:
        if self.per_turn and self.running_norm is not None:
            yield "per_turn=true and running_norm cannot be combined; remove one"


class RemoteReward(_Reward):
    """A reward server over HTTP, compatible with OpenRLHF's.

    ``POST {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}`` returns
    ``{"rewards": [number, ...]}``, optionally with ``"scores"`` and ``"extra_logs": {name: number
    or list}``, whose means are the metrics ``reward/<name>/scores`` and ``reward/<name>/<key>``.
    ``burnish serve-reward MODEL`` is such a server."""

    runs_alone: ClassVar[bool] = False

    kind: Literal["remote"] = "remote"
    urls: tuple[str, ...] = Field(min_length=1)
    """Full addresses (``http://host:5000/get_reward``) of equivalent servers; the least busy one
    gets a request. http is unencrypted, token included: use https outside a private network."""
    batch_size: int = Field(32, ge=1)
    """Maximum responses per request."""
    max_concurrency: int = Field(16, ge=1)
    """Maximum concurrent requests, over all ``urls``."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Timeout of opening a connection."""
    read_timeout_s: float = Field(180.0, gt=0)
    """Timeout from request to the last byte of its reply."""
    retries: int = Field(5, ge=0)
    """Retries after a connection error, a timeout, or status 408, 425, 429 or 5xx, plus one per
    additional URL. After other failures, each URL not yet tried gets the request once (see
    ``on_reward_failure.retries``)."""
    backoff_s: float = Field(1.0, ge=0)
    """Wait before the first retry if no other URL is left; doubles each time, and half is random. A
    longer Retry-After takes precedence."""
    max_backoff_s: float = Field(30.0, ge=0)
    """Maximum wait, even with a longer Retry-After."""
    rest_s: float = Field(10.0, ge=0)
    """Seconds without requests to a failed URL while another one works."""
    max_reply_bytes: int = Field(4 << 20, ge=1)
    """Maximum size of a reply. A longer one is a failure, not read to its end."""
    token_env: str | None = None
    """Environment variable with the token for ``Authorization: Bearer``. Set its name, not the
    token: the recipe is written to the run folder. None: no token."""
    special_tokens: bool = True
    """Include the response's special tokens, such as its end token, in ``query``, to show
    truncation. False: text without them, as for function rewards."""
    use_proxy: bool = False
    """Use the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY. False: ignore them."""

    def rules(self) -> Iterator[str]:
        yield from client_problems(self, _EXAMPLE)

    def advice(self) -> Iterator[str]:
        yield from client_advice(self)


RewardConfig = Annotated[
    FunctionReward
    | ModelReward
    | MathReward
    | PythonCodeReward
    | EnvironmentReward
    | EpisodeReward
    | RemoteReward,
    Field(discriminator="kind"),
]


def weigh_nothing(rewards: Sequence[RewardConfig]) -> bool:
    """Return whether there are rewards and all of their weights are 0, so that the weighted sum is
    always 0."""
    return bool(rewards) and all(reward.weight == 0 for reward in rewards)


def no_weight_advice(rewards: Sequence[RewardConfig]) -> Iterator[str]:
    """Yield advice if all scores are 0 because no reward has a weight."""
    if weigh_nothing(rewards):
        yield (
            "every entry of rewards has weight 0, so every response would have the score 0; set "
            "a weight above 0"
        )


def running_norm_rules(rewards: Sequence[RewardConfig]) -> Iterator[str]:
    """Yield an error for each reward with ``running_norm``, which rows of data cannot have."""
    for i, reward in enumerate(rewards):
        if reward.running_norm is not None:
            yield (
                f"rewards[{i}].running_norm={reward.running_norm} normalizes each score by the "
                "statistics of all previous scores, so a response's score would depend on its "
                "position, but rows need the raw score; remove it"
            )


class FailurePolicy(Node):
    """Treatment of a reward that raises, or returns NaN, infinity, a number beyond fp32, or a wrong
    count or type."""

    retries: int = Field(0, ge=0)
    """Retries of the failed call before ``then`` applies."""
    then: Literal["fail", "drop_group"] = "fail"
    """``fail``: stop the run with the error. ``drop_group``: drop the group, counted in metrics."""


class OverlongPenalty(Node):
    """DAPO's soft length penalty (arXiv 2503.14476): rises linearly from 0 to ``penalty`` over the
    last ``buffer_len`` sampled tokens before ``generate_max_len`` (episodes: before
    ``episodes.max_tokens`` - ``prompt_max_len``)."""

    buffer_len: int = Field(ge=1)
    """Sampled tokens over which the penalty rises."""
    penalty: float = Field(1.0, ge=0)
    """Penalty at the limit."""


class ShapingConfig(Node):
    """Changes to the reward after the weighted sum, before any baseline.

    Order: each reward's score, ``normalize`` (reward models), ``running_norm``, ``weight``; the
    sum; ``reward_clip``; the penalties, which are not clipped."""

    older_keys = (
        OlderKeys(
            "overlong",
            "overlong_buffer_len",
            switched_by("buffer_len", 0),
            {"overlong_penalty": ("penalty", 1.0)},
        ),
    )

    reward_clip: float | None = Field(None, gt=0)
    """Clip the weighted sum to [-c, c]. None: no clipping."""
    length_penalty: float = Field(0.0, ge=0)
    """Penalty per sampled token of a response or episode (end tokens included). 0: none."""
    truncation_penalty: float = Field(0.0, ge=0)
    """Penalty for reaching the length limit (episodes: status max_tokens or max_turn_tokens)."""
    overlong: OverlongPenalty | None = None
    """DAPO's soft length penalty. None: none."""


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return the name of each reward: its own, else its kind. A repeated name gets a number."""
    names: list[str] = []
    for entry in rewards:
        base = name = entry.name or entry.kind
        n = 1
        while name in names:
            n += 1
            name = f"{base}_{n}"
        names.append(name)
    return names


class Scoring(NamedTuple):
    """Rewards of the responses of a job."""

    rewards: tuple[RewardConfig, ...] = ()
    in_episodes: bool = False
    """True if responses are conversations of episodes."""
    on_failure: FailurePolicy = FailurePolicy()


def each_reward_rules(
    advantage: AdvantageConfig, rewards: Sequence[RewardConfig], shaping: ShapingConfig
) -> Iterator[str]:
    """Yield an error for each reward that is already normalized, and for shaping of their sum, if
    the advantage normalizes each reward."""
    if not advantage.normalizes_each:
        return
    if shaping != ShapingConfig():
        yield (
            "shaping changes the sum of the rewards, but algorithm.advantage.normalize_each uses "
            "each reward by itself; remove shaping, or express it as a reward with a weight"
        )
    for i, reward in enumerate(rewards):
        if reward.running_norm is not None:
            yield (
                f"rewards[{i}].running_norm={reward.running_norm} has no effect with "
                "algorithm.advantage.normalize_each, which normalizes the raw scores in each "
                "group; remove one of them"
            )


def running_norm_advice(
    rewards: Sequence[RewardConfig], watched: Mapping[str, str | None]
) -> Iterator[str]:
    """Yield one sentence for each key of ``watched`` whose metric contains a reward that is
    normalized by its running statistics. ``watched``: key of the recipe -> metric."""
    names = [entry.name or entry.kind for entry in rewards if entry.running_norm]
    for key, metric in watched.items():
        if names and metric in ("reward/mean", "reward/trained_mean", "reward/std"):
            yield (
                f"{key}={metric} is normalized by running statistics (running_norm of "
                f"{', '.join(names)}), which change, so its values are not comparable; set "
                f"{key}=reward/{names[0]} (the raw score)"
            )
