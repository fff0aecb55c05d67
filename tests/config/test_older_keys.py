"""Keys of earlier versions that are now in a section of their own: recipes, overrides, saved
recipes and saved engines with them mean what they meant."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from burnish.config import ConfigError, dump_yaml, load_config
from burnish.config.base import Node
from burnish.config.model import ModelConfig
from burnish.config.registry import JOBS
from burnish.config.schema import nodes_in
from burnish.config.train import TrainConfig
from burnish.optimizers.config import AdamOptimizer
from burnish.optimizers.muon.config import Muon

RL: dict[str, Any] = {
    "job": "rl",
    "max_steps": 2,
    "model": {"scratch": {}},
    "data": {"sources": ["prompts.jsonl"], "prompt_max_len": 8},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "rewards": [{"kind": "math"}],
    "train": {"train_batch_size": 8},
    "algorithm": {"correction": {}, "kl": {"init_kl_coef": 0.1}},
    "reference": {},
    "cluster": {"runtime": "ray", "layout": "separate"},
}
DATA: dict[str, Any] = {"sources": ["rows.jsonl"]}
SUPERVISED: dict[str, Any] = {"model": {"scratch": {}}, "data": DATA | {"system_prompt": "S"},
                              "train": {"train_batch_size": 8}}  # fmt: skip
EVAL = (
    {"eval_data": DATA, "eval_sets": {"a": {"sources": ["010"], "max_len": 9}},
     "eval_every_n_steps": 3, "eval_delay_steps": 2},
    {"eval": {"data": DATA, "sets": {"a": {"sources": ["010"], "max_len": 9}},
              "every_n_steps": 3, "delay_steps": 2}},
)  # fmt: skip
OTHER_JOBS: dict[str, dict[str, Any]] = {
    "sft": {"job": "sft", **SUPERVISED},
    "distill": {"job": "distill", **SUPERVISED, "teacher": {"model": {"scratch": {"seed": 1}}}},
    "preference": {"job": "preference", "model": {"scratch": {}}, "data": DATA,
                   "train": {"train_batch_size": 8}},
    "rm": {"job": "rm", "model": {"scratch": {}},
           "data": DATA | {"kind": "scores", "score_keys": ["score"]},
           "train": {"train_batch_size": 8}},
}  # fmt: skip
"""Recipes of jobs that have older keys on their own level."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rollout": (
        {"max_staleness": 3, "run_ahead": 2, "oversample": 1.5, "in_flight": "finish"},
        {"asynchronous": {"max_staleness": 3, "run_ahead": 2, "oversample": 1.5,
                          "in_flight": "finish"}},
    ),
    "algorithm.kl": (
        {"kl_target": 0.05, "kl_horizon": 500},
        {"adaptive": {"target": 0.05, "horizon": 500}},
    ),
    "algorithm.correction": (
        {"mode": "clip", "low": 0.3},
        {"mode": {"kind": "clip", "low": 0.3}},
    ),
    "reference": (
        {"sync_every_n_steps": 4, "mixup_alpha": 0.5},
        {"moving": {"every_n_steps": 4, "mixup_alpha": 0.5}},
    ),
    "shaping": (
        {"overlong_buffer_len": 16, "overlong_penalty": 0.5},
        {"overlong": {"buffer_len": 16, "penalty": 0.5}},
    ),
    "checkpoint": (
        {"export_at_end": "out", "export_dtype": "bf16", "export_lora": "merge"},
        {"export_at_end": {"path": "out", "dtype": "bf16", "lora": "merge"}},
    ),
    "train": (
        {"lr_scheduler": "wsd", "min_lr_ratio": 0.2, "lr_decay_ratio": 0.3,
         "lr_decay_shape": "sqrt", "adam_betas": [0.8, 0.9], "adam_eps": 1e-6},
        {"lr_scheduler": {"kind": "wsd", "min_ratio": 0.2, "decay_ratio": 0.3,
                          "decay_shape": "sqrt"},
         "optimizer": {"betas": [0.8, 0.9], "eps": 1e-6}},
    ),
    "early_stopping": (
        {"metric": "reward/mean", "patience": 5, "min_delta": 0.1, "max_kl": 2.0,
         "max_kl_steps": 3},
        {"metric": {"name": "reward/mean", "patience": 5, "min_delta": 0.1},
         "max_kl": {"limit": 2.0, "steps": 3}},
    ),
    "model.lora": (
        {"quantization": "nf4", "double_quantization": False},
        {"quantization": {"kind": "nf4", "double": False}},
    ),
    "precision": (
        {"dtype": "fp16", "loss_scale": 64, "min_loss_scale": 2.0, "initial_scale_power": 8,
         "loss_scale_window": 9, "hysteresis": 3, "consecutive_hysteresis": True},
        {"dtype": "fp16",
         "fp16": {"loss_scale": 64, "min_loss_scale": 2.0, "initial_scale_power": 8,
                  "loss_scale_window": 9, "hysteresis": 3, "consecutive_hysteresis": True}},
    ),
    "sft": EVAL,
    "distill": (
        {"eval_data": DATA, "eval_every_n_epochs": 1},
        {"eval": {"data": DATA, "every_n_epochs": 1}},
    ),
    "preference": (
        {"f_divergence": "alpha", "f_alpha": 0.3, **EVAL[0]},
        {"f_divergence": {"kind": "alpha", "alpha": 0.3}, **EVAL[1]},
    ),
    "rm": (
        {"loss": "huber", "huber_delta": 2.0, "eval_every_n_steps": 3, "eval_data": DATA},
        {"loss": {"kind": "huber", "delta": 2.0}, "eval": {"every_n_steps": 3, "data": DATA}},
    ),
    "data.sources.0": (
        {"kind": "dataset", "path": "x", "streaming": True, "shuffle_buffer": 7},
        {"kind": "dataset", "path": "x", "streaming": {"shuffle_buffer": 7}},
    ),
}  # fmt: skip
"""Section or job -> keys of the older form, and the same settings in the present form."""


def recipe(section: str, keys: dict[str, Any]) -> dict[str, Any]:
    """A copy of the recipe of ``section`` with keys of that section."""
    tree: dict[str, Any] = yaml.safe_load(yaml.safe_dump(OTHER_JOBS.get(section, RL)))
    if section in OTHER_JOBS:
        return tree | keys
    if section == "data.sources.0":
        tree["data"]["sources"] = [keys]
        return tree
    node = tree
    for name in section.split("."):
        node = node.setdefault(name, {})
    node.update(keys)
    return tree


def test_every_class_with_older_keys_has_a_case() -> None:
    """So that a section that is nested next is tested with all of its keys."""
    classes, seen = [*JOBS.values()], set[type[Node]]()
    while classes:
        cls = classes.pop()
        if cls not in seen:
            seen.add(cls)
            classes += [n for f in cls.model_fields.values() for n in nodes_in(f.annotation)]
    moved = [older for cls in seen for older in cls.older_keys]
    keys = {key for older, _ in CASES.values() for key in older}
    left = {key for older in moved for key in (older.switch, *older.keys)} - keys
    assert left <= {"", "partial", "lr_power", "higher_is_better", "fp16"}


@pytest.mark.parametrize("section", CASES)
def test_an_older_form_is_the_present_one_with_a_notice(
    section: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, present = CASES[section]
    expected = load_config(recipe(section, present))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "burnish"):
        assert load_config(recipe(section, older)) == expected
    (notice,) = [r.getMessage() for r in caplog.records if "older form" in r.getMessage()]
    prefix = "" if section in OTHER_JOBS else f"{section}."
    assert all(
        f"{prefix}{key} -> " in notice for key in set(older) - set(present) - {"export_lora"}
    )
    assert type(expected).model_validate(recipe(section, older)) == expected
    if section != "data.sources.0":
        overrides = [f"{prefix}{key}={value}" for key, value in older.items()]
        assert load_config(recipe(section, {}), overrides) == expected
        assert load_config(recipe(section, {}), overrides[::-1]) == expected


def test_saved_recipes_with_the_older_defaults_are_read_without_sections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run folder has every key, most of them at their defaults, which turned nothing on."""
    tree = yaml.safe_load(dump_yaml(load_config(RL)))
    saved = yaml.safe_load(dump_yaml(load_config(RL)))
    for job in ("sft", "preference"):
        now = load_config(recipe(job, {}))
        flat = yaml.safe_load(dump_yaml(now)) | {
            "eval_data": None, "eval_sets": {}, "eval_every_n_steps": 0,
            "eval_every_n_epochs": 0, "eval_delay_steps": 0,
        }  # fmt: skip
        del flat["eval"]
        assert load_config(flat, resumed=True) == now
    for section, key in (("rollout", "asynchronous"), ("shaping", "overlong"),
                         ("checkpoint", "export_at_end"), ("reference", "moving"),
                         ("train", "lr_scheduler")):  # fmt: skip
        del saved[section][key]
    del saved["algorithm"]["kl"]["adaptive"]
    saved["rollout"] |= {"max_staleness": None, "run_ahead": 1, "oversample": 1.0,
                         "in_flight": "recompute", "partial": False}  # fmt: skip
    saved["shaping"] |= {"overlong_buffer_len": 0, "overlong_penalty": 1.0}
    saved["checkpoint"] |= {"export_at_end": False, "export_dtype": None, "export_lora": None}
    saved["reference"] |= {"sync_every_n_steps": 0, "mixup_alpha": 0.6}
    saved["train"] |= {"lr_scheduler": "constant", "min_lr_ratio": 0.1, "lr_power": 1.0,
                       "lr_decay_ratio": 0.1, "lr_decay_shape": "linear",
                       "adam_betas": [0.9, 0.95], "adam_eps": 1e-8,
                       "optimizer": {"kind": "adamw"}}  # fmt: skip
    saved["algorithm"]["kl"] |= {"kl_target": None, "kl_horizon": 10_000}
    assert load_config(saved, resumed=True) == load_config(tree)
    assert not [r for r in caplog.records if "older form" in r.getMessage()]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["eval_data.max_len=7"], {"data": {"max_len": 7}}),
        (["eval_data.sources.0.name=010", "eval_sets.a.max_len=8"],
         {"data": {"sources": [{"path": "rows.jsonl", "name": "010"}]},
          "sets": {"a": {"max_len": 8}}}),
        (["eval_sets.b.sources=[y]"], {"sets": {"b": {"sources": ["y"]}}}),
        (["eval_sets={}", "eval_every_n_steps=0"], {"sets": {}, "every_n_steps": 0}),
        (["eval.delay_steps=9", "eval_delay_steps=4"], {"delay_steps": 4}),
        (["eval_delay_steps=9", "eval.delay_steps=4"], {"delay_steps": 4}),
        (["eval_every_n_steps=0", "eval_delay_steps=0", "eval_sets={}", "eval_data=null"], None),
        (["eval_data=null", "eval_every_n_steps=0", "eval_delay_steps=0", "eval_sets={}"], None),
        (["eval=null"], None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [0, 1])
def test_overrides_below_an_older_key_change_the_present_section(
    form: int, overrides: list[str], expected: dict[str, Any] | None
) -> None:
    """Whichever form the recipe has, a key in a mapping of the older form keeps its neighbors."""
    section = _merged(EVAL[1]["eval"], expected) if expected is not None else None
    present = recipe("sft", {"eval": section})
    assert load_config(recipe("sft", EVAL[form]), overrides) == load_config(present)


def _merged(tree: Any, changes: Any) -> Any:
    if not isinstance(changes, dict) or not changes:
        return changes
    return tree | {key: _merged(tree.get(key, {}), value) for key, value in changes.items()}


@pytest.mark.parametrize("older", [{}, {"eval_data": None}, {"eval_data": {"overlong": "drop"}}])
def test_older_times_apply_to_the_held_out_rows_of_data(older: dict[str, Any]) -> None:
    tree = recipe("sft", older | {"eval_every_n_steps": 3})
    tree["data"] |= {"held_out": 4}
    config: Any = load_config(tree)
    assert (config.eval.every_n_steps, config.eval.data.part) == (3, "held_out")
    assert config.eval.data.overlong == ("drop" if older.get("eval_data") else "error")


def test_older_times_without_rows_name_the_section_that_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"eval\.data: is required"):
        load_config(recipe("sft", {"eval_data": None, "eval_every_n_steps": 3}))


def test_an_override_of_an_older_key_wins() -> None:
    """It is given later than the recipe, whichever form that has; also with a default value."""
    present = recipe("rollout", CASES["rollout"][1])
    assert load_config(present, ["rollout.run_ahead=1"]).rollout.asynchronous.run_ahead == 1
    assert load_config(present, ["rollout.max_staleness=null", "rollout.in_flight=recompute",
                                 "rollout.run_ahead=1", "rollout.oversample=1",
                                 ]).rollout.asynchronous is None  # fmt: skip


@pytest.mark.parametrize(
    ("section", "override", "expected"),
    [
        ("train", "train.lr_scheduler=polynomial",
         {"lr_scheduler": {"kind": "polynomial", "min_ratio": 0.2}}),
        ("early_stopping", "early_stopping.metric=train/loss",
         {"metric": {"name": "train/loss", "patience": 5, "min_delta": 0.1},
          "max_kl": {"limit": 2.0, "steps": 3}}),
        ("early_stopping", "early_stopping.max_kl=1.0",
         {"metric": {"name": "reward/mean", "patience": 5, "min_delta": 0.1},
          "max_kl": {"limit": 1.0, "steps": 3}}),
        ("model.lora", "model.lora.quantization=nf4", CASES["model.lora"][1]),
        ("checkpoint", "checkpoint.export_dtype=null", {"export_at_end": {"path": "out"}}),
    ],
)  # fmt: skip
def test_a_switch_keeps_the_keys_that_were_beside_it(
    section: str, override: str, expected: dict[str, Any]
) -> None:
    older = {k: v for k, v in CASES[section][0].items() if not k.startswith(("lr_decay", "adam"))}
    expect = load_config(recipe(section, expected))
    assert load_config(recipe(section, older), [override]) == expect
    saved = yaml.safe_load(dump_yaml(load_config(recipe(section, older))))
    assert load_config(saved, [override]) == expect


@pytest.mark.parametrize("switch", ["true", "on", "false"])
@pytest.mark.parametrize(
    ("section", "key"),
    [("checkpoint.export_at_end", "dtype=bf16"), ("data.sources.0.streaming", "shuffle_buffer=5")],
)
def test_a_key_can_follow_its_switch(section: str, key: str, switch: str) -> None:
    tree = recipe("data.sources.0", {"kind": "dataset", "path": "x"})
    name, _, value = key.partition("=")
    config = load_config(tree, [f"{section}={switch}", f"{section}.{key}"])
    assert config == load_config(tree, [f"{section}={{{name}: {value}}}"])


@pytest.mark.parametrize(
    ("section", "keys", "problem"),
    [
        ("checkpoint", {"export_at_end": False, "export_dtype": "bf16"}, "export_dtype"),
        ("model.lora", {"quantization": None, "double_quantization": False}, "double_quant"),
        ("rollout", {"max_staleness": None, "oversample": 1.5}, "max_staleness: is required"),
    ],
)
def test_a_key_beside_a_switch_that_is_off_is_refused(
    section: str, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(recipe(section, keys))


def test_a_default_beside_no_switch_changes_nothing() -> None:
    for section, keys in (("train", {"min_lr_ratio": 0.1}), ("rollout", {"run_ahead": 1}),
                          ("checkpoint", {"export_dtype": None})):  # fmt: skip
        assert load_config(recipe(section, keys)) == load_config(RL)


def test_a_key_without_the_one_that_enables_it_names_that_one() -> None:
    with pytest.raises(ConfigError, match=r"rollout.asynchronous.max_staleness: is required"):
        load_config(RL, ["rollout.partial=true"])


def test_saved_engines_are_read() -> None:
    """``engine.json`` has the model of its run."""
    state = {"scratch": {}, "lora": {"quantization": "nf4", "double_quantization": False}}
    lora = ModelConfig.model_validate(state).lora
    assert lora is not None and lora.quantization is not None and not lora.quantization.double


B, EPS, DEFAULT = [0.8, 0.9], 1e-6, [0.9, 0.95]
OLDER_ADAM = {"adam_betas": B}


@pytest.mark.parametrize(
    ("train", "critic", "overrides", "expected"),
    [
        (OLDER_ADAM, {}, [], (B, None)),
        (OLDER_ADAM, {"optimizer": "muon"}, [], (B, B)),
        (OLDER_ADAM, {"optimizer": {"kind": "adamw_8bit"}}, [], (B, B)),
        (OLDER_ADAM | {"optimizer": "muon"}, {"optimizer": {}}, [], (B, B)),
        (OLDER_ADAM, {"optimizer": "adafactor"}, [], (B, None)),
        (OLDER_ADAM, {"optimizer": {"betas": [0.5, 0.6]}}, [], (B, [0.5, 0.6])),
        ({"adam_betas": DEFAULT}, {"optimizer": "muon"}, [], (DEFAULT, DEFAULT)),
        ({"adam_betas": DEFAULT, "optimizer": "adafactor"}, {"optimizer": "muon"}, [],
         (None, DEFAULT)),
        ({}, {"optimizer": "muon"}, [f"train.adam_betas={B}"], (B, B)),
        ({}, {}, [f"train.adam_betas={B}", "critic.optimizer=muon"], (B, B)),
        ({}, {}, ["critic={optimizer: muon}", f"train.adam_betas={B}"], (B, B)),
        (OLDER_ADAM, {}, ["critic.optimizer.kind=muon"], (B, B)),
        (OLDER_ADAM, {"optimizer": "muon"}, ["critic.optimizer={kind: adamw}"], (B, B)),
        (OLDER_ADAM, {"optimizer": "muon"}, ["critic.optimizer=null"], (B, None)),
        (OLDER_ADAM, {"optimizer": "muon"}, ["train.adam_betas.0=0.7"], ([0.7, 0.9],) * 2),
        (OLDER_ADAM, {"optimizer": "muon"}, [f"train.adam_betas={DEFAULT}"], (DEFAULT,) * 2),
        (OLDER_ADAM, {}, ["train.optimizer=muon"], (B, None)),
        (OLDER_ADAM, {}, ["train.optimizer={kind: muon, momentum: 0.5}"], (B, None)),
        (OLDER_ADAM, {}, ["train={train_batch_size: 8, optimizer: muon}"], (DEFAULT, None)),
        (OLDER_ADAM, {}, ["train.optimizer.betas=[0.5, 0.6]"], ([0.5, 0.6], None)),
        (OLDER_ADAM, {"optimizer": "muon"}, ["critic.optimizer.betas=[0.5, 0.6]"],
         (B, [0.5, 0.6])),
        (OLDER_ADAM, {}, ["train.optimizer.betas=[0.5, 0.6]", f"train.adam_betas={B}"],
         (B, None)),
        (OLDER_ADAM, {"optimizer": "muon"}, ["train.optimizer.betas.0=0.5"], ([0.5, 0.9], B)),
        ({"optimizer": {"betas": B}}, {"optimizer": "muon"}, [], (B, DEFAULT)),
        ({"optimizer": {"betas": B}}, {"optimizer": {"betas": B}},
         ["train.adam_betas=[0.5, 0.6]"], ([0.5, 0.6],) * 2),
        ({"optimizer": {"betas": B}}, {}, ["train.optimizer=muon"], (DEFAULT, None)),
    ],
)  # fmt: skip
def test_older_adam_keys_apply_to_the_optimizers_of_policy_and_critic(
    train: dict[str, Any], critic: dict[str, Any], overrides: list[str], expected: tuple[Any, Any]
) -> None:
    """Also to an optimizer that an override selects later, as when they were keys of ``train``. A
    later value of the present form wins, and that of a critic in the same file."""
    tree = RL | {"train": RL["train"] | train, "critic": critic}
    tree["algorithm"] = RL["algorithm"] | {"advantage": "gae"}
    before = yaml.safe_dump(tree)
    config: Any = load_config(tree, overrides)
    assert tuple(map(_betas, (config.train.optimizer, config.critic.optimizer))) == expected
    saved = yaml.safe_load(dump_yaml(config))
    assert load_config(saved, resumed=True) == config
    if not overrides:
        assert type(config).model_validate(tree) == config
    assert yaml.safe_dump(tree) == before


def _betas(optimizer: Any) -> list[float] | None:
    return list(optimizer.betas) if isinstance(optimizer, AdamOptimizer) else None


def test_a_saved_recipe_with_older_adam_keys_is_read_for_both_optimizers() -> None:
    """A run folder has all keys; the optimizers had neither betas nor eps."""
    tree = RL | {"train": RL["train"] | {"optimizer": {"betas": B, "eps": EPS}}}
    tree |= {"critic": {"optimizer": {"kind": "muon", "betas": B, "eps": EPS}}}
    tree["algorithm"] = RL["algorithm"] | {"advantage": "gae"}
    config = load_config(tree)
    saved = yaml.safe_load(dump_yaml(config))
    for section in ("train", "critic"):
        del saved[section]["optimizer"]["betas"], saved[section]["optimizer"]["eps"]
    saved["train"] |= {"adam_betas": B, "adam_eps": EPS}
    assert load_config(saved, resumed=True) == config


@pytest.mark.parametrize("optimizer", ["muon", Muon(), 5, ["adamw"]])
def test_an_optimizer_beside_an_older_key_is_not_lost(optimizer: Any) -> None:
    tree = {"optimizer": optimizer, "adam_eps": EPS}
    if optimizer in ("muon", Muon()):
        assert TrainConfig.model_validate(tree).optimizer == Muon(eps=EPS)
    else:
        with pytest.raises(ValidationError, match="optimizer"):
            TrainConfig.model_validate(tree)


def test_older_adam_keys_with_an_optimizer_without_them_are_refused() -> None:
    for optimizer in ("adafactor", {"kind": "adafactor", "decay_rate": -0.7}):
        with pytest.raises(ConfigError, match=r"train\.optimizer\.eps"):
            load_config(recipe("train", {"optimizer": optimizer, "adam_eps": EPS}))
    with pytest.raises(ConfigError, match=r"train\.optimizer\.eps"):
        load_config(recipe("train", {"adam_eps": EPS}), ["train.optimizer=adafactor"])
