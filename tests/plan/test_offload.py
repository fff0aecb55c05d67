"""Memory plans of roles that are in host memory between their phases."""

from pathlib import Path

import pytest

from burnish.config import load_config
from burnish.plan.hardware import parse_cluster
from burnish.plan.predict import make_plan
from burnish.plan.shapes import PlanError

ROOT = Path(__file__).parents[2]


def test_an_offloaded_role_counts_on_the_device_in_its_own_phase_only():
    """The reference model is 8.03e9 / 8 x 2 B = 2.008 GB. In the update phases a GPU has that much
    less, and its pinned copy is 8 blocks of 256 MiB on each of the node's 8 ranks."""
    recipe, moved = ROOT / "recipes" / "llama3_8b_grpo_8gpu.yaml", "cluster.offload_between_phases"
    vllm = "rollout.engine.gpu_memory_utilization=0.4"
    stays, moves = (
        make_plan(load_config(recipe, [f"{moved}=[{roles}]", vllm]), parse_cluster("8xA100-80GB"))
        for roles in ("", "reference")
    )

    def peaks(plan, where):
        return {p.phase: p.bytes for p in plan.peaks if p.where == where}

    before, after = peaks(stays, "device"), peaks(moves, "device")
    for phase in ("rollout", "forward/backward", "step", "sync"):
        assert before[phase] - after[phase] == pytest.approx(8_030_261_248 / 8 * 2, rel=1e-3)
    assert before["log-probs"] == after["log-probs"]  # the reference's own pass is the largest
    host = peaks(moves, "host")["step"] - peaks(stays, "host")["step"]
    assert host == 8 * 8 * (256 << 20)
    assert not stays.savings and "instead of" in moves.savings[0]


def test_engines_on_the_gpus_of_ranks_are_planned_per_gpu():
    """vLLM holds 70.554e9 / 8 x 2 B = 17.6 GB of weights on each of the 64 GPUs, with one engine
    per node; 64 + 64 + 8 x 8 = 192 GPUs would be separate."""
    recipe = load_config(ROOT / "recipes" / "llama3_70b_grpo_8x8.yaml")
    plan = make_plan(recipe, parse_cluster("8x8xA800-80GB", host_gb=600))
    assert plan.fits, plan.verdict()
    assert {p.place for p in plan.peaks} == {
        "64 x policy+rollout+reference",
        "a node with 8 policy+1 rollout+8 reference",
    }
    (weights,) = {
        r.bytes
        for r in plan.rows
        if (r.role, r.phase, r.item, r.where) == ("rollout x8", "rollout", "parameters", "device")
    }
    assert weights == pytest.approx(70_553_706_496 * 2 / 8)
    rows = [r for r in plan.rows if (r.role, r.phase) == ("rollout x8", "rollout")]
    assert sum(r.how == "a Python process with CUDA" for r in rows) == 1 + 8
    assert "64 GPUs instead of 192 with cluster.layout=separate" in plan.to_text()
    with pytest.raises(PlanError, match="16x4xA800-80GB has room for 0 of 8 engines"):
        make_plan(recipe, parse_cluster("16x4xA800-80GB"))


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_precomputed_reference_is_not_in_memory_with_the_policy(loss):
    """In the update phases a GPU has the weights of the reference less. While log-probs are
    computed, it has one of the two models."""
    tree = {
        "job": "preference",
        "model": {"scratch": {"alphabet": "01", "hidden_size": 512, "num_layers": 3}},
        "data": {"sources": ["none.jsonl"], "max_len": 16},
        "train": {"train_batch_size": 4},
        "loss": loss,
    }
    kept, released = (
        make_plan(load_config(tree, [f"reference.precompute={on}"]), parse_cluster("1x1xA100-80GB"))
        for on in ("false", "true")
    )
    size = next(r.bytes for r in kept.rows if r.role == "reference" and r.item == "parameters")
    before, after = (
        {p.phase: p.bytes for p in plan.peaks if p.where == "device"} for plan in (kept, released)
    )
    for phase in ("forward/backward", "step"):
        assert before[phase] - after[phase] == pytest.approx(size)
    assert before["log-probs"] > after["log-probs"]
    assert any("reference.precompute" in note for note in released.assumptions)
