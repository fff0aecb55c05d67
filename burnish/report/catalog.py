"""The figures of the report: their metrics, titles and units.

A figure selects its metrics by exact names or by patterns. Exact names have priority, and every
metric is drawn once. Other metrics each get a figure in the section "More metrics", with the unit
given by the suffix of their name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import get_args

from burnish.transcript import EpisodeStatus

NOT_DRAWN = (
    "time/*_s",  # in the time split
    "time/*/*_s",
    "generate/prompts_total",  # a constant
    *(f"episodes/{status}" for status in get_args(EpisodeStatus)),  # drawn as shares
)

OMITTED_IF_ZERO = frozenset(f"episodes/{status}_frac" for status in get_args(EpisodeStatus))
"""Metrics that are not drawn if they are 0 throughout the run."""


@dataclass(frozen=True)
class Chart:
    """A figure. ``names`` are metric names or, in the catalog, also patterns."""

    section: str
    title: str
    unit: str
    """Unit as text, "" for a pure number. "fraction" is drawn in percent, "bytes" in GiB or MiB."""
    names: tuple[str, ...]
    log: bool = False
    """True if values are powers of two that change in steps. They are drawn as steps on a base-2
    logarithmic axis and never averaged."""


LEARNING, UPDATE, ROLLOUT, MACHINE = "Learning", "Update", "Rollout", "Machine"
EPISODES = "Episodes"
MORE = "More metrics"

CHARTS = (
    Chart(LEARNING, "Held-out pass rate", "fraction", ("eval/pass@*",)),
    Chart(LEARNING, "Mean reward", "per response", ("reward/mean",)),
    Chart(LEARNING, "Loss", "", ("train/loss", "eval/loss")),
    Chart(LEARNING, "KL to the teacher", "nats per token", ("train/teacher_kl", "eval/teacher_kl")),
    Chart(LEARNING, "Same most likely token as the teacher", "fraction", ("*/agreement",)),
    Chart(LEARNING, "Pairs ranked correctly", "fraction", ("train/accuracy", "eval/accuracy")),
    Chart(LEARNING, "Correct step labels", "fraction", ("*/step_accuracy", "*/*_step_accuracy")),
    Chart(LEARNING, "Solutions with all step labels correct", "fraction", ("*/row_exact",)),
    Chart(LEARNING, "Score margin", "chosen minus rejected", ("*/score_margin",)),
    Chart(LEARNING, "Held-out reward", "per response", ("eval/reward",)),
    Chart(LEARNING, "Mean reward of training samples", "per response", ("reward/trained_mean",)),
    Chart(LEARNING, "Spread of the reward", "standard deviation", ("reward/std",)),
    Chart(LEARNING, "Reward parts", "mean per response", ("reward/*", "eval/reward/*")),
    Chart(LEARNING, "Scores", "", ("*/score_chosen", "*/score_rejected")),
    Chart(UPDATE, "KL to the reference", "nats per token", ("train/kl", "rollout/kl")),
    Chart(UPDATE, "KL coefficient", "", ("train/kl_coef",)),
    Chart(UPDATE, "Entropy", "nats per token", ("*/entropy",)),
    Chart(UPDATE, "Gradient norm", "L2, before clipping", ("*/grad_norm",)),
    Chart(UPDATE, "Learning rate", "", ("*/lr",)),
    Chart(UPDATE, "Clipped tokens", "fraction", ("*/clip_frac", "*/*_clip_frac")),
    Chart(UPDATE, "KL to the old policy", "nats per token", ("*/approx_kl",)),
    Chart(UPDATE, "Policy ratio, mean", "new / old probability", ("*/ratio",)),
    Chart(UPDATE, "Policy ratio, largest", "new / old probability", ("*/ratio_max",)),
    Chart(UPDATE, "Policy loss", "", ("train/policy_loss",)),
    Chart(UPDATE, "Other text (ptx)", "nats per token", ("train/ptx_nll",)),
    Chart(UPDATE, "Load-balancing loss of experts", "", ("train/moe_aux_loss",)),
    Chart(UPDATE, "Busiest expert", "1: an even share", ("train/moe_max_load",)),
    Chart(UPDATE, "Experts without tokens", "fraction", ("train/moe_idle_experts",)),
    Chart(UPDATE, "Value loss", "", ("critic/value_loss",)),
    Chart(UPDATE, "Loss scale", "log scale", ("*/loss_scale",), log=True),
    Chart(UPDATE, "Skipped steps", "per step", ("*/skipped_steps", "*/overflows")),
    Chart(UPDATE, "Skipped steps, total", "since the start", ("*/skipped_total",)),
    Chart(UPDATE, "Kernels replaced after an error", "since the start", ("*/kernel_fallbacks",)),
    Chart(UPDATE, "Groups or pairs without signal", "fraction", ("train/no_signal_frac",)),
    Chart(UPDATE, "Loss spikes", "1: far above earlier steps", ("*/loss_spike",)),
    Chart(UPDATE, "Trainer vs. sampler", "nats per token, mean", ("*/mismatch_abs",)),
    Chart(UPDATE, "Trainer vs. sampler, largest", "nats per token", ("*/mismatch_max",)),
    Chart(UPDATE, "Trainer vs. sampler, KL", "nats per token, k3", ("*/mismatch_k3",)),
    Chart(UPDATE, "Ratio to the sampler by age", "mean", ("*/age_*_behavior_ratio",)),
    Chart(UPDATE, "KL to the sampler by age", "nats per token, k3", ("*/age_*_behavior_kl",)),
    Chart(UPDATE, "Off-policy correction, mean weight", "", ("*/correction_weight",)),
    Chart(UPDATE, "Off-policy correction, largest weight", "", ("*/correction_max",)),
    Chart(UPDATE, "Off-policy correction, changed weights", "fraction", ("*/correction_frac",)),
    Chart(UPDATE, "Effective sample size of the weights", "fraction", ("*/effective_sample_frac",)),
    Chart(ROLLOUT, "Response length", "tokens", ("rollout/response_len", "rollout/response_len_*")),
    Chart(ROLLOUT, "Held-out response length", "tokens", ("eval/response_len",)),
    Chart(
        ROLLOUT,
        "Responses truncated at the length limit",
        "fraction",
        ("reward/truncated_frac", "rollout/truncated_frac"),
    ),
    Chart(ROLLOUT, "Groups with equal rewards", "fraction", ("reward/equal_groups_frac",)),
    Chart(ROLLOUT, "Groups dropped", "per step", ("reward/groups_dropped",)),
    Chart(ROLLOUT, "Rows written", "per step", ("generate/rows",)),
    Chart(ROLLOUT, "Dropped prompts or responses", "per step", ("generate/dropped_*",)),
    Chart(ROLLOUT, "Reward of the rows", "per row", ("generate/kept_reward",)),
    Chart(ROLLOUT, "Margin of the pairs", "per row", ("generate/margin",)),
    Chart(ROLLOUT, "Prompts", "since the start", ("generate/prompts_done",)),
    Chart(ROLLOUT, "Groups by age", "fraction", ("rollout/age_*_frac",)),
    Chart(
        ROLLOUT,
        "Age of groups and tokens",
        "RL steps",
        ("rollout/age_mean", "rollout/age_max", "rollout/age_of_tokens_mean"),
    ),
    Chart(ROLLOUT, "Age of tokens", "optimizer steps", ("rollout/age_optimizer_steps_*",)),
    Chart(EPISODES, "Turns", "per episode", ("episodes/turns", "episodes/turns_max")),
    Chart(EPISODES, "Sampled tokens", "per episode", ("episodes/tokens",)),
    Chart(
        EPISODES,
        "Ended by the environment or a limit",
        "fraction",
        (
            "episodes/done_frac",
            "episodes/max_*_frac",
            "episodes/prompt_too_long_frac",
            "episodes/parse_error_frac",
        ),
    ),
    Chart(
        EPISODES,
        "Failed, not trained on",
        "fraction",
        (
            "episodes/env_error_frac",
            "episodes/infra_error_frac",
            "episodes/timeout_frac",
            "episodes/cancelled_frac",
        ),
    ),
    Chart(
        EPISODES,
        "Seconds",
        "per episode",
        ("episodes/seconds", "episodes/engine_s", "episodes/environment_s"),
    ),
    Chart(EPISODES, "Time in the environment", "fraction", ("episodes/environment_frac",)),
    Chart(EPISODES, "Prompt tokens from the cache", "fraction", ("episodes/cached_prefix_frac",)),
    Chart(EPISODES, "Failed tool calls", "fraction", ("episodes/tool_error_frac",)),
    Chart(EPISODES, "Counts of the environment", "per step", ("episodes/counts/*",)),
    Chart(
        EPISODES,
        "Malformed tool calls",
        "per step",
        ("episodes/parse_problems",),
    ),
    Chart(EPISODES, "Groups of episodes dropped", "per step", ("episodes/groups_dropped",)),
    Chart(MACHINE, "Idle", "fraction", ("time/*_idle_frac",)),
    Chart(MACHINE, "Busy cores and GPUs", "fraction", ("time/cpu_busy_frac", "time/gpu_busy_frac")),
    Chart(MACHINE, "Free on the disk", "bytes", ("memory/disk_free_bytes",)),
    Chart(MACHINE, "Speed", "tokens per second", ("*/tokens_per_s",)),
    Chart(MACHINE, "GPU memory by phase, tensors", "bytes", ("memory/*/peak_bytes",)),
    Chart(MACHINE, "GPU memory by phase, reserved", "bytes", ("memory/*/reserved_peak_bytes",)),
    Chart(MACHINE, "Host memory by phase", "bytes", ("memory/*/host_peak_bytes",)),
    Chart(MACHINE, "Rank with the largest peak", "rank", ("memory/*/peak_rank",)),
    Chart(MACHINE, "Steps lost by a tracker", "since the start", ("observe/*_dropped",)),
    Chart(MACHINE, "Memory", "bytes", ("memory/peak_rss_bytes", "memory/*_bytes")),
)

_UNITS = (
    ("_tokens_per_s", "tokens per second"),
    ("_per_s", "per second"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_frac", "fraction"),
    ("_s", "seconds"),
)


def arrange(names: Sequence[str], charts: Iterable[Chart] = CHARTS) -> list[Chart]:
    """Return charts for exactly the metrics in ``names``, in catalog order, unknown ones last.

    >>> [(c.title, c.names) for c in arrange(["train/loss", "train/odd_frac", "time/train_s"])]
    [('Loss', ('train/loss',)), ('Train: odd', ('train/odd_frac',))]
    """
    charts = list(charts)
    left = [n for n in names if not any(_matches(n, p) for p in NOT_DRAWN)]
    taken: dict[int, list[str]] = {}
    by_name = {name: i for i, chart in enumerate(charts) for name in chart.names if "*" not in name}
    for name in left:
        if _of_first_set(name) in by_name:
            taken.setdefault(by_name[_of_first_set(name)], []).append(name)
    left = [name for name in left if _of_first_set(name) not in by_name]
    for i, chart in enumerate(charts):
        patterns = [p for p in chart.names if "*" in p]
        matching = [n for n in left if any(_matches(_of_first_set(n), p) for p in patterns)]
        taken.setdefault(i, []).extend(matching)
        left = [name for name in left if name not in matching]
    known = [
        replace(chart, names=tuple(taken[i])) for i, chart in enumerate(charts) if taken.get(i)
    ]
    titles = {name: _title(name) for name in sorted(left)}
    counts = Counter(titles.values())
    for name, title in titles.items():
        unit = next((u for s, u in _UNITS if name.endswith(s)), "")
        known.append(Chart(MORE, title if counts[title] == 1 else name, unit, (name,)))
    return known


def _title(name: str) -> str:
    """Return the title of a metric that no chart of the catalog has."""
    group = name.partition("/")[0].replace("_", " ") if "/" in name else ""
    title = f"{group}: {words(name)}" if group else words(name)
    return title[:1].upper() + title[1:]


def _of_first_set(name: str) -> str:
    """Return a metric of a named evaluation set without the name, so that it is drawn with that of
    the first set: ``eval/math/pass@1`` -> ``eval/pass@1``."""
    parts = name.split("/")
    if parts[0] != "eval" or len(parts) < 3 or parts[1] == "reward":
        return name
    return "/".join([parts[0], *parts[2:]])


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern, in which ``*`` does not match a slash."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def words(name: str) -> str:
    """Return a readable name of a metric, without group and unit.

    ``memory/peak_rss_bytes`` -> ``peak rss``. For memory by phase, it is the phase:
    ``memory/train/peak_bytes`` -> ``train``.
    """
    parts = name.split("/")
    last = parts[1] if parts[0] == "memory" and len(parts) > 2 else parts[-1]
    if _of_first_set(name) != name:
        last = f"{parts[1]} {last}"
    suffix = next((s for s, _ in _UNITS if last.endswith(s)), "")
    return last.removesuffix(suffix).replace("_", " ").strip()
