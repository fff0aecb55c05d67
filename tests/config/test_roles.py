"""The roles of a job: who is on which model, trained or not, in which format, on how many ranks."""

import subprocess
import sys
from typing import Any

import pytest

from burnish.config import load_config
from burnish.config.roles import RolloutRole, TrainRole

Recipes = dict[str, dict[str, Any]]
RAY = "cluster.runtime=ray"
GAE = "algorithm.advantage=gae"
KL = "algorithm.kl.init_kl_coef=0.1"
BY_SAMPLER = "algorithm.old_policy=sampler"
IN_REWARD = ("algorithm.kl.placement=reward", "algorithm.kl.estimator=k1")
LORA = "model.lora.lora_rank=4"
WIDE = "{scratch: {hidden_size: 128}}"


def told(role: TrainRole | RolloutRole) -> tuple[str, str, bool]:
    if isinstance(role, RolloutRole):
        return role.name, "rollout", False
    return role.name, role.head, role.trainable


@pytest.mark.parametrize(
    ("job", "overrides", "expected"),
    [
        ("sft", [], [("policy", "lm", True)]),
        ("rm", [], [("reward", "scalar", True)]),
        ("preference", [], [("policy", "lm", True), ("reference", "lm", False)]),
        ("preference", [LORA], [("policy", "lm", True)]),
        ("preference", ["loss=simpo"], [("policy", "lm", True)]),
        ("evaluate", [], [("rollout", "rollout", False)]),
        ("generate", [], [("rollout", "rollout", False)]),
        (
            "rl",
            [GAE, KL, "rewards=[{kind: model, model: {scratch: {}}}]"],
            [
                ("policy", "lm", True),
                ("rollout", "rollout", False),
                ("reward", "scalar", False),
                ("critic", "scalar", True),
                ("reference", "lm", False),
            ],
        ),
        ("rl", [KL, LORA], [("policy", "lm", True), ("rollout", "rollout", False)]),
    ],
)
def test_each_job_has_its_roles(
    job: str, overrides: list[str], expected: list[tuple[str, str, bool]], recipes: Recipes
) -> None:
    recipes["preference"] = {**recipes["rm"], "job": "preference"}
    assert [told(role) for role in load_config(recipes[job], overrides).roles()] == expected


def test_a_role_has_its_own_model_format_and_ranks_or_the_policys(recipes: Recipes) -> None:
    options = [RAY, GAE, KL, "cluster.layout=separate", "cluster.policy_ranks=2"]
    options += ["cluster.critic_ranks=3", f"critic.model={WIDE}", "critic.lr=0.5", "train.lr=0.25"]
    options += ["precision.dtype=bf16", "precision.rollout_dtype=fp32", "train.train_batch_size=6"]
    options += ["rollout.rollout_batch_size=6", "rollout.n_samples_per_prompt=2"]
    job = load_config(recipes["rl"], options).resolve()
    policy, critic, reference = job.role("policy"), job.role("critic"), job.role("reference")
    assert job.rollout is not None
    assert (policy.ranks, job.rollout.ranks, critic.ranks, reference.ranks) == (2, 2, 3, 2)
    assert (policy.dtype, job.rollout.dtype) == ("bf16", "fp32")
    assert not job.rollout.shares_weights
    assert critic.model.scratch is not None and critic.model.scratch.hidden_size == 128
    assert reference.model == policy.model
    assert (policy.lr, critic.lr, critic.train.lr) == (None, 0.5, 0.25)
    assert (policy.checkpoint is not None, reference.checkpoint) == (True, None)


def test_only_the_trained_policy_balances_experts(recipes: Recipes) -> None:
    options = [GAE, KL, "train.moe_aux_loss_coef=0.01", "model={path: owner/experts}"]
    roles = load_config(recipes["rl"], options).resolve().train_roles
    assert [role.train.moe_aux_loss_coef for role in roles] == [0.01, 0.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "old", "holds"),
    [
        ([], False, False),
        (["train.epochs_per_rollout=2"], True, False),
        (["train.epochs_per_rollout=2", "algorithm.top_entropy_quantile=0.2"], True, False),
        ([KL], False, False),
        ([KL, "algorithm.advantage=rloo", *IN_REWARD], True, False),
        (["train.epochs_per_rollout=2", BY_SAMPLER], False, False),
        ([KL, "algorithm.advantage=rloo", *IN_REWARD, BY_SAMPLER], False, False),
        ([KL, LORA], False, True),
        ([KL, LORA, f"reference.model={WIDE}"], False, False),
    ],
)
def test_log_probs_that_the_policy_computes_before_the_update(
    overrides: list[str], old: bool, holds: bool, recipes: Recipes
) -> None:
    """One optimizer step on 4 x 2 samples, unless there are two epochs. Entropies are one more
    pass."""
    sizes = ["rollout.rollout_batch_size=4", "rollout.n_samples_per_prompt=2"]
    config = load_config(recipes["rl"], [*sizes, "train.train_batch_size=8", *overrides])
    policy = config.resolve().role("policy")
    made = {"logprobs": old, "entropies": "entropy" in str(overrides), "base_logprobs": holds}
    assert policy.passes == tuple(name for name, is_made in made.items() if is_made)


def test_a_teacher_keeps_its_own_dtype(recipes: Recipes) -> None:
    tree = {**recipes["sft"], "job": "distill", "teacher": {"model": {"scratch": {}}}}
    options = ["precision.dtype=bf16", "teacher.dtype=fp32", "loss=jsd"]
    student, teacher = load_config(tree, options).resolve().train_roles
    assert (student.dtype, teacher.dtype, teacher.passes) == ("bf16", "fp32", ("states",))
    assert student.distillation is not None
    assert (student.distillation.dtype, student.distillation.divergence) == ("fp32", "jsd")


def test_roles_are_resolved_without_torch() -> None:
    code = (
        "import sys; from burnish.config import load_config\n"
        "load_config('recipes/tiny_3_ppo.yaml').resolve(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
