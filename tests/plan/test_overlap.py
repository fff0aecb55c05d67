"""The plan of asynchronous runs: bounds of a step, ages, memory, and the split of the GPUs, by
hand."""

import heapq
import itertools
import json
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from burnish.config import load_config
from burnish.config.rollout import AsynchronousRollout
from burnish.plan.command import PlanOptions, measured_rates, plan_text
from burnish.plan.fit import fit, splits
from burnish.plan.hardware import parse_cluster
from burnish.plan.overlap import Sides, overlap
from burnish.plan.predict import make_plan
from burnish.plan.shapes import PlanError
from burnish.plan.time import Rates, estimate, rate_key
from burnish.rollout.asynchronous.schedule import ScheduleLimits, StalenessSchedule

SIDES = Sides(trainer_s=6.0, rollout_s=4.0, longest_s=8.0, response_s=2.0, running_groups=0.25)
RECIPE = {
    "job": "rl",
    "max_steps": 1,
    "model": {"scratch": {}},
    "data": {"sources": ["prompts.jsonl"], "prompt_max_len": 16},
    "rollout": {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "generate_max_len": 8,
        "asynchronous": {"max_staleness": 2},
    },
    "algorithm": {"correction": {"mode": "truncate"}},
    "train": {"train_batch_size": 16},
    "cluster": {"runtime": "ray", "layout": "separate", "gpus_per_worker": 1},
}
ALONE = ["cluster.runtime=inline", "cluster.layout=colocate_all", "cluster.gpus_per_worker=0"]


def step(sides=SIDES, **settings):
    return overlap(sides, AsynchronousRollout(**settings))


def test_a_step_takes_as_long_as_its_slower_side():
    """Training 6, sampling 4; the longest response and an update, 8 + 6, in S + 1 = 3 steps: 4.7.
    The trainer is never idle, the engines 1 - 4/6. R + o = 2 rollouts in progress: age 1.

    With sampling 9 instead: 9, the trainer idles 1 - 6/9. The engines have slots for a quarter of
    a step's groups, and 6/9 of the groups end during an update: age 0.25 + 0.67."""
    found = step(max_staleness=2)
    assert (found.seconds, found.limit, found.mean_age) == (6.0, "training", 1.0)
    assert (found.trainer_idle_frac, found.rollout_idle_frac) == (0.0, pytest.approx(1 / 3))
    slow = step(replace(SIDES, rollout_s=9.0), max_staleness=2)
    assert (slow.seconds, slow.limit) == (9.0, "sampling")
    assert slow.mean_age == pytest.approx(0.25 + 6 / 9)
    assert slow.trainer_idle_frac == pytest.approx(1 / 3)


def test_bounds_other_than_the_slower_side():
    """S = 1 and a longest response of 20: (20 + 6) / 2 = 13. Nothing ahead: 6 + 8, one after the
    other; half a rollout ahead (o = 1.5): 6 + 4/2. A mean response of 20, R = 1: (20 + 6) / 2.
    One device for both: 6 + 4. Reward models that take 7 s: 7. Paused: 6 + 4, and with the longest
    response 20 in two phases of sampling: 6 + 10."""
    assert step(replace(SIDES, longest_s=20.0), max_staleness=1).seconds == 13.0
    assert step(max_staleness=2, run_ahead=0).seconds == 14.0
    assert step(max_staleness=2, run_ahead=0, oversample=1.5).seconds == 8.0
    slow = step(replace(SIDES, response_s=20.0), max_staleness=8)
    assert (slow.seconds, slow.limit) == (13.0, "admission (run_ahead, oversample)")
    assert step(replace(SIDES, busiest_s=10.0), max_staleness=2).seconds == 10.0
    assert step(replace(SIDES, scoring_s=7.0), max_staleness=2).limit == "reward models"
    assert step(max_staleness=1, partial=True).seconds == 10.0
    assert step(replace(SIDES, longest_s=20.0), max_staleness=1, partial=True).seconds == 16.0


def test_the_bound_zero_is_planned_as_a_synchronous_run():
    hardware = parse_cluster("3xA100-80GB")
    plain = {**RECIPE, "rollout": {**RECIPE["rollout"], "asynchronous": None}}
    seconds = [
        estimate(load_config(tree, overrides), hardware)
        for tree, overrides in ((plain, []), (RECIPE, ["rollout.asynchronous.max_staleness=0"]))
    ]
    assert seconds[0] == seconds[1] and seconds[0].overlap is None


def test_trainer_and_rollout_are_added_up_by_side_and_a_connection_blocks_both():
    """Staged: the trainer's side has policy and copy, the rollout's has sampling and loading. A
    collective is in both. On one device everything is added."""
    hardware = parse_cluster("2xA100-80GB")

    def parts(*overrides):
        found = estimate(load_config(RECIPE, overrides), hardware)
        return found, {(p.role, p.phase): p.seconds for p in found.parts}

    staged, seconds = parts()
    rollout = {key: s for key, s in seconds.items() if key[0] == "rollout"}
    assert {phase for _, phase in rollout} == {"prefill", "decode", "recompute", "load weights"}
    assert staged.overlap.sides.rollout_s == pytest.approx(sum(rollout.values()))
    trainer = sum(seconds.values()) - sum(rollout.values())
    assert staged.overlap.sides.trainer_s == pytest.approx(trainer)
    assert staged.seconds == pytest.approx(max(staged.overlap.bounds.values()))

    linked, seconds = parts("sync=collective", "rollout.asynchronous.in_flight=continue")
    sync = seconds["policy", "sync"]
    sampling = seconds["rollout", "prefill"] + seconds["rollout", "decode"]
    assert linked.overlap.sides.rollout_s == pytest.approx(sampling + sync)
    assert ("rollout", "recompute") not in seconds

    one, seconds = parts(*ALONE, "rollout.engine.own_weights=true")
    assert one.seconds == pytest.approx(sum(seconds.values()))
    assert "take turns" in one.overlap.limit


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["rollout.asynchronous=null"], 0),
        (["rollout.asynchronous=null", "rollout.engine.own_weights=true"], 1),
        (["rollout.asynchronous=null", "precision.rollout_dtype=bf16"], 1),
        (["rollout.asynchronous=null", "rollout.engine=vllm"], 1),
        (["rollout.asynchronous.partial=true", "rollout.engine.own_weights=true"], 2),
    ],
)
def test_an_engine_in_the_process_of_the_trainer_copies_weights_unless_it_shares_them(
    overrides, copies
):
    """A copy reads and writes 126,592 weights x 4 B; with a bound on ages, the trainer stages a
    copy, and the engine copies that."""
    hardware = parse_cluster("A100-80GB")
    config = load_config(RECIPE, [*ALONE, *overrides])
    parts = {(p.role, p.phase): p.seconds for p in estimate(config, hardware).parts}
    bytes_per_s = hardware.gpu.memory_gbs * 1e9 * hardware.tables.efficiency["memory"]
    assert parts["policy", "sync"] == pytest.approx(copies * 2 * 126_592 * 4 / bytes_per_s)


def test_memory_of_staged_weights_and_of_sampling_in_all_phases():
    """126,592 weights x 4 B = 506,368 B. In Ray's store: two versions instead of one. In one
    process: the engine's copy and a staged one, also in the optimizer step; and the memory of
    sampling C = (1 + 1) x 4 groups of 4 responses with its fragmentation. (The synchronous run
    keeps its cache in the step, too: 16 slots x 64 positions x 512 B, and a quarter of it while it
    grows, and the logits of its graphs: 7 x 16 slots x 53 tokens x 4 B.)"""
    weights, kept = 126_592 * 4, 16 * 64 * 512 * 1.25 + 7 * 16 * 53 * 4
    store = []
    for asynchronous in ("null", "{max_staleness: 2}"):
        config = load_config(RECIPE, [f"rollout.asynchronous={asynchronous}"])
        plan = make_plan(config, parse_cluster("2xA100-80GB"))
        rows = [r for r in plan.rows if "object store" in r.how and r.phase == "step"]
        store.append(sum(r.bytes for r in rows))
    assert store == [weights, 2 * weights]

    peaks = []
    for changes in (
        ["rollout.asynchronous=null"],
        ["rollout.engine.own_weights=true"],
    ):
        plan = make_plan(load_config(RECIPE, [*ALONE, *changes]), parse_cluster("A100-80GB"))
        peaks.append(next(p for p in plan.peaks if (p.where, p.phase) == ("device", "step")).bytes)
    rows = [r for r in plan.rows if (r.role, r.phase, r.where) == ("rollout", "rollout", "device")]
    assert [r.bytes for r in rows if r.item == "parameters"] == [weights, weights]
    assert [r.how for r in rows if r.item == "KV cache"] == ["32 slots x 64 positions x 512 B"]
    assert [r.how for r in rows if r.item == "overhead"] == [
        "fragmentation: 5% of temporary memory"
    ]
    assert peaks[1] - peaks[0] == pytest.approx(sum(r.bytes for r in rows) - kept)


def test_measured_rates_replace_the_assumed_ones(tmp_path):
    """A run whose sampling took 3x and whose updates took 2x the estimate: the median of its last
    two steps, without the first. Its times apply to another split."""
    run, hardware = tmp_path / "run", parse_cluster("2xA100-80GB")
    tree = {**RECIPE, "rollout": {**RECIPE["rollout"], "asynchronous": None}}
    plan = estimate(load_config(tree), hardware)
    sampling = sum(p.seconds for p in plan.parts if p.phase in ("prefill", "decode"))
    update = next(p.seconds for p in plan.parts if p.phase == "forward/backward")
    with pytest.raises(PlanError, match=r"it has no config\.yaml"):
        measured_rates(run, hardware)
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(tree))
    with pytest.raises(PlanError, match="no step with a measured time"):
        measured_rates(run, hardware)
    line = {"step": 1, "time": 0.0, "time/step_s": 9.0, "time/rollout_s": 99.0, "time/train_s": 9.0}
    later = line | {"time/rollout_s": 3 * sampling, "time/train_s": 2 * update}
    lines = [line, later | {"step": 2}, later | {"step": 3}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))

    config = load_config(RECIPE, ["cluster.policy_ranks=2"])
    hardware = parse_cluster("3xA100-80GB")
    rates = measured_rates(run, hardware)
    times = []
    for plan in (estimate(config, hardware), estimate(config, hardware, rates)):
        times.append({(p.role, p.phase): p.seconds for p in plan.parts})
    assumed, measured = times
    factors = {key: measured[key] / assumed[key] for key in assumed}
    assert factors.pop(("policy", "forward/backward")) == pytest.approx(2)
    for phase in ("prefill", "decode", "recompute"):
        assert factors.pop(("rollout", phase)) == pytest.approx(3)
    assert set(factors.values()) == {1.0}  # unknown: as assumed
    text, _ = plan_text(load_config(RECIPE), PlanOptions(cluster="2xA100-80GB", rates=run))
    assert "2 steps of" in text


def test_measured_response_lengths_replace_the_assumed_ones(tmp_path):
    """4 prompts x 4 samples, all 16 decoded at once, of at most 8 tokens. Measured: 2 on average,
    the longest of a step 6. A synchronous step decodes 6 times. With max_staleness 2 and 32 rows
    at once, a step takes 16 x 2 / 32 = 1 time, and computes the keys and values of 32 rows of 0.6 x
    16 + 2/2 tokens. A recipe of at most 1 token has no longer responses."""
    run, hardware = tmp_path / "run", parse_cluster("2xA100-80GB")
    tree = {**RECIPE, "rollout": {**RECIPE["rollout"], "asynchronous": None}}
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(tree))
    line = {"time": 0.0, "time/step_s": 9.0, "time/rollout_s": 3.0}
    lengths = [(2.0, 6), (1.0, 5), (4.0, 8)]  # the first step is not counted if there are others
    lines = [line | {"step": 0, "rollout/response_len": 8.0, "rollout/response_len_max": 8}] + [
        line | {"step": i, "rollout/response_len": mean, "rollout/response_len_max": most}
        for i, (mean, most) in enumerate(lengths, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    rates = measured_rates(run, hardware)
    assert "response lengths (mean 2, longest of a step 6 tokens)" in rates.source

    def decoding(*overrides, tree=RECIPE):
        parts = estimate(load_config(tree, overrides), hardware, rates).parts
        return {p.phase: p for p in parts if p.role == "rollout"}

    sync = decoding(tree=tree)
    assert sync["decode"].how.startswith("6 steps of 16 rows")
    assert sync["decode"].seconds + sync["prefill"].seconds == pytest.approx(3.0)
    ahead = decoding()
    assert ahead["decode"].how.startswith("1 steps of 32 rows")
    assert ahead["recompute"].how == "new keys and values of 32 rows of 11 tokens"
    one = decoding("rollout.generate_max_len=1", tree=tree)
    assert one["decode"].how.startswith("1 steps of 16 rows")


@pytest.mark.usefixtures("only_matrices")
def test_the_best_split_gives_the_slower_side_more_gpus_and_fit_proposes_it(monkeypatch):
    """On 10 GPUs, p divides the batch of 16, and w takes the rest, at most one worker for each of
    C = 8 groups. If only sampling takes time, p = 1 has most workers; 9 would have no use, so p = 2
    is as fast. If only training does, p = 8 is best, and 4x as fast as p = 2 (with links so fast
    that gradients take no time)."""
    hardware = parse_cluster("10xA100-80GB")
    hardware = replace(hardware, gpu=replace(hardware.gpu, link_gbs=1e9))
    config = load_config(RECIPE)
    found = splits(config, hardware)
    assert {s.workers for s in found} == {(1, 8), (2, 8), (4, 6), (8, 2)}
    for split in found:
        changed = load_config(RECIPE, split.overrides)
        assert estimate(changed, hardware).seconds == split.seconds
    keys = {rate_key(p) for p in estimate(config, hardware).parts}

    def only(key):
        rates = Rates({k: float(k == key) for k in keys}, "test")
        return {s.workers: s.seconds for s in splits(config, hardware, rates)}

    sampling = only(("rollout", "rollout"))
    assert min(sampling.values()) == sampling[1, 8] == sampling[2, 8] < sampling[4, 6]
    training = only(("policy", "forward/backward"))
    assert min(training, key=lambda workers: training[workers]) == (8, 2)
    assert training[2, 8] == pytest.approx(4 * training[8, 2])
    assert not splits(load_config(RECIPE, ["rollout.asynchronous=null"]), hardware)

    monkeypatch.setattr("burnish.plan.fit.candidates", lambda config, hardware: [[]])  # fewer plans
    assert fit(config, hardware).proposals[0].overrides == tuple(found[0].overrides)
    tree = json.loads(plan_text(config, PlanOptions(cluster="10xA100-80GB", as_json=True))[0])
    seconds = [split["seconds"] for split in tree["splits"]]
    assert len(seconds) == 4 and seconds == sorted(seconds)
    assert tree["asynchronous"]["max_age"] == 2


def simulated(length, *, limits, slots, training_s, steps=100):
    """Run a schedule whose engines sample ``slots`` groups at once, group g in ``length(g)``
    seconds. Return (seconds per step, mean age), without the first half of the steps."""
    schedule, now, done = StalenessSchedule(limits), 0.0, 0
    events, queue, versions, ages, begun = [], deque(), {}, [], 0.0
    training = False
    while done < steps:
        while schedule.may_start():
            queue.append(schedule.start())
        while queue and sum(kind == "group" for _, kind, _ in events) < slots:
            group = queue.popleft()
            versions[group] = schedule.engine_version  # of its first token
            heapq.heappush(events, (now + length(group), "group", group))
        if not training and (taken := schedule.take()) is not None:
            training = True
            heapq.heappush(events, (now + training_s, "trained", 0))
            found = [schedule.taken - 1 - versions[group] for group in taken.groups]
            ages += found if done >= steps // 2 else []
        now, kind, group = heapq.heappop(events)
        if kind == "group":
            schedule.finish(group, "ready")
            continue
        schedule.loaded(schedule.taken)
        training, done = False, done + 1
        begun = now if done == steps // 2 else begun
    return (now - begun) / (steps - steps // 2), sum(ages) / len(ages)


@pytest.mark.parametrize(
    ("stale", "ahead", "oversample", "slots", "training_s"),
    [
        (1, 1, 1.0, 8, 1.0),  # sampling is the limit: 16 groups on 8 slots
        (2, 1, 1.0, 4, 1.0),  # and groups wait in the queue of the engines
        (2, 1, 1.0, 8, 3.0),  # training is
        (4, 2, 1.0, 64, 1.5),
        (2, 0, 1.0, 8, 2.0),  # nothing ahead: one after the other
        (2, 0, 1.5, 8, 2.0),
        (2, 1, 1.5, 8, 2.0),
        (8, 1, 1.0, 64, 0.5),  # admission is
    ],
)
def test_the_estimate_of_equal_groups_is_that_of_the_schedule_itself(
    stale, ahead, oversample, slots, training_s
):
    """Groups of 1 s. Tolerance: the start and the end of a simulation are not full periods."""
    settings = AsynchronousRollout(max_staleness=stale, run_ahead=ahead, oversample=oversample)
    capacity = settings.capacity(16)
    limits = ScheduleLimits(16, capacity, stale, total_steps=10_000, max_refills=1)
    seconds, age = simulated(lambda g: 1.0, limits=limits, slots=slots, training_s=training_s)
    rows = min(slots, capacity)
    found = overlap(Sides(training_s, 16 / rows, 1.0, 1.0, rows / 16), settings)
    assert found.seconds == pytest.approx(seconds, rel=0.02)
    assert found.mean_age == pytest.approx(age, abs=0.05)


def test_the_estimate_of_varying_lengths_is_at_most_the_step_of_the_schedule_itself():
    """16 groups per step on 16 slots, log-normal lengths with a mean of 1 and sigma 0.25 to 1.5.
    Training takes 0.5 to 1.5 times the longest of 16. The estimate knows the mean and the longest,
    and leaves out chance maxima over several steps: it is short by up to a third, by up to 14% with
    S >= 4 and two rollouts ahead, and by up to 10% if training takes 1.5 times the longest.

    Upper tolerance: nothing ahead is exact up to the draws, whose mean over 50 steps differs from
    that over 250 by up to 5%."""
    names = ((1, 0), (1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 4))
    cases = itertools.product((0.25, 0.5, 1.0, 1.5), names, (0.5, 1.0, 1.5))
    for sigma, (stale, ahead), balance in cases:
        draw = np.random.default_rng(0)
        times = draw.lognormal(-(sigma**2) / 2, sigma, 4000)
        longest = times.reshape(-1, 16).max(1).mean()
        settings = AsynchronousRollout(max_staleness=stale, run_ahead=ahead)
        limits = ScheduleLimits(16, settings.capacity(16), stale, total_steps=10_000, max_refills=1)
        training_s = balance * longest
        seconds, age = simulated(
            lambda g, times=times: times[g], limits=limits, slots=16, training_s=training_s
        )
        found = overlap(Sides(training_s, 1.0, longest, 1.0, 1.0), settings)
        ratio = found.seconds / seconds
        case = (sigma, stale, ahead, balance, found.limit, ratio)
        assert 0.65 < ratio < 1.06, case
        if balance > 1:
            assert ratio > 0.9, case
        if stale >= 4 and ahead > 1:
            assert ratio > 0.86, case
        if found.limit == "training":
            assert found.mean_age == pytest.approx(age, abs=0.05), case


@pytest.mark.parametrize(("stale", "ahead", "expected"), [(1, 1, 3.5), (2, 1, 7 / 3), (2, 0, 7.0)])
def test_one_long_group_in_each_step_is_waited_for_as_late_as_the_bound_allows(
    stale, ahead, expected
):
    """One group of 6 s, 15 of 0.67 s, training 1 s, a slot for each: (6 + 1) / (S + 1), or without
    groups ahead 6 + 1."""
    settings = AsynchronousRollout(max_staleness=stale, run_ahead=ahead)
    capacity = settings.capacity(16)
    limits = ScheduleLimits(16, capacity, stale, total_steps=10_000, max_refills=1)
    seconds, _ = simulated(
        lambda g: 2 / 3 if g % 16 else 6.0, limits=limits, slots=64, training_s=1.0
    )
    found = overlap(Sides(1.0, 16 / capacity, 6.0, 1.0, capacity / 16), settings)
    assert found.seconds == pytest.approx(expected)
    assert seconds == pytest.approx(expected, rel=0.02)
