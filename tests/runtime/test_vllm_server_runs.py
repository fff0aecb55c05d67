"""Whole jobs that sample with one real vLLM server, which all tests of this file use."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_server import vllm_server

import burnish
import burnish.rollout.servers.group as server_group
from burnish.config import JobConfig, load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.rollout.base import Request, Sampling
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.servers.engine import VllmServerEngine
from burnish.rollout.vllm.engine import INSTALL, StaleWeightsError
from burnish.runtime.base import WorkerLostError
from burnish.runtime.ray.server_sync import ServerSync
from burnish.runtime.ray.train_engine import RemoteTrainEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL),
]
MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
Lines = list[dict[str, float]]
Compare = Callable[[Lines, Lines], None]
RAY = ["cluster.runtime=ray", "cluster.policy_ranks=2"]
MISMATCH = "train/mismatch_max"
SIZES = {"num_heads": 1, "num_kv_heads": 1}  # heads of 32
SCRATCH = {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}
MODEL = ModelConfig(scratch=ScratchConfig(**SCRATCH, max_position_embeddings=64, **SIZES))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with vllm_server(MODEL, max_model_len=64) as found:
        yield found


def recipe(url: str, *more: str) -> list[str]:
    scratch = [f"model.scratch.{name}={value}" for name, value in SIZES.items()]
    engine = f"rollout.engine={{kind: vllm_server, urls: ['{url}']}}"
    return [*scratch, engine, "train.lr=1e-2", *more]


def test_a_grpo_run_samples_from_the_weights_it_trains(
    url: str, rl: MakeConfig, reward: Reward, evaluation: list[str]
) -> None:
    config = rl(*recipe(url, "max_steps=3", *evaluation))
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    steps = [line for line in lines if "train/mismatch_max" in line]
    assert len(steps) == 3
    # fp32: log-probs of up to 5 by other kernels. Stale weights would be off by 1e-2 and more
    # after the first step of 1e-2.
    assert all(line["train/mismatch_max"] < 1e-5 for line in steps)
    assert any(line["train/grad_norm"] > 0 for line in steps)
    assert [line["sync/version"] for line in steps] == [1, 2, 3]
    assert "eval/pass@1" in lines[-1]
    assert "vllm-servers" not in {thread.name for thread in threading.enumerate()}


def test_an_asynchronous_run_knows_the_age_of_each_token(
    url: str, rl: MakeConfig, reward: Reward
) -> None:
    """Log-probs of samples of age 0 are those of the weights that are trained."""
    config = rl(
        *recipe(
            url, "max_steps=4", "rollout.asynchronous.max_staleness=1", "algorithm.correction={}"
        )
    )
    lines = read_metrics(burnish.run(config, rewards=reward).run_dir)
    ages = [line["rollout/age_max"] for line in lines if "rollout/age_max" in line]
    assert len(ages) == 4 and ages[0] == 0 and set(ages) <= {0, 1} and 1 in ages


@pytest.mark.usefixtures("ray_cluster")
def test_two_ranks_on_ray_give_the_numbers_of_one_process(
    url: str,
    rl: MakeConfig,
    reward: Reward,
    evaluation: list[str],
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank dies before the weights of step 2 are transferred. The run rolls back to its
    checkpoint of step 0, loads these weights into the server again, and repeats both steps."""
    options = recipe(url, "max_steps=3", *evaluation)
    one = burnish.run(rl(*options, f"run_dir={rl().run_dir}-one"), rewards=reward).run_dir
    pushed: list[int] = []
    plain = RemoteTrainEngine.transfer_weights

    def sabotaged(policy: RemoteTrainEngine, *given: Any) -> Any:
        if policy.version == 2 and 2 not in pushed:
            policy.group.cluster.ray.kill(policy.group.workers[1])
        pushed.append(policy.version)
        return plain(policy, *given)

    monkeypatch.setattr(RemoteTrainEngine, "transfer_weights", sabotaged)
    run_dir = burnish.run(rl(*options, *RAY), rewards=reward).run_dir
    assert pushed == [0, 1, 2, 0, 1, 2, 3]
    assert "rank 1 of the policy" in (run_dir / "run.log").read_text()
    lines = read_metrics(run_dir)
    compare(read_metrics(one), lines)
    steps = [line for line in lines if MISMATCH in line]
    assert all(line[MISMATCH] < 1e-5 for line in steps)
    assert [line["sync/version"] for line in steps] == [1, 2, 3]
    assert all(line["sync/buckets"] == 1 and line["sync/bytes"] > 0 for line in steps)
    assert "vllm-servers" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("ray_cluster")
def test_an_asynchronous_run_on_ray_loads_staged_weights(
    url: str,
    rl: MakeConfig,
    reward: Reward,
    evaluation: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of step 1 are lost in the object store after their load has begun. So the server cannot
    sample, and the run rolls back to its checkpoint of step 0."""
    plain, loads = ServerSync._payloads, count()

    def lost(sync: ServerSync, kept: Any) -> Iterator[Any]:
        if next(loads) == 1:
            raise WorkerLostError("weights in the object store are lost")
        yield from plain(sync, kept)

    monkeypatch.setattr(ServerSync, "_payloads", lost)
    bound = ["rollout.asynchronous.max_staleness=1", "algorithm.correction={}"]
    config = rl(*recipe(url, "max_steps=4", *bound, *evaluation, *RAY))
    run_dir = burnish.run(config, rewards=reward).run_dir
    assert "are lost; rolling back" in (run_dir / "run.log").read_text()
    lines = read_metrics(run_dir)
    steps = [line for line in lines if "rollout/age_max" in line]
    ages = [line["rollout/age_max"] for line in steps]
    assert len(ages) == 4 and ages[0] == 0 and set(ages) <= {0, 1} and 1 in ages
    size = steps[0]["sync/bytes"]
    assert all(line["sync/stored_bytes"] in (size, 2 * size) for line in steps)
    assert "eval/pass@1" in lines[-1]


def test_an_evaluation_sends_its_model(
    url: str, rl: MakeConfig, reward: Reward, evaluation: list[str], tmp_path: Path
) -> None:
    """Greedy, so both engines give the same responses. The server has other weights before."""
    scores = {}
    options = recipe(url)
    for engine in ({"kind": "local"}, {"kind": "vllm_server", "urls": [url]}):
        tree = {
            "job": "evaluate",
            "run_dir": str(tmp_path / engine["kind"]),
            "model": rl(*options).model.model_dump(),
            "eval": {"generate_max_len": 4},
            "engine": engine,
        }
        dropped = ("eval.n_samples", "eval.pass_k", "eval.temperature")
        plain = [e for e in evaluation if not e.startswith(dropped)]
        config = load_config(tree, [*plain, "eval.temperature=0"])
        scores[engine["kind"]] = burnish.run(config, rewards=reward).metrics["eval/reward"]
    assert scores["vllm_server"] == scores["local"]


def test_weights_that_change_on_their_way_are_found(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one weight, in the file."""
    model = load_causal_lm(MODEL)
    options = VllmServers(kind="vllm_server", urls=(url,))
    engine = VllmServerEngine(model, load_tokenizer(MODEL), options, max_model_len=64)
    plain = server_group.weight_files

    def flipped(*given: Any) -> Iterator[Path]:
        for file in plain(*given):
            tensors = load_file(file)
            tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
            save_file(tensors, file)
            yield file

    try:
        engine.load_weights(1, model.named_parameters())
        monkeypatch.setattr(server_group, "weight_files", flipped)
        with pytest.raises(StaleWeightsError, match=r"norm\.weight has other values"):
            engine.load_weights(2, model.named_parameters())
        with pytest.raises(RuntimeError, match="cannot sample"):
            engine.submit([Request("a", (7,))], Sampling(4))
        monkeypatch.undo()
        engine.load_weights(3, model.named_parameters())
        assert [c.version for c in engine.generate([Request("a", (7,))], Sampling(4))] == [3]
    finally:
        engine.close()


def test_another_model_is_refused(url: str, rl: MakeConfig, reward: Reward) -> None:
    config = rl(*recipe(url, "model.scratch.num_layers=2", "precision.rollout_dtype=bf16"))
    with pytest.raises(ModelError, match=r"(?s)--dtype bfloat16.*num_hidden_layers=1 \(trainer"):
        burnish.run(config, rewards=reward)
