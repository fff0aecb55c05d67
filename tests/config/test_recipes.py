"""Every recipe that comes with the project is valid, says what it takes, and names its places."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli import app
from burnish.config import GenerateConfig, PreferenceConfig, RLConfig, load_config
from burnish.config.load import ConfigError
from burnish.config.placement import placement_groups

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
BY_NAME = {path.stem: path for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_so_is_its_dry_run(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    done = CliRunner().invoke(app, [config.job, str(path), "--dry-run"])
    missing = "does not exist" in done.stderr  # the user's own file, or that of an earlier job
    assert done.exit_code == (2 if missing else 0), done.output
    again = tmp_path / "again.yaml"
    again.write_text(done.stdout, encoding="utf-8")
    assert load_config(again) == config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_headers_have_command_hardware_and_result(path: Path) -> None:
    header = "".join(line for line in path.open(encoding="utf-8") if line.startswith("#"))
    config = load_config(path)
    assert f"burnish {config.job} recipes/{path.name}" in header
    assert "Hardware: " in header
    assert "Expected results: " in header or "Measured" in header


def test_iterative_dpo_script_passes_each_output_to_the_next_job(
    tmp_path: Path,
) -> None:
    """Its commands are written down instead of run, and each is dry-run then."""
    told = tmp_path / "told"
    stub = tmp_path / "burnish"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\t" "$@" >> {told}\necho >> {told}\n')
    stub.chmod(0o755)
    script = RECIPES[0].parent / "tiny_iterative_dpo.sh"
    where = {"cwd": script.parents[1], "env": {**os.environ, "BURNISH": str(stub)}}
    subprocess.run(["bash", str(script), "start", "runs/x"], check=True, **where)
    commands = [line.split("\t")[:-1] for line in told.read_text().splitlines()]
    round_ = ["generate", "preference", "export", "evaluate"]
    assert [command[0] for command in commands] == ["evaluate", *round_, *round_]
    jobs = [c for c in commands if c[0] != "export"]
    configs = [load_config(script.parents[1] / c[1], c[2:], job=c[0]) for c in jobs]
    models = ["start"] * 3 + ["runs/x/model-1"] * 3 + ["runs/x/model-2"]
    assert [config.model.path for config in configs] == models
    assert [c[3] for c in commands if c[0] == "export"] == ["runs/x/model-1", "runs/x/model-2"]
    assert len({config.run_dir for config in configs}) == 7
    for asked, learned in ((configs[1], configs[2]), (configs[4], configs[5])):
        assert isinstance(asked, GenerateConfig) and isinstance(learned, PreferenceConfig)
        written = asked.output.replace("{run_dir}", asked.run_dir)
        assert [source.path for source in learned.data.sources] == [written]
    assert configs[1].seed != configs[4].seed


def test_nine_node_recipe_has_policy_reference_and_one_engine_over_eight_gpus() -> None:
    """128 / (1 x 32) = 4 passes; 256 x 4 / 128 = 8 steps; 32 + 32 + 8 = 72 GPUs."""
    config = load_config(BY_NAME["llama3_70b_grpo_9x8"])
    assert isinstance(config, RLConfig)
    plan = config.batch_plan()
    assert (plan.gradient_accumulation_steps, plan.optimizer_steps_per_rollout) == (4, 8)
    placements = {p.roles: (p.count, p.gpus) for p in placement_groups(config)}
    assert placements == {("policy",): (32, 1), ("rollout",): (1, 8), ("reference",): (32, 1)}
    assert config.sync.kind == "collective", "Ray's object store would hold 141 GB on two nodes"
    checkpoint = 70_553_706_496 * 12  # bytes, by one process
    assert checkpoint / config.cluster.call_timeout_s < 0.1e9, "a slow shared disk is fast enough"


def test_one_node_recipe_has_five_roles_on_eight_gpus() -> None:
    (placements,) = placement_groups(load_config(BY_NAME["llama3_8b_ppo_8gpu"]))
    assert (placements.count, placements.gpus) == (8, 1)
    assert set(placements.roles) == {"policy", "rollout", "reward", "critic", "reference"}
    assert str(placements).startswith("8 x policy+rollout+reward+critic+reference (1 GPU each)")


def test_a_lora_policy_is_its_own_reference() -> None:
    path = BY_NAME["qwen25_7b_grpo_lora_1gpu"]
    config = load_config(path, ["algorithm.kl.init_kl_coef=0.01"])
    assert [role.name for role in config.roles()] == ["policy", "rollout"]


def test_colocated_engines_span_the_gpus_of_consecutive_ranks() -> None:
    """64 ranks / 8 GPUs per engine = 8 engines; 8 / 2 = 4."""
    config = load_config(BY_NAME["llama3_70b_grpo_8x8"])
    (place,) = placement_groups(config)
    assert (place.count, place.gpus, place.span, place.workers("rollout")) == (64, 1, 8, 8)
    assert str(place) == (
        "64 x policy+rollout+reference (1 GPU each; a rollout engine spans 8 on one node)"
    )
    assert [place.place("rollout", i) for i in (0, 1, 7)] == [0, 8, 56]
    assert [place.place("reference", i) for i in (0, 1, 7)] == [0, 1, 7]
    small = BY_NAME["llama3_8b_grpo_8gpu"]
    (place,) = placement_groups(
        load_config(small, ["rollout.engine.tensor_parallel_size=2", "cluster.rollout_workers=4"])
    )
    assert (place.count, place.span, place.workers("rollout")) == (8, 2, 4)


def test_colocated_roles_need_equal_numbers() -> None:
    with pytest.raises(ConfigError, match="puts policy and rollout on the same GPUs"):
        load_config(BY_NAME["llama3_8b_grpo_8gpu"], ["cluster.rollout_workers=4"])


def test_overrides_in_a_recipe_header_are_valid() -> None:
    """Lines '#   NAME   key=value ...' of the SmolLM2 recipe's header."""
    path = BY_NAME["smollm2_chain_sum_grpo"]
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    found = {
        line[1]: [word for word in line if "=" in word]
        for line in lines
        if line[:1] == ["#"] and any(word.startswith("algorithm.") for word in line)
    }
    names = ["Dr.", "RLOO", "REINFORCE++", "REINFORCE++-baseline", "DAPO", "GSPO", "CISPO", "PPO"]
    assert list(found) == names
    for words in found.values():
        load_config(path, words)
