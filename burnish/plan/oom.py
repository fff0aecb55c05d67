"""Report of a run that ran out of memory: the phase, the plan compared with measurements, and
suggested changes, cheapest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from burnish.config.arithmetic import BatchPlan
from burnish.config.job import JobConfig
from burnish.config.load import changed_config, changed_if_valid
from burnish.config.roles import TrainRole
from burnish.config.train import on_oom_problem
from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.models.logprobs import chunk_tokens
from burnish.plan.engine_profile import Suggestion, profile_class
from burnish.plan.hardware import Hardware
from burnish.plan.launch import hardware_of
from burnish.plan.memory_plan import Plan
from burnish.plan.plan_vs_actual import PLANNED_AS, PlanVsActual, plan_vs_actual_text
from burnish.plan.predict import make_plan
from burnish.plan.rollout_role import rollout_suggestions


class RunOutOfMemoryError(BurnishError, RuntimeError):
    """A run that ran out of memory. The message gives the phase and suggested changes."""


@dataclass(frozen=True)
class Failure:
    """Error, phase and newest checkpoint of a run that ran out of memory."""

    error: BaseException
    phase: str
    """Name of a timeline span."""
    run_dir: Path
    checkpoint: Path | None
    """The newest valid checkpoint."""


def oom_text(config: JobConfig, failure: Failure, lines: Sequence[PlanVsActual]) -> str:
    """Return the text of the report."""
    role, phase = PLANNED_AS.get(failure.phase, ("", failure.phase))
    of = f" of the {role}" if role else ""
    message = library_text(failure.error)
    notes = vars(failure.error).get("__notes__", [])
    parts = [
        "\n".join(
            [
                f"out of memory in {phase}{of} (phase {failure.phase!r} of the metrics)",
                f"  {message}",
                *(f"  {note}" for note in notes),
            ]
        ),
        "planned and measured memory so far:\n" + indent(plan_vs_actual_text(lines), "  "),
        "suggested changes, cheapest first:\n" + "\n".join(_suggestion_lines(config, phase)),
        _resume_hint(config, failure),
    ]
    return "\n\n".join(parts)


def _resume_hint(config: JobConfig, failure: Failure) -> str:
    if config.job == "evaluate":
        return "An evaluation cannot be resumed: run it again with one of these changes."
    command = f"burnish {config.job} --resume {failure.run_dir} KEY=VALUE"
    if config.writes_rows:
        return f"The output of completed steps is kept. Resume with: {command}"
    if failure.checkpoint is None:
        return f"No checkpoint was written yet. Restart from step 0 with: {command}"
    return f"The checkpoint {failure.checkpoint} is valid. Resume from it with: {command}"


# ---- suggested changes -----------------------------------------------------------------------


def _suggestion_lines(config: JobConfig, phase: str) -> Iterator[str]:
    """Yield one entry per suggested change, with the planned peak of the phase before and after
    it."""
    hardware = _hardware(config)
    now = _planned(config, (), phase, hardware)
    valid = (
        suggestion
        for suggestion in suggestions(config, phase)
        if changed_if_valid(config, suggestion.overrides) is not None
    )
    for number, suggestion in enumerate(valid, 1):
        then = _planned(config, suggestion.overrides, phase, hardware)
        planned = ""
        if now is not None and then is not None:
            same = _gb(now) == _gb(then)
            planned = f"; planned {_gb(now)} -> {_gb(then)} GB in {phase}"
            planned = "; same planned memory" if same else planned
        yield f"  {number}. {' '.join(suggestion.overrides)}\n     {suggestion.cost}{planned}"


def _hardware(config: JobConfig) -> Hardware | None:
    try:
        return hardware_of(config)
    except Exception:  # write the report even without numbers
        return None


def _planned(
    config: JobConfig, overrides: Sequence[str], phase: str, hardware: Hardware | None
) -> float | None:
    """Return the largest planned bytes of any GPU (or node) in a phase; None if no plan can be
    made."""
    if hardware is None:
        return None
    try:
        changed = changed_config(config, overrides)
        plan: Plan = make_plan(changed, hardware)
    except Exception:  # as above: the plan is optional
        return None
    where = "device" if any(p.where == "device" for p in plan.peaks) else "host"
    peaks = [p.bytes for p in plan.peaks if p.phase == phase and p.where == where]
    return max(peaks, default=None)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def suggestions(config: JobConfig, phase: str) -> Iterator[Suggestion]:
    """Yield changes that reduce the memory of a recipe, ordered by cost."""
    job = config.resolve()
    if phase == "rollout" and job.rollout is not None:
        yield from rollout_suggestions(job.rollout)
    if job.trained is not None and job.batch is not None:
        if phase not in ("rollout", "sync", "checkpoint", "step", "load"):
            hardware = _hardware(config)
            device = "cuda" if hardware is None else hardware.device
            yield from _pass_suggestions(job.trained, job.batch, device)
        ranks = job.trained.ranks
        yield from profile_class(job.trained.train.engine, ranks).savings(job.trained)
        if not job.inline:
            more = "fewer rows per rank, and smaller shards if the state is sharded"
            yield Suggestion((f"cluster.policy_ranks={2 * ranks}",), more)
    if phase != "rollout" and job.rollout is not None:
        yield from rollout_suggestions(job.rollout)
    if job.trained is not None:
        lengths = job.trained.lengths
        key, half = "rollout.generate_max_len", max(1, lengths.rest // 2)
        if lengths.episodes is not None:
            key, half = "rollout.episodes.max_tokens", lengths.prompt + half
        elif not lengths.prompt:
            key = "data.max_len"
        yield Suggestion((f"{key}={half}",), "shorter rows; this changes training results")


def _pass_suggestions(role: TrainRole, plan: BatchPlan, device: str) -> Iterator[Suggestion]:
    """Yield suggestions that reduce the size of each pass."""
    train = role.train
    same = "same result, more passes"
    if train.on_oom == "fail" and on_oom_problem(train) is None:
        retry = "retries a micro-batch that does not fit at half its size"
        yield Suggestion(("train.on_oom=retry_smaller",), f"{retry}: {same}")
    budget, micro = train.max_tokens_per_micro_batch, plan.micro_train_batch_size
    if budget is not None:
        yield Suggestion((f"train.max_tokens_per_micro_batch={max(1, budget // 2)}",), same)
    elif micro is not None and micro > 1:
        smaller = max(n for n in range(1, micro) if micro % n == 0)
        size = f"train.micro_train_batch_size={smaller}"
        yield Suggestion((size, "train.gradient_accumulation_steps=null"), same)
    if not train.gradient_checkpointing:
        more = "keeps products and attention, recomputes the rest of the activations in backward"
        yield Suggestion(("train.gradient_checkpointing=selective",), more)
    if train.gradient_checkpointing is not True:
        more = "recomputes activations in backward: about a third more compute"
        yield Suggestion(("train.gradient_checkpointing=true",), more)
    tokens = chunk_tokens(train.logprob_chunk_tokens, device)
    if tokens > 64:
        chunk = f"train.logprob_chunk_tokens={tokens // 4}"
        yield Suggestion((chunk,), "fewer logits in memory; small chunks are slower")
