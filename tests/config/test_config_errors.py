"""All problems of a recipe are reported together, without those that follow from others."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli import app
from burnish.config import ConfigError, RLConfig, load_config
from burnish.config.equivalents import advice_on


def problems(recipe, *overrides, job=None) -> list[str]:
    """The lines of the error that loading must raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides, job=job)
    first, *lines = str(caught.value).split("\n")
    assert first.endswith(f": {len(lines)} problem{'s' if len(lines) > 1 else ''}"), first
    return [line.removeprefix("  - ") for line in lines]


def only_problem(recipe, *overrides) -> str:
    (line,) = problems(recipe, *overrides)
    return line


def test_the_recipes_that_the_tests_break_are_valid(recipes):
    for recipe in recipes.values():
        assert load_config(recipe).job == recipe["job"]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ("seeed=1", "seeed"),
        ("nonsense={a: [1]}", "nonsense"),
        ("rollout.temprature=0.5", "rollout.temprature"),
        ("train.lr=abc", "train.lr"),
        ("train.lr=true", "train.lr"),
        ("rewards=[{kind: math, wieght: 2}]", "rewards[0].wieght"),
        ("checkpoint.keep_last=-1", "checkpoint.keep_last"),
    ],
)
def test_cross_field_rules_are_reported_in_addition_to_a_wrong_key(rl_recipe, wrong, key):
    """grpo has no critic, and cannot compare a single sample."""
    rules = ("rollout.n_samples_per_prompt=1", "rollout.rollout_batch_size=16")
    told = problems(rl_recipe, wrong, "critic={lr: 1e-4}", "algorithm.advantage=grpo", *rules)
    assert told[0].startswith(f"{key}: ")
    assert sum("critic is set" in line for line in told) == 1
    assert any("n_samples_per_prompt=1" in line for line in told)


def test_a_misspelled_key_counts_as_the_nearest_key_for_rules(rl_recipe):
    """learning_rate is what others call lr."""
    assert "learning_rate" in only_problem(rl_recipe, "train.learning_rate=1e-3")
    told = problems(rl_recipe, "rollout.n_sampels_per_prompt=1", "algorithm.advantage=grpo")
    assert len(told) == 1, "the rule about one sample would name the misspelled key"


def test_missing_required_key_error_has_its_help(rl_recipe):
    del rl_recipe["data"]
    assert only_problem(rl_recipe) == ("data: is required and not set (data: Training prompts.)")


def test_all_problems_are_in_one_message(rl_recipe):
    """A missing and an unknown key, a wrong type, and a broken rule in a part that is sound."""
    del rl_recipe["data"]
    said = problems(rl_recipe, "trian.lr=1", "train.lr=fast", "rollout.temperature=0")
    assert [line.split(":")[0] for line in said] == ["data", "train.lr", "trian", "rollout"]


def test_recipe_for_another_job_error_gives_the_right_command(tmp_path, recipes):
    path = tmp_path / "sft.yaml"
    path.write_text("job: sft\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, job="rl")
    assert f"burnish sft {path}" in str(caught.value)


def test_unknown_job_error_names_the_nearest_job(rl_recipe):
    with pytest.raises(ConfigError, match="nearest: evaluate"):
        load_config({**rl_recipe, "job": "evalute"})


def test_recipe_without_a_job_is_an_error(rl_recipe):
    del rl_recipe["job"]
    with pytest.raises(ConfigError, match="job"):
        load_config(rl_recipe)
    assert isinstance(load_config(rl_recipe, job="rl"), RLConfig)


def test_missing_recipe_error_names_the_nearest_file(tmp_path):
    (tmp_path / "recipe.yaml").write_text("job: rl\n")
    with pytest.raises(ConfigError, match="nearest"):
        load_config(tmp_path / "recepi.yaml")
    with pytest.raises(ConfigError, match="folder"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("job: [rl\n", "YAML"),
        ("- rl\n", "list"),
        ("", "empty"),
        ("job: rl\nseed: 1\nseed: 2\n", "'seed'.* twice"),
        (b"job: \xff\n", "YAML"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_rejected(tmp_path: Path, text, said):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        load_config(path)


@pytest.mark.parametrize(
    ("job", "value", "replacement"),
    [("rl", "group_norm", "grpo"), ("rl", "reinforce", "reinforce_pp"), ("rl", "adam", "adamw")],
)
def test_a_value_of_another_framework_names_its_replacement(
    job: str, value: str, replacement: str
) -> None:
    assert f" is {replacement} here" in advice_on(f"={value}", job)


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        (["train_ppo_ray", "--pretrain", "m"], "burnish rl"),
        (["openrlhf.cli.train_sft"], "burnish sft"),
        (["dpo"], "burnish preference"),
        (["rl", "--pretrain", "m"], "model.path"),
        (["preference", "--beta=0.1"], "loss.beta"),
        (["rl", "train.sh"], "YAML"),
    ],
)
def test_commands_and_flags_of_other_frameworks_name_their_replacement(
    words: list[str], replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text("python -m openrlhf.cli.train_ppo_ray \\\n  --pretrain m\n")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert replacement in result.stderr and "docs/compare.md" in result.stderr


@pytest.mark.parametrize(
    "fault",
    [
        *({"prompt_max_len": "abc"}, {"prompt_max_len": -1}, {"mix": "x"}, {"mixx": "size"}),
        *({"nokey": 1}, {"held_out": "x"}, {"sources": []}, {"sources": [{"kind": "no"}]}),
        {"sources": [{"path": "a.jsonl", "weight": "heavy"}]},
    ],
)
def test_a_fault_in_a_named_section_is_that_of_a_section(recipes, fault):
    """The key, the type and the help are those of the same fault in a section without a name."""
    recipe, data = recipes["rl"], {"sources": ["a.jsonl"]}
    alone = problems({**recipe, "eval": {"data": {**data, **fault}}})
    named = problems({**recipe, "eval": {"data": data, "sets": {"x": {**data, **fault}}}})
    assert alone and named == [line.replace("eval.data", "eval.sets.x") for line in alone]


def test_a_fault_beside_a_section_that_others_complete_is_told_alone(recipes):
    """The rows of ``eval`` are those that ``data`` holds out."""
    recipe = recipes["rl"]
    recipe = {**recipe, "data": {**recipe["data"], "held_out": 2}, "eval": {"every_n_steps": 9}}
    (line,) = problems({**recipe, "rewards": [{"kind": "maths"}]})
    assert line.startswith("rewards[0]")


@pytest.mark.parametrize(
    ("mcp", "path"),
    [
        ({"files": {"command": 3}}, "files.command"),
        ({"files": {"command": ["x"], "env": {"HOME": 3}}}, "files.env.HOME"),
        ({"files": {"command": ["x"], "toolz": ["a"]}}, "files.toolz"),
    ],
)
def test_a_fault_of_a_named_server_has_its_place(recipes, mcp, path):
    recipe = recipes["rl"]
    episodes = {"mcp": mcp, "max_tokens": 4096}
    (line,) = problems({**recipe, "rollout": {**recipe["rollout"], "episodes": episodes}})
    assert line.startswith(f"rollout.episodes.mcp.{path}: ")
