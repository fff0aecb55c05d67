"""Batch inference that makes no sense is refused: at load, or before anything is sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig
from burnish.data.sources import DataError
from burnish.driver.errors import RunError
from burnish.rewards.base import RewardError
from burnish.rewards.build import build_rewards, named_functions
from burnish.rewards.function.config import FunctionReward

CONDITIONED = ["mode=conditioned", "condition.template='{reward:.1f}|{prompt}'"]
MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
RowsOf = Callable[..., list[dict[str, Any]]]


def test_an_output_that_exists_is_refused_before_anything_is_loaded(
    generate: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("mine")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("cannot be loaded")
    config = generate(
        f"output={tmp_path / 'rows.jsonl'}", f"model.path={tmp_path}/model", "model.scratch=null"
    )
    with pytest.raises(RunError, match=r"rows.jsonl already exists and is never overwritten"):
        burnish.run(config)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"output: .* cannot be written"):
        burnish.run(generate(f"output={tmp_path / 'file' / 'rows.jsonl'}", name="b"))


def test_all_prompts_that_cannot_be_used_are_counted_before_any_is_sampled(
    generate: MakeConfig, reward: Reward, write_rows: Callable[..., str]
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "1" * n} for n in (2, 41, 3, 42, 43, 44, 45, 46)]
    rows += [{"q": "no prompt"}]
    path = write_rows("long", rows)
    with pytest.raises(DataError, match="prompts") as caught:
        burnish.run(generate(f"data.sources=[{path}]"), rewards=reward)
    assert "long.jsonl:2" in str(caught.value)
    burnish.run(generate(f"data.sources=[{path}]", "num_prompts=1"), rewards=reward)


def test_a_prompt_with_no_place_for_a_reward_is_found_before_any_is_sampled(
    generate: MakeConfig, reward: Reward, write_rows: Callable[..., str], chat_template: str
) -> None:
    path = write_rows("talk", [{"prompt": [{"role": "system", "content": "s"}]}])
    config = generate(
        *CONDITIONED,
        f"data.sources=[{path}]",
        f"model.chat_template={json.dumps(chat_template)}",
    )
    with pytest.raises(DataError, match=r"talk.jsonl:1: condition.template"):
        burnish.run(config, rewards=reward)


def test_prompts_of_two_forms_cannot_be_one_parquet_column(
    generate: MakeConfig,
    reward: Reward,
    write_rows: Callable[..., str],
    chat_template: str,
    rows_of: RowsOf,
) -> None:
    """Said before any is sampled; JSON lines hold both."""
    rows = [{"prompt": "1="}, {"prompt": [{"role": "user", "content": "1"}]}]
    options = [
        f"data.sources=[{write_rows('two', rows)}]",
        f"model.chat_template={json.dumps(chat_template)}",
    ]
    config = generate(*options, "output='{run_dir}/rows.parquet'")
    with pytest.raises(DataError, match="some prompts are texts and others messages"):
        burnish.run(config, rewards=lambda response: 1 / 0)
    assert len(rows_of(burnish.run(generate(*options, name="b"), rewards=reward).run_dir)) == 8


def test_a_reward_that_fails_stops_the_run_or_costs_its_prompt(
    generate: MakeConfig, rows_of: RowsOf
) -> None:
    def fragile(response: str, label: str) -> float:
        if label == "5":
            raise ValueError("no")
        return 1.0

    with pytest.raises(RewardError, match="raised ValueError: no"):
        burnish.run(generate(name="fail"), rewards=fragile)
    drop = generate("on_reward_failure.then=drop_group", name="drop")
    result = burnish.run(drop, rewards=fragile)
    assert result.metrics["total/prompts_reward_failed"] == 1
    assert len(rows_of(result.run_dir)) == 84


def test_a_reward_that_always_fails_does_not_go_on_for_ever(generate: MakeConfig) -> None:
    def broken(response: str) -> float:
        raise ValueError("no")

    config = generate("on_reward_failure.then=drop_group", "rollout.rollout_batch_size=1")
    with pytest.raises(RewardError, match="every prompt of the last 10 steps"):
        burnish.run(config, rewards=broken)


@pytest.mark.parametrize(
    ("entries", "given", "says"),
    [
        (["a", "b"], "list", r"rewards=\[<function .* is no callable"),
        (["a", "b"], "text", "rewards='rewards.py:f' is no callable"),
        (["a", "b"], {"a": "f"}, r"rewards\['a'\]='f' is no callable"),
        (["a", "b"], "one", "has no name.*under the entry's name"),
        (["a", "b"], {"a": "it", "c": "it"}, "rewards.1 .*'b'.* those given are a, c"),
        (["a", "b"], {}, "none was given"),
        ([None], {"function": "it", "zz": "it"}, "no reward .* uses the given function 'zz'"),
        (["a", None], {"a": "it", "function": "it"}, None),
        ([None, None], "one", None),
        (["a"], {"other": "it"}, None),
        (["a", "b"], "pairs", None),
        ([], "empty", None),
    ],
)
def test_callables_of_rewards_are_named_as_their_entries(
    entries: list[str | None], given: Any, says: str | None
) -> None:
    def reward(response: str) -> float:
        return 1.0

    forms: dict[str, Any] = {"list": [reward], "text": "rewards.py:f", "one": reward}
    forms |= {"pairs": [("a", reward), ("b", reward)], "empty": ()}
    if isinstance(given, dict):
        value = {name: reward if f == "it" else f for name, f in given.items()}
    else:
        value = forms[given]
    configs = [
        FunctionReward(kind="function", **({"name": name} if name else {})) for name in entries
    ]
    if says is None:
        assert len(build_rewards(configs, functions=named_functions(value))) == len(entries)
        return
    with pytest.raises(RewardError, match=says):
        build_rewards(configs, functions=named_functions(value))


def test_functions_that_no_reward_takes_are_refused(generate: MakeConfig, reward: Reward) -> None:
    with pytest.raises(RewardError, match="no reward of the recipe uses"):
        burnish.run(generate("rewards=[]"), rewards=reward)
