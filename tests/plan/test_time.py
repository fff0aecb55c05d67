"""The time estimate of a step, by hand."""

import pytest

from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.plan.hardware import parse_cluster
from burnish.plan.shapes import shape_of
from burnish.plan.time import estimate, flops

GRPO = {
    "job": "rl",
    "max_steps": 1,
    "model": {"scratch": {}},
    "data": {"sources": ["prompts.jsonl"], "prompt_max_len": 16},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 8},
    "train": {"train_batch_size": 16},
}
IN_LOSS = ("algorithm.kl.init_kl_coef=0.1",)
IN_REWARD = (
    *IN_LOSS,
    "algorithm.kl.placement=reward",
    "algorithm.kl.estimator=k1",
    "algorithm.advantage=rloo",
)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ((), 0),  # one update: the old log-probs are those of the update
        (("train.train_batch_size=8",), 1),
        (IN_LOSS, 0),
        (IN_REWARD, 1),
        ((*IN_LOSS, "model.lora={}"), 1),
        ((*IN_REWARD, "model.lora={}"), 2),
    ],
)
@pytest.mark.usefixtures("only_matrices")
def test_time_counts_the_passes_that_the_policy_makes_before_its_updates(overrides, passes):
    """Old log-probs if the update needs them, and the reference's if it is the base of a LoRA
    policy. Each is a third of forward and backward, or half with LoRA, whose frozen weights have no
    gradient."""
    config = load_config(GRPO, list(overrides))
    found = estimate(config, parse_cluster("A100-80GB")).parts
    seconds = {p.phase: p.seconds for p in found if p.role == "policy"}
    assert ("log-probs" in seconds) == bool(passes)
    share = passes / (3 if config.model.lora is None else 2)
    assert seconds.get("log-probs", 0) == pytest.approx(seconds["forward/backward"] * share)


def test_muon_adds_the_newton_schulz_iterations_of_its_matrices():
    """Two layers of width 64 (inner width 256) have four matrices [64, 64] and three of [64, 256]:
    4 (4 + 2) 64^3 + 3 (4 x 4 + 2) 64^3 = 78 x 64^3 operations per iteration and layer; without the
    three of the MLP, 24 x 64^3. An A100 has 312e12 of them per second in bf16."""
    model = "model.scratch={hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 4}"
    cluster = parse_cluster("A100-80GB")
    step = []
    for optimizer in (
        "adamw",
        "{kind: muon, ns_steps: 3}",
        "{kind: muon, ns_steps: 3, adamw_params: [mlp]}",
    ):
        config = load_config(GRPO, [model, f"train.optimizer={optimizer}"])
        found = estimate(config, cluster)
        step.append(sum(p.seconds for p in found.parts if p.phase == "step"))
    rate = 312e12 * cluster.tables.efficiency["matmul"]
    expected = [2 * 3 * n * 64**3 / rate for n in (78, 24)]
    assert [s - step[0] for s in step[1:]] == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("only_matrices")
def test_epochs_over_a_rollout_repeat_only_the_updates():
    """Four updates on each: one epoch of 4 rows per update, or two of 8. Rows are sampled once, and
    their old log-probs computed once; forward and backward run once per epoch."""
    seconds = []
    for epochs, rows in ((1, 4), (2, 8)):
        sizes = [f"train.epochs_per_rollout={epochs}", f"train.train_batch_size={rows}"]
        plan = estimate(load_config(GRPO, sizes), parse_cluster("A100-80GB"))
        assert plan.samples == 16
        seconds.append({p.phase: p.seconds for p in plan.parts})
    one, two = seconds
    assert two.pop("forward/backward") == pytest.approx(2 * one.pop("forward/backward"))
    assert two == pytest.approx(one)


@pytest.mark.usefixtures("only_matrices")
def test_dpo_with_lora_computes_log_probs_of_its_base():
    """Half of forward and backward, whose frozen weights have no gradient. SimPO needs none."""
    tree = {
        "job": "preference",
        "model": {"scratch": {}, "lora": {}},
        "data": {"sources": ["pairs.jsonl"]},
        "train": {"train_batch_size": 4},
    }
    shares = []
    for loss in ("dpo", "simpo"):
        found = estimate(load_config(tree, [f"loss={loss}"]), parse_cluster("A100-80GB")).parts
        seconds = {p.phase: p.seconds for p in found}
        shares.append(seconds.get("log-probs", 0) / seconds["forward/backward"])
    assert shares == pytest.approx([1 / 2, 0])


@pytest.mark.parametrize(
    ("overrides", "policy", "reference"),
    [
        (["loss=dpo"], 0, 1),
        (["loss=dpo", "reference.precompute=true"], 0, 0),
        (["loss=dpo", "reference.precompute=true", "model.lora={}"], 0, 0),
        (["loss=aot"], 1, 1),  # the policy's log-probs before the update, for the ranks
        (["loss=kto"], 1, 2),  # the rows of the KL estimate, in both models
        (["loss=kto", "model.lora={}"], 3, 0),
    ],
)
@pytest.mark.usefixtures("only_matrices")
def test_a_preference_step_counts_the_passes_of_its_reference_and_kl_estimate(
    overrides: list[str], policy: int, reference: int
) -> None:
    """Passes per step, as tests/runtime/test_preference_runs.py counts them in a run. Each is a
    third of forward and backward, or half with LoRA."""
    tree = {
        "job": "preference",
        "model": {"scratch": {}},
        "data": {"sources": ["pairs.jsonl"]},
        "train": {"train_batch_size": 4},
    }
    config = load_config(tree, overrides)
    found = estimate(config, parse_cluster("A100-80GB")).parts
    trained = next(p.seconds for p in found if p.phase == "forward/backward")
    seconds = {p.role: p.seconds for p in found if p.phase == "log-probs"}
    unit = trained / (3 if config.model.lora is None else 2)
    passes = [seconds.get(role, 0) / unit for role in ("policy", "reference")]
    assert passes == pytest.approx([policy, reference])


def test_flops_are_two_per_parameter_and_token_and_attention():
    """Llama-3-8B, rows of 2048: 2 x (8.03e9 - 0.525e9 of the input embedding), and 4 x 1024 x 4096
    in each of 32 layers."""
    shape = shape_of(ModelConfig(path="meta-llama/Meta-Llama-3-8B"))
    expected = 2 * (8_030_261_248 - 525_336_576) + 32 * 4 * 1024 * 4096
    assert flops(shape, 2048) == pytest.approx(expected)


def test_mixture_of_experts_counts_only_the_active_parameters():
    shape = shape_of(ModelConfig(path="Qwen/Qwen3-30B-A3B"))
    assert flops(shape, 2) / 2 == pytest.approx(3.04e9, rel=0.02)  # "A3B", less the embedding
