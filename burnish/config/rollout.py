"""How responses are sampled, and how the policy is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node
from burnish.config.data import PromptDataConfig
from burnish.config.rewards import RewardConfig

StopText = Annotated[str, Field(min_length=1)]  # an empty one is in every response
TokenId = Annotated[int, Field(ge=0)]


class SamplingConfig(Node):
    """How one response is sampled."""

    generate_max_len: int = Field(256, ge=1)
    """Most new tokens per response."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature. 0: greedy (not where the samples train the policy)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probability reaches this. 1: all."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most probable tokens. 0: all."""
    stop: tuple[StopText, ...] = ()
    """Strings that end a response (the string stays in it)."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Token ids that end a response, beside the tokenizer's end token."""


class LocalEngine(Node):
    """Burnish's own engine, on CPU or one GPU: in the trainer's process, or on Ray in each rollout
    worker."""

    kind: Literal["local"] = "local"
    max_batch_size: int = Field(128, ge=1)
    """Most responses decoded at the same time; the rest wait and take free places."""
    max_prefill_tokens: int = Field(8192, ge=1)
    """Most prompt tokens in one prefill pass."""
    cuda_graphs: bool = True
    """On CUDA, replay decode steps as graphs. Their cache holds ``max_batch_size`` sequences of
    full length."""
    sleep_between_rollouts: bool = False
    """Give the graphs' cache back after every rollout: less memory while training, graphs are
    recorded again."""

    @property
    def tensor_parallel_size(self) -> int:
        """Each worker has a copy of the model."""
        return 1


class VllmEngine(Node):
    """vLLM, in the trainer's process or on Ray in each rollout worker (with more processes of
    its own if tensor_parallel_size > 1). Weights are copied in after every step, checked, and never
    read from the model's folder."""

    kind: Literal["vllm"]
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs (on CPU: processes) that share one copy of the model. Must divide its attention heads
    and its key/value heads."""
    max_num_seqs: int = Field(128, ge=1)
    """Most responses decoded at the same time; the rest wait and take free places."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt with its response, in tokens. None: the longest that the recipe allows
    (prompt_max_len + generate_max_len, of training or evaluation)."""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """CUDA: share of the GPU's memory for vLLM's weights and cache; the trainer needs the rest."""
    kv_cache_bytes: int | None = Field(None, ge=1)
    """Bytes of each process's key/value cache. None: on CPU room for ``max_num_seqs`` sequences of
    full length, at most 4 GiB; on CUDA what gpu_memory_utilization leaves."""
    prefix_caching: bool = True
    """Compute the blocks that prompts have in common once; so the n samples of a prompt share its
    prefill, but for its last block."""
    enforce_eager: bool = False
    """CUDA: no compiled code and no recorded graphs. (On CPU it is always so.)"""
    sleep_between_rollouts: bool = False
    """CUDA: after every rollout of a training step free the weights and the cache, for the trainer;
    the updated weights are loaded before the next one. On CPU vLLM has no sleep, and this does
    nothing."""


def _kind_left_out(value: Any) -> Any:
    """A name is a kind; keys without a kind are the local engine's."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "local", **value} if isinstance(value, dict) else value


RolloutEngineConfig = Annotated[
    Annotated[LocalEngine | VllmEngine, Field(discriminator="kind")],
    BeforeValidator(_kind_left_out),
]


class DynamicSampling(Node):
    """Groups that teach nothing are left out and replaced by those of fresh prompts within the same
    step (DAPO, arXiv 2503.14476): those whose scores are all equal, up to rounding, once
    ``shaping.reward_clip`` has clipped them and before penalties, or outside of the band. The
    metrics ``reward/mean``, ``reward/<name>`` and ``reward/equal_groups_frac`` are over all groups
    that were sampled, ``reward/trained_mean`` and ``reward/std`` over those that are trained on."""

    above: float | None = None
    """Leave groups out whose mean score (the plain weighted sum of rewards) is not above this.
    None: no bound."""
    below: float | None = None
    """Leave groups out whose mean score is not below this. None: no bound."""
    max_refills: int = Field(10, ge=1)
    """Rounds of fresh prompts within one step, each of as many as are missing (so that no group is
    sampled for nothing). Where they do not fill it, the rest is made up of the newest groups that
    were left out, and said so."""

    def rules(self) -> Iterator[str]:
        if self.above is not None and self.below is not None and self.above >= self.below:
            yield f"above={self.above:g} and below={self.below:g} leave no score; swap them"


class RolloutConfig(SamplingConfig):
    """One rollout: P prompts with n samples each fill the buffer that one RL step trains on."""

    rollout_batch_size: int = Field(ge=1)
    """PROMPTS per rollout (P)."""
    n_samples_per_prompt: int = Field(1, ge=1)
    """Samples per prompt (n); the buffer holds P x n."""
    engine: RolloutEngineConfig = LocalEngine()
    """Which engine samples."""
    dynamic_sampling: DynamicSampling | None = None
    """Leave out groups whose scores are all equal, or outside of a band, and sample fresh prompts
    in their place (``{}`` for the defaults). None: train on every group."""

    def rules(self) -> Iterator[str]:
        if self.temperature == 0:
            yield (
                "temperature=0 gives the same response n times and no exploration; use a value "
                "above 0 (1.0 is usual)"
            )
        if self.dynamic_sampling is not None and self.n_samples_per_prompt == 1:
            yield (
                "dynamic_sampling leaves groups of equal scores out, and with "
                "n_samples_per_prompt=1 every group is one; use 2 or more (16 is usual)"
            )


class EvalConfig(Node):
    """Held-out evaluation: pass@1 and pass@k."""

    data: PromptDataConfig
    """Held-out prompts. Read once, in order, without shuffling."""
    num_prompts: int | None = Field(None, ge=1)
    """Take only the first this many. None: all."""
    every_n_steps: int = Field(0, ge=0)
    """Evaluate every this many steps, beside step 0 and the end. 0: only those two."""
    n_samples_per_prompt: int = Field(1, ge=1)
    """Samples per prompt."""
    pass_k: tuple[int, ...] = (1,)
    """For which k pass@k is reported (unbiased estimator of arXiv 2107.03374); each at most
    n_samples_per_prompt."""
    pass_threshold: float = 1.0
    """A response passes if its reward is at least this: the plain score if one reward counts,
    whatever its weight; of several, their weighted sum."""
    temperature: float = Field(0.0, ge=0)
    """0: greedy."""
    generate_max_len: int | None = Field(None, ge=1)
    """Most new tokens. None: as in rollout."""
    stop: tuple[StopText, ...] | None = None
    """Strings that end a response. None: as in rollout."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """Token ids that end a response. None: as in rollout."""

    def rules(self) -> Iterator[str]:
        for k in self.pass_k:
            if not 1 <= k <= self.n_samples_per_prompt:
                yield (
                    f"pass_k has {k}, and k must lie in "
                    f"1..n_samples_per_prompt={self.n_samples_per_prompt}"
                )
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            yield (
                "temperature=0 gives the same response every time; use n_samples_per_prompt=1 or a "
                "temperature above 0"
            )


def pass_advice(config: EvalConfig, rewards: Sequence[RewardConfig]) -> Iterator[str]:
    """Yield one sentence if no response can pass, unless a score is above 1: the weighted sum of
    several rewards of 1 each stays below the threshold."""
    weights = [entry.weight for entry in rewards if entry.weight]
    most = sum(weight for weight in weights if weight > 0)
    if len(weights) > 1 and most < config.pass_threshold - 1e-9:
        yield (
            f"eval.pass_threshold={config.pass_threshold:g} is above the sum of the positive "
            f"weights ({most:g}): with scores of at most 1 no response passes, and eval/pass@1 "
            f"stays 0; set eval.pass_threshold={most:g} or less"
        )
