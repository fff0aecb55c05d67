"""Recipes and overrides become configs, and configs become recipes again."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from burnish.config import ConfigError, dump_yaml, load_config
from burnish.config.algorithm import GaeAdvantage
from burnish.config.sources import FileSource, HubSource


def test_a_dumped_config_loads_to_an_equal_config(tmp_path, recipes):
    for job, recipe in recipes.items():
        config = load_config(recipe)
        path = tmp_path / f"{job}.yaml"
        path.write_text(dump_yaml(config))
        assert load_config(path) == config


def test_a_dump_keeps_values_other_than_defaults(tmp_path, rl_recipe):
    overrides = [
        "train.lr=1e-7",
        "rollout.stop=['\\n', END]",
        "model.lora={target_modules: [q_proj, v_proj]}",
        "data.sources=[{kind: environment, options: {dataset: chain_sum, min_terms: 2}}, x.csv]",
        "rewards=[{kind: math, weight: 0.5}, {kind: function, function: 'a.py:f'}]",
        "algorithm.advantage={kind: reinforce_pp, gamma: 0.9}",
    ]
    config = load_config(rl_recipe, overrides)
    path = tmp_path / "dump.yaml"
    path.write_text(dump_yaml(config))
    assert load_config(path) == config


@given(
    lr=st.floats(min_value=1e-12, max_value=1.0),
    stop=st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1), max_size=3
    ),
)
def test_numbers_and_texts_survive_a_round_trip(lr, stop):
    tree = {
        "job": "rl",
        "model": {"scratch": {}},
        "max_steps": 1,
        "data": {"sources": ["a.jsonl"]},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "stop": stop},
        "train": {"train_batch_size": 2, "lr": lr},
    }
    config = load_config(tree)
    again = load_config(yaml.safe_load(dump_yaml(config)))
    assert again == config and again.train.lr == lr and again.rollout.stop == tuple(stop)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=1e-6", 1e-6),  # YAML 1.1 alone reads this as text
        ("train.lr=1.5E-6", 1.5e-6),
        ("train.lr=0.001", 0.001),
        ("train.lr=1", 1.0),
        ("train.max_grad_norm=null", None),
        ("train.gradient_checkpointing=true", True),
        ("train.gradient_checkpointing=no", False),
        ("train.optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("train.engine.device=cuda:1", "cuda:1"),
        ("rollout.stop=['\\n']", ("\\n",)),
        ('rollout.stop=["\\n"]', ("\n",)),
        ("rollout.stop=[a=b]", ("a=b",)),
        ("data.prompt_template='Q: {prompt}'", "Q: {prompt}"),
        ("run_dir=runs/{time}", "runs/{time}"),
        ("max_steps=1e2", 100),
    ],
)
def test_an_override_sets_its_key(rl_recipe, override, expected):
    value = load_config(rl_recipe, [override])
    for name in override.partition("=")[0].split("."):
        value = dict(value)[name]
    assert value == expected and type(value) is type(expected)


def test_later_overrides_win(rl_recipe):
    assert load_config(rl_recipe, ["seed=1", "seed=2"]).seed == 2


def test_an_override_does_not_change_the_callers_mapping(rl_recipe):
    before = yaml.safe_dump(rl_recipe)
    load_config(rl_recipe, ["train.lr=1e-3", "data.sources.0.weight=2"])
    assert yaml.safe_dump(rl_recipe) == before


def test_options_of_a_short_form_can_be_set(rl_recipe):
    config = load_config(
        rl_recipe,
        ["algorithm.advantage=gae", "algorithm.advantage.lam=0.5", "data.sources.0.weight=2"],
    )
    assert config.algorithm.advantage == GaeAdvantage(kind="gae", lam=0.5)
    assert config.data.sources == (FileSource(path="prompts.jsonl", weight=2.0),)


def test_list_items_are_reached_by_number(rl_recipe):
    rl_recipe["data"]["sources"].append({"kind": "dataset", "path": "d"})
    config = load_config(rl_recipe, ["data.sources.1.split=test", "data.sources.0=other.csv"])
    assert config.data.sources == (FileSource(path="other.csv"), HubSource(path="d", split="test"))


def test_a_group_that_the_recipe_omits_can_be_set_key_by_key(rl_recipe):
    config = load_config(rl_recipe, ["model.lora.lora_rank=4", "eval.data.sources=[e.jsonl]"])
    assert config.model.lora.lora_rank == 4
    assert config.eval.data.sources == (FileSource(path="e.jsonl"),)


@given(st.text(max_size=12), st.text(max_size=8))
def test_any_override_ends_in_a_config_or_in_a_config_error(key, value):
    recipe = {"job": "sft", "model": {"scratch": {}}, "data": {"sources": ["a"]}, "train": {}}
    try:
        load_config(recipe, ["train.train_batch_size=2", f"{key}={value}"])
    except ConfigError as error:
        assert "problem" in str(error) or "job" in str(error)


def test_a_loaded_config_cannot_be_changed(rl_recipe):
    config = load_config(rl_recipe)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.lr = 1.0
