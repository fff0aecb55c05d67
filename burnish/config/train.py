"""Config of training: batches, optimizer, schedule, critic and checkpoints, and the rules of a
reference model that follows the policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node, OlderKeys, PathText, on_off
from burnish.config.cluster import ClusterConfig, ClusterRole
from burnish.config.model import ModelConfig, PrecisionConfig, ReferenceConfig
from burnish.config.older import OLDER_ADAM_KEYS
from burnish.config.schedule import ScheduleConfig
from burnish.config.train_engines import DeepSpeedEngine, TorchEngine, TrainEngineConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.optimizers.adamw.config import AdamW
from burnish.optimizers.kinds import OptimizerConfig

Checkpointing = bool | Literal["selective"]
"""Activations that are recomputed in backward: none, all, or those that are cheap to compute."""


class TrainConfig(ScheduleConfig):
    """Batches, optimizer and learning-rate schedule."""

    older_keys: ClassVar[tuple[OlderKeys, ...]] = (*ScheduleConfig.older_keys, OLDER_ADAM_KEYS)

    engine: TrainEngineConfig = TorchEngine()
    """Train engine."""
    train_batch_size: int | None = Field(None, ge=1)
    """B: samples per optimizer step, over all micro-batches and ranks. Set two of B, b,
    gradient_accumulation_steps."""
    micro_train_batch_size: int | None = Field(None, ge=1)
    """b: samples per forward/backward pass on one rank."""
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    """Backward passes per optimizer step = B / (b x ranks)."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Tokens per micro-batch, instead of b samples (dynamic batching). None: b samples."""
    layout: Literal["shared_prefix", "packed", "padded"] = "shared_prefix"
    """padded: a rectangle. packed: concatenated rows, no padding. shared_prefix: packed, each
    group's prompt computed once. Results are the same."""
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    """Attention of packed rows. flash: FlashAttention over the lengths of rows, without masks or
    copies (bf16 or fp16 on a GPU; heads of equal sizes up to 256; no softcap, sinks or dropout).
    sdpa: torch's, over rectangles of similar rows. auto: flash if possible."""
    compile: Literal["off", "layers"] = "off"
    """layers: compile the decoder layers around their attention (torch.compile; once per class of
    layer, for rows of any length). Fewer kernels; half a minute at the first step."""
    deterministic: bool = False
    """Deterministic kernels in training passes on a GPU: repeated and resumed updates have equal
    bits. Attention took 1.5 to 1.8 times as long on an H100. CPU runs are
    deterministic without it; samples of vLLM are not with it."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    optimizer: OptimizerConfig = AdamW()
    """Optimizer: a kind, such as ``muon``, or a mapping with the kind and its settings."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum global gradient norm. None: no clipping."""
    max_consecutive_skips: int = Field(10, ge=1)
    """Save and stop after this many consecutive steps with a non-finite loss or gradient. Overflows
    that a dynamic loss scale may resolve do not count (its floor stops the run)."""
    max_steps_without_signal: int | None = Field(100, ge=1)
    """Save and stop after this many consecutive steps without a signal: equal rewards in each group
    (without a group baseline: in the step), chosen equal to rejected in each pair, KTO labels all
    equal. ``stopped.txt`` gives the cause. None: never. Not for sft, distill, process reward
    models."""
    gradient_checkpointing: Checkpointing = False
    """Recompute activations in backward. true: all of a layer but its input (about a third more
    compute, least memory). selective: keep matrix products and attention, recompute the rest
    (between the two in both)."""
    on_oom: Literal["fail", "retry_smaller"] = "fail"
    """Pass that runs out of memory. fail: end with a report. retry_smaller: repeat the update, with
    the same result, in halved micro-batches; keep their size for the rest of the run. Ends if one
    unit does not fit. Needs ranks that do not wait for each other in a pass (the torch engine's
    replicas)."""
    moe_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the router's load-balancing loss (arXiv 2101.03961) of policies and reward models
    with experts; usually 0.001 to 0.01. Computed per micro-batch and weighted by tokens, so small
    micro-batches are balanced one by one. 0: none."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights. None: no average."""
    logprob_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens per log-prob computation, with 2.3 [chunk, vocab] fp32 buffers at peak (4.5 with
    entropy_coef), or one in the compute format with the kernels of a GPU. None: 512 on a CPU, as
    many as take 0.7 GB on a GPU (2048 without the kernels)."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        yield from optimizer_rules(self)
        if self.max_tokens_per_micro_batch and (
            self.micro_train_batch_size or self.gradient_accumulation_steps
        ):
            yield (
                "max_tokens_per_micro_batch builds micro-batches by tokens, so "
                "micro_train_batch_size and gradient_accumulation_steps have no effect; remove "
                "them, or max_tokens_per_micro_batch"
            )
        if self.on_oom == "retry_smaller" and (problem := on_oom_problem(self)) is not None:
            yield problem

    def advice(self) -> Iterator[str]:
        if self.lr >= 0.1:
            yield (
                f"lr={self.lr:g} is too high for pretrained weights: AdamW changes every weight "
                "by about lr in each step, and weights are about 0.02 in size; 1e-6 to 1e-4 is "
                "usual"
            )


def optimizer_rules(train: TrainConfig) -> Iterator[str]:
    """Yield an error if the engine cannot run the optimizer."""
    problem = train.optimizer.engine_problem(train.engine)
    kind, own_updates = train.optimizer.kind, train.engine.own_updates
    if problem is None and own_updates is not None and kind not in own_updates:
        problem = (
            f"optimizer.kind={kind} with engine.kind={train.engine.kind}: this engine makes the "
            f"updates itself, and only those of {' and '.join(own_updates)}; use "
            f"engine.kind=torch, or optimizer.kind={own_updates[0]}"
        )
    if problem is not None:
        yield problem


def on_oom_problem(train: TrainConfig) -> str | None:
    """Return why an engine cannot repeat a pass with fewer rows, or None if it can."""
    waits_by = train.engine.waits_by
    if waits_by is None:
        return None
    return (
        f"on_oom=retry_smaller with {waits_by.removeprefix('train.')}: all ranks synchronize in "
        "every pass, so a rank that aborts one would leave the others waiting in its collectives, "
        "where they cannot take part in a vote to repeat it; use on_oom=fail with a smaller "
        "micro_train_batch_size or max_tokens_per_micro_batch, or settings of 'burnish plan --fit'"
    )


def expert_rules(train: TrainConfig, model: ModelConfig) -> Iterator[str]:
    """Yield an error if a load-balancing loss is set and the model has no experts."""
    if train.moe_aux_loss_coef and model.scratch is not None:
        yield (
            f"train.moe_aux_loss_coef={train.moe_aux_loss_coef:g} balances the load of experts, "
            "but model.scratch has none; remove it"
        )


def parallel_rules(train: TrainConfig, cluster: ClusterConfig) -> Iterator[str]:
    """Yield an error for each role whose number of ranks is not a multiple of the ranks that
    compute the same rows."""
    size = train.engine.ranks_per_row
    roles: tuple[ClusterRole, ...] = ("policy", "reference", "teacher", "critic", "reward")
    sizes = {f"cluster.{role}_ranks": cluster.ranks(role) for role in roles}
    reported: set[int] = set()
    for name, ranks in sizes.items():
        if ranks % size and ranks not in reported:
            reported.add(ranks)
            yield (
                f"{train.engine.parallel_setting} does not divide {name}={ranks}, but {size} "
                f"ranks compute the same rows; use a multiple of {size}"
            )


class RLTrainConfig(TrainConfig):
    """Batches, optimizer and schedule of an RL update."""

    epochs_per_rollout: int = Field(1, ge=1)
    """Passes over the rollout buffer."""


class CriticConfig(Node):
    """Value model of PPO."""

    model: ModelConfig | None = None
    """Initial model, with the policy's tokens. None: the policy's. A language model gets a new
    value head of zeros; a reward model keeps its own."""
    lr: float | None = Field(None, gt=0)
    """Learning rate of the critic. None: ``train.lr``."""
    optimizer: OptimizerConfig | None = None
    """Optimizer of the critic. None: ``train.optimizer``."""
    schedule: ScheduleConfig | None = None
    """Learning-rate schedule of the critic. None: that of ``train``."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Maximum global gradient norm of the critic. None: ``train.max_grad_norm``."""
    freeze_policy_steps: int = Field(0, ge=0)
    """RL steps at the start of the run that train the critic alone; the policy keeps its weights.
    Its schedule starts after them."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clip range of the value around its old value (arXiv 1707.06347 implementations). None:
    none."""

    def for_role(self, train: TrainConfig) -> TrainConfig:
        """Return the settings of the critic's engine. ``train``: those of the policy."""
        changed: dict[str, Any] = {}
        if self.optimizer is not None:
            changed["optimizer"] = self.optimizer
        if self.schedule is not None:
            changed |= dict(self.schedule)
        if self.max_grad_norm is not None:
            changed["max_grad_norm"] = self.max_grad_norm
        return train.model_copy(update=changed)


def critic_rules(
    critic: CriticConfig, train: TrainConfig, *, max_steps: int | None
) -> Iterator[str]:
    """Yield an error if the critic's own settings do not fit the run. ``max_steps``: None if
    unknown."""
    settings = critic.for_role(train)
    if critic.optimizer is not None:
        for problem in optimizer_rules(settings):
            yield f"critic: {problem.replace('train.optimizer', 'critic.optimizer')}"
    if max_steps is not None and critic.freeze_policy_steps >= max_steps:
        yield (
            f"critic.freeze_policy_steps={critic.freeze_policy_steps} with max_steps={max_steps}: "
            "the policy would never be trained; use fewer"
        )


def _older_export(value: Any) -> dict[str, Any] | None:
    """Return the section of ``export_at_end`` when it was a boolean or a path."""
    section = on_off(value)
    return {"path": section} if isinstance(section, str) else section


class ExportConfig(Node):
    """HuggingFace folder with the trained model."""

    short_key = "path"

    path: PathText = "{run_dir}/export"
    """Folder. ``{run_dir}`` is replaced by the run folder."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the weights. The masters have fp32."""
    lora: Literal["merge", "adapter"] = "merge"
    """Form of a model with adapters: merged weights, or the adapter alone."""

    def rules(self) -> Iterator[str]:
        if not self.path.strip():
            yield "path is empty; use the path of a new folder, or remove it"
        if set("{}") & set(self.path.replace("{run_dir}", "")):
            yield (
                f"path={self.path} contains braces, but only {{run_dir}} is replaced; remove the "
                "others"
            )


class CheckpointConfig(Node):
    """When checkpoints are saved and which are kept. Saving is on by default."""

    older_keys = (
        OlderKeys(
            "export_at_end",
            "export_at_end",
            _older_export,
            {"export_dtype": ("dtype", None), "export_lora": ("lora", None)},
        ),
    )

    every_n_steps: int = Field(50, ge=0)
    """Save every this many steps. 0: only at the end and on interruption."""
    every_minutes: float | None = Field(30.0, gt=0)
    """Also save at the end of a step, this many minutes after the last checkpoint or the first
    step's start. Ignored with every_n_steps=0. None: by steps alone."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep: Literal["full", "weights"] = "full"
    """Contents of kept checkpoints. weights: each save reduces all older ones to fp32 weights (and
    the moving average), a third of the size with AdamW; they can be exported, not resumed. The
    newest is always full."""
    export_at_end: Annotated[ExportConfig | None, BeforeValidator(on_off)] = None
    """Write the trained model as a HuggingFace folder once all steps are done: ``true``, the path
    of the folder, or a mapping. None: do not."""
    in_background: bool = False
    """Train while a checkpoint is written (needs train.engine.sharding=full). Each rank first
    copies its state to CPU memory. A checkpoint is valid at the first end of
    a step after it is complete; until then a crash resumes from the previous one."""
    best_metric: str | None = None
    """Also keep the checkpoint that is the best by this metric, e.g. ``eval/pass@1``, among those
    that are saved at a step that measures it. None: the job's default."""
    best_mode: Literal["max", "min"] | None = None
    """Direction in which ``best_metric`` improves. None: by name (min: losses,
    kl, nll, lengths, truncated and skipped shares, mismatches, times; max: rewards, pass@k,
    accuracies, margins). Required for other metrics."""

    def export_folder(self, run_dir: Path) -> Path | None:
        """Return the folder of the export at the end of a run; None if there is none."""
        options = self.export_at_end
        return None if options is None else Path(options.path.replace("{run_dir}", str(run_dir)))

    def rules(self) -> Iterator[str]:
        name = self.best_metric
        if name is not None and self.best_mode is None and better(name) is None:
            yield (
                f"best_metric={name}: its name does not show whether higher or lower is better; "
                "set best_mode=max or best_mode=min"
            )


_LESS = re.compile(
    r"(.*_)?(loss|kl|nll|ppl|perplexity|len|len_max|truncated_frac|equal_groups_frac|no_signal_frac"
    r"|failed_frac|clip_frac|mismatch_\w+|approx_kl|skipped\w*|overflows|oom_retries|loss_spike|grad_norm"
    r"|groups_dropped|timeouts|errors|retries|peak_bytes|s|(mse|mae)(_\w+)?)"
)
_MORE = re.compile(
    r"(.*_)?(pass@\d+|reward|accuracy|margin|agreement|explained_variance|row_exact|tokens_per_s"
    r"|kept_reward|reward_margin|reward_chosen|(pearson|spearman|accuracy)(_\w+)?)"
)


def better(metric: str) -> Literal["max", "min"] | None:
    """Return whether a larger or smaller value of a metric is better, by its name. Return None if
    the name does not determine it.

    >>> [better(n) for n in ("eval/pass@1", "eval/nll", "reward/exact", "train/ratio")]
    ['max', 'min', 'max', None]
    """
    group, _, last = metric.rpartition("/")
    if (group == "reward" or re.fullmatch("eval(/[^/]+)?/reward", group)) and last not in (
        "std",
        "shaping",
    ):
        counts = ("truncated_frac", "equal_groups_frac", "groups_dropped")
        return "min" if last in counts else "max"  # other names are those of rewards
    if _MORE.fullmatch(last):
        return "max"
    return "min" if _LESS.fullmatch(last) else None


def checkpoint_rules(
    checkpoint: CheckpointConfig, train: TrainConfig, *, ranks: int
) -> Iterator[str]:
    """Yield an error if checkpoints cannot be saved in the background."""
    if not checkpoint.in_background:
        return
    if not train.engine.saves_own_shards:
        yield (
            f"checkpoint.in_background=true with {train.engine.saves_first}; only the ranks of "
            "train.engine.sharding=full (train.engine.kind=torch) each write a copy of their own "
            "part; set that, or remove in_background"
        )
    elif ranks == 1:
        yield (
            "checkpoint.in_background=true has no effect with one rank, whose state is not "
            "sharded and is saved synchronously; set cluster.runtime=ray and "
            "cluster.policy_ranks above 1, or remove it"
        )


def export_rules(
    checkpoint: CheckpointConfig, model: ModelConfig, *, kind: ClusterRole
) -> Iterator[str]:
    """Yield an error if the model at the end of the run cannot be exported as an adapter."""
    options = checkpoint.export_at_end
    if options is None or options.lora == "merge":
        return
    name = "checkpoint.export_at_end.lora=adapter"
    if model.lora is None:
        yield f"{name} is the form of adapters, but model.lora is not set; remove it"
    elif kind != "policy":
        yield f"{name}: an adapter does not contain the head of a {kind} model; use merge"


class PtxConfig(Node):
    """PPO-ptx (arXiv 2203.02155): also train the policy on rows of other text in every optimizer
    step, to limit forgetting."""

    data: SFTDataConfig
    """Rows as in sft, with the loss on all of a plain text (``text_key``). Drawn separately from
    the prompts; saved and resumed with the run."""
    ptx_coef: float = Field(gt=0)
    """Weight of the rows' mean negative log-likelihood per token in the policy's loss. The paper's
    27.8 is for a sum over unnormalized rewards; for whitened advantages start with 0.1 to 1."""
    batch_size: int = Field(ge=1)
    """Rows per optimizer step, over all micro-batches and ranks; split like the samples."""


def ptx_rules(ptx: PtxConfig | None, *, temperature: float) -> Iterator[str]:
    """Yield an error for each setting of a run that is inconsistent with ``ptx``."""
    if ptx is not None and temperature != 1.0:
        yield (
            f"ptx with rollout.temperature={temperature:g}: the policy's log-probs are computed "
            "at that temperature, but a language-model loss needs 1; use temperature=1.0, or "
            "remove ptx"
        )


def reference_sync_rules(
    reference: ReferenceConfig | None,
    cluster: ClusterConfig,
    engine: TrainEngineConfig,
    *,
    holds_reference: bool,
) -> Iterator[str]:
    """Yield an error for each setting with which the reference cannot follow the policy.
    ``holds_reference``: it is the base of the policy's adapters."""
    if reference is None or reference.moving is None:
        return
    key = "reference.moving"
    if holds_reference:
        yield (
            f"{key} with model.lora: the reference is the base of the adapters, without weights of "
            "its own; set reference.model.path to the base, which loads it a second time"
        )
    if reference.model is not None and reference.model.lora is not None:
        yield (
            f"{key} with reference.model.lora: the policy's merged weights cannot be mixed into "
            "adapters; remove reference.model.lora (burnish export merges adapters)"
        )
    if isinstance(engine, DeepSpeedEngine) and engine.zero_stage == 3:
        yield (
            f"{key} with train.engine.zero_stage=3: DeepSpeed partitions the frozen weights, and "
            "cannot change them; use zero_stage=2, or train.engine.kind=torch with sharding=full"
        )
    offloaded = [r for r in ("policy", "reference") if r in cluster.offload_between_phases]
    if offloaded:
        yield (
            f"{key} needs policy and reference at the same time; remove {' and '.join(offloaded)} "
            "from cluster.offload_between_phases"
        )


def reference_sync_advice(
    reference: ReferenceConfig | None, precision: PrecisionConfig
) -> Iterator[str]:
    """Warn about an update that is mostly rounded away in the format of the reference."""
    smallest = {"bf16": 2.0**-6, "fp16": 2.0**-9}.get(precision.dtype, 0.0)
    moving = None if reference is None else reference.moving
    if moving is not None and moving.mixup_alpha < smallest:
        yield (
            f"reference.moving.mixup_alpha={moving.mixup_alpha:g} with precision.dtype="
            f"{precision.dtype}: the reference has the weights in this format, which rounds small "
            f"changes away; use {smallest:g} or more with a larger every_n_steps, or fp32"
        )
