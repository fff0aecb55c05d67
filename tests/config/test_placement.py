"""Which groups of workers a job has and how they share places: several reward models, jobs without
a policy, numbers that do not fit together."""

from typing import Any

import pytest

from burnish.config import ConfigError, load_config
from burnish.config.placement import placement_groups, placement_text
from burnish.plan.hardware import parse_cluster
from burnish.plan.predict import make_plan

Recipes = dict[str, dict[str, Any]]
RAY = "cluster.runtime=ray"
SERVERS = "rollout.engine={kind: vllm_server, urls: ['http://localhost:8000']}"
TWO_MODELS = (
    "rewards=[{kind: model, model: {scratch: {}}}, {kind: math}, "
    "{kind: model, weight: 2, model: {scratch: {hidden_size: 128}}}]"
)


@pytest.mark.parametrize(
    ("layout", "placements"),
    [
        ("colocate_all", [("policy", "rollout", "reward", "reward 2")]),
        ("separate", [("policy",), ("rollout",), ("reward",), ("reward 2",)]),
        ("colocate_actor_ref", [("policy",), ("rollout",), ("reward",), ("reward 2",)]),
        ("colocate_critic_reward", [("reward", "reward 2"), ("policy",), ("rollout",)]),
    ],
)
def test_every_reward_model_has_its_own_workers(
    layout: str, placements: list[tuple[str, ...]], rl_recipe: dict[str, Any]
) -> None:
    config = load_config(rl_recipe, [RAY, TWO_MODELS, f"cluster.layout={layout}"])
    found = placement_groups(config)
    assert [p.roles for p in found] == placements
    assert [p.cpus for p in found] == [1] * len(placements)
    assert "reward 2" in placement_text(config)
    rewards = config.roles()[2:]
    assert [(role.kind, role.name) for role in rewards] == [
        ("reward", "reward"),
        ("reward", "reward 2"),
    ]
    widths = [role.model.scratch.hidden_size for role in rewards if role.model.scratch is not None]
    assert widths == [64, 128]


@pytest.mark.parametrize("layout", ["colocate_all", "separate"])
def test_the_memory_plan_counts_each_reward_model_with_its_own_size(
    layout: str, rl_recipe: dict[str, Any]
) -> None:
    """Of 64 and 128 wide models the second is the larger one; each is on every place (together), or
    on its own (apart)."""
    options = [RAY, TWO_MODELS, f"cluster.layout={layout}", "cluster.gpus_per_worker=1"]
    plan = make_plan(load_config(rl_recipe, options), parse_cluster("4xA100-80GB"))
    weights = {
        role: sum(
            r.bytes
            for r in plan.rows
            if (r.role, r.phase, r.item) == (role, "log-probs", "parameters")
        )
        for role in ("reward", "reward 2")
    }
    assert 0 < 2 * weights["reward"] < weights["reward 2"]
    names = {p.place for p in plan.peaks if p.where == "device"}
    apart = {"policy", "rollout", "reward", "reward 2"}
    assert names == (apart if layout == "separate" else {"policy+rollout+reward+reward 2"})


@pytest.mark.parametrize("job", ["evaluate", "generate"])
def test_a_job_without_a_policy_may_have_any_number_of_rollout_workers(
    job: str, recipes: Recipes
) -> None:
    config = load_config(recipes[job], [RAY, "cluster.rollout_workers=4"])
    (placements,) = placement_groups(config)
    assert (placements.roles, placements.count) == (("rollout",), 4)
    engine = "engine" if job == "evaluate" else "rollout.engine"
    parts = [f"{engine}.kind=vllm", f"{engine}.tensor_parallel_size=2", "cluster.gpus_per_worker=1"]
    (placements,) = placement_groups(
        load_config(recipes[job], [RAY, "cluster.rollout_workers=4", *parts])
    )
    assert (placements.count, placements.gpus) == (4, 2)


def test_colocated_rollout_workers_and_reward_models_need_equal_numbers(recipes: Recipes) -> None:
    model = "rewards=[{kind: model, model: {scratch: {}}}]"
    options = [RAY, "cluster.rollout_workers=4", model]
    with pytest.raises(ConfigError, match="rollout and reward"):
        load_config(recipes["evaluate"], options)
    equal = load_config(recipes["evaluate"], [*options, "cluster.policy_ranks=4"])
    assert [p.roles for p in placement_groups(equal)] == [("rollout", "reward")]
    apart = load_config(recipes["evaluate"], [*options, "cluster.layout=separate"])
    assert [(p.roles, p.count) for p in placement_groups(apart)] == [
        (("rollout",), 4),
        (("reward",), 1),
    ]


@pytest.mark.parametrize("layout", ["colocate_all", "separate"])
def test_vllm_servers_take_no_place(layout: str, rl_recipe: dict[str, Any]) -> None:
    """Also not one that the policy would have to share: its layout allows an asynchronous run."""
    ray = [RAY, f"cluster.layout={layout}", "cluster.policy_ranks=4", "cluster.gpus_per_worker=1"]
    options = [*ray, SERVERS, "rollout.asynchronous.max_staleness=1", "algorithm.correction={}"]
    config = load_config(rl_recipe, options)
    assert [(p.roles, p.count) for p in placement_groups(config)] == [(("policy",), 4)]
    assert "rollout: on running servers (rollout.engine.urls)" in placement_text(config)
    with pytest.raises(ConfigError, match="offload_between_phases"):
        load_config(rl_recipe, [*ray, SERVERS, "cluster.offload_between_phases=[policy]"])


@pytest.mark.parametrize("job", ["evaluate", "generate"])
def test_jobs_without_a_policy_use_servers_on_ray_if_a_reward_model_runs_there(
    job: str, recipes: Recipes
) -> None:
    servers = SERVERS if job == "generate" else SERVERS.removeprefix("rollout.")
    with pytest.raises(ConfigError, match=r"cluster\.runtime=inline"):
        load_config(recipes[job], [RAY, servers])
    with pytest.raises(ConfigError, match=r"cluster\.runtime=spmd"):
        load_config(recipes[job], ["cluster.runtime=spmd", servers])
    model = "rewards=[{kind: model, model: {scratch: {}}}]"
    config = load_config(recipes[job], [RAY, servers, model, "cluster.reward_ranks=2"])
    assert [(p.roles, p.count) for p in placement_groups(config)] == [(("reward",), 2)]


def test_colocated_critic_and_reward_model_need_equal_numbers(
    rl_recipe: dict[str, Any],
) -> None:
    options = [
        RAY,
        "cluster.layout=colocate_critic_reward",
        "cluster.policy_ranks=2",
        "cluster.critic_ranks=1",
        "algorithm.advantage=gae",
    ]
    model = "rewards=[{kind: model, model: {scratch: {}}}]"
    with pytest.raises(ConfigError, match="reward and critic"):
        load_config(rl_recipe, [*options, model])
    alone = load_config(rl_recipe, options)
    assert [(p.roles, p.count) for p in placement_groups(alone)] == [
        (("critic",), 1),
        (("policy",), 2),
        (("rollout",), 2),
    ]


def test_a_critic_with_ranks_of_its_own_has_its_own_accumulation(rl_recipe: dict[str, Any]) -> None:
    """B = 16, b = 4: on two ranks 16 / (4 x 2) = 2 passes, on the critic's only rank 4."""
    options = [RAY, "cluster.layout=separate", "algorithm.advantage=gae", "cluster.policy_ranks=2"]
    options += ["cluster.critic_ranks=1", "train.train_batch_size=16"]
    config = load_config(rl_recipe, [*options, "train.micro_train_batch_size=4"])
    table = {name: value for name, value, _ in config.launch_table()}
    assert table["gradient_accumulation_steps"] == "2"
    assert table["critic: gradient_accumulation_steps"] == "4"


def test_a_rollout_engine_of_two_gpus_is_on_one_node(rl_recipe: dict[str, Any]) -> None:
    parts = ["rollout.engine={kind: vllm, tensor_parallel_size: 2}", "cluster.gpus_per_worker=1"]
    config = load_config(rl_recipe, [RAY, *parts, "cluster.layout=separate"])
    rollout = [p for p in placement_groups(config) if "rollout" in p.roles]
    assert [(p.gpus, p.span) for p in rollout] == [(2, 1)]
