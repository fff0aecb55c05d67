"""The generate job on Ray and with vLLM: the rows of one process and the local engine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.rewards.base import RewardError
from burnish.rollout.vllm.engine import INSTALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RAY = ["cluster.runtime=ray", "cluster.layout=separate", "cluster.rollout_workers=2"]
HAS_VLLM = importlib.util.find_spec("vllm") is not None
MakeConfig = Callable[..., JobConfig]


@pytest.fixture
def generate(tmp_path: Path, sums: str) -> MakeConfig:
    """16 sums in steps of 4, 4 samples each; heads of 32, which vLLM can compute."""

    def make(name: str, *overrides: str) -> JobConfig:
        heads = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
        tree: dict[str, Any] = {
            "job": "generate",
            "run_dir": str(tmp_path / name),
            "model": {"scratch": {"alphabet": "0123456789+=", **heads}},
            "data": {"sources": [sums], "prompt_max_len": 8},
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "generate_max_len": 4,
            },
            "rewards": [{"kind": "function", "name": "digits"}],
        }
        return load_config(tree, overrides)

    return make


def rows_of(config: JobConfig, **options: Any) -> list[dict[str, Any]]:
    run_dir = burnish.run(config, **options).run_dir
    return [json.loads(x) for x in (run_dir / "generated.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("ray_cluster")
def test_workers_on_ray_answer_as_one_process_does(
    generate: MakeConfig, reward: Callable[[str], float]
) -> None:
    inline = rows_of(generate("inline"), rewards=reward)
    assert len(inline) == 64
    assert rows_of(generate("ray", *RAY), rewards=reward) == inline


@pytest.mark.usefixtures("ray_cluster")
def test_a_reward_model_on_ray_chooses_the_pairs_of_one_process(
    generate: MakeConfig, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    pairs = write_rows("pairs", [{"prompt": f"{i}=", "chosen": "1", "rejected": "+"} for i in "12"])
    rm = load_config(
        {
            "job": "rm",
            "run_dir": str(tmp_path / "rm"),
            "model": generate("x").model.model_dump(),
            "data": {"sources": [pairs]},
            "train": {"train_batch_size": 2, "lr": 1e-2},
        }
    )
    folder = burnish.export(burnish.run(rm).run_dir, tmp_path / "reward", model="reward")
    options = [
        f"rewards=[{{kind: model, model: {{path: '{folder}'}}}}]",
        "mode.kind=pairs",
        "mode.keep_truncated=true",
    ]
    inline, ray = rows_of(generate("a", *options)), rows_of(generate("b", *RAY, *options))
    assert len(inline) >= 8
    for one, other in zip(inline, ray, strict=True):
        assert (one["chosen"], one["rejected"]) == (other["chosen"], other["rejected"])
        # 1e-5: fp32 scores computed beside other rows
        assert one["margin"] == pytest.approx(other["margin"], abs=1e-5)


@pytest.mark.skipif(not HAS_VLLM, reason=INSTALL)
def test_vllm_answers_as_the_local_engine_does_and_a_resumed_run_as_one_that_went_through(
    generate: MakeConfig, reward: Callable[[str], float]
) -> None:
    vllm = ["rollout.engine.kind=vllm"]
    greedy = ["rollout.temperature=0", "rollout.n_samples_per_prompt=1"]
    local = rows_of(generate("local", *greedy), rewards=reward)
    assert rows_of(generate("greedy", *greedy, *vllm), rewards=reward) == local
    whole = rows_of(generate("whole", *vllm), rewards=reward)
    calls = 0

    def crashing(responses: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("stop here")
        return [reward(r) for r in responses]

    config = generate("half", *vllm)
    with pytest.raises(RewardError, match="stop here"):
        burnish.run(config, rewards=crashing)
    assert rows_of(config, rewards=reward, resume=config.run_dir) == whole
