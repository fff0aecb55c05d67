"""Runs with agent programs: the same curve as with the environment, locally and on Ray, and the
page about them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from socket import AF_INET
from typing import Any

import fork_server
import psutil
import pytest
import yaml

import burnish
from burnish.config import load_config
from burnish.config.yaml_text import RecipeLoader
from burnish.environments.importing import LoadError
from burnish.observe.samples import read_samples
from burnish.rollout.vllm.engine import INSTALL
from burnish.sandbox.base import SandboxError
from burnish.sandbox.bubblewrap import DEFAULT_PYTHON

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "recipes/agents/guess_number.py"
ENVIRONMENT = ROOT / "recipes/environments/guess_number.py"
PLAYED_BY = {
    "environment": f"{{environment: '{ENVIRONMENT}:GuessNumber', max_turns: 3, max_tokens: 32}}",
    "agent": f"{{agent: '{AGENT}:agent', workers: 2, max_turns: 3, max_tokens: 32}}",
    "command": f"{{command: [PYTHON, '{AGENT}'], max_turns: 3, max_tokens: 32}}",
}


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run the recipe of the page's example for two steps. Return its metrics."""
    recipe = load_config(
        ROOT / "recipes/tiny_agent.yaml",
        [
            f"run_dir={folder}",
            "max_steps=2",
            "rollout.rollout_batch_size=2",
            "rollout.n_samples_per_prompt=4",
            "train.train_batch_size=8",
            "eval=null",
            *overrides,
        ],
    )
    burnish.run(recipe)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tokens(folder: Path) -> list[Any]:
    """The messages of the policy and the rows of every episode of a run."""
    records = [json.loads(sample["episode"]) for sample in read_samples(folder)]
    return [([turn["message"] for turn in r["turns"]], r["rows"]) for r in records]


def test_an_openai_client_gives_the_curve_of_the_environment(tmp_path: Path) -> None:
    """Token for token, because the requests are the same: as a function in a worker, and as a
    process per episode. A response that is cut ends an episode of the environment; the agent sees
    it and ends by itself."""
    curves = {
        kind: run(
            tmp_path / kind,
            "rollout.episodes=" + episodes.replace("PYTHON", fork_server.interpreter()),
        )
        for kind, episodes in PLAYED_BY.items()
    }
    same = ("reward/", "train/loss", "train/grad_norm", "episodes/turns", "episodes/tokens")
    for kind in ("agent", "command"):
        assert tokens(tmp_path / kind) == tokens(tmp_path / "environment")
        for found, wanted in zip(curves[kind], curves["environment"], strict=True):
            names = [name for name in wanted if name.startswith(same)]
            names.remove("reward/truncated_frac")
            assert found["reward/truncated_frac"] == 0
            assert len(names) > 5
            assert {name: found[name] for name in names} == {name: wanted[name] for name in names}
            assert found["train/mismatch_max"] < 1e-5
            assert found["episodes/done_frac"] == 1


def test_asynchronous_episodes_of_an_agent_keep_the_bound(tmp_path: Path) -> None:
    """Programs call the policy while it is trained. Tokens of the trained version have its
    log-probs; those of older versions have others."""
    overlap = [
        "rollout.asynchronous.max_staleness=2",
        "rollout.engine.own_weights=true",
        "max_steps=5",
    ]
    lines = run(
        tmp_path / "run", *overlap, "algorithm.correction={}", "rollout.asynchronous.oversample=1.5"
    )
    ages = [line["rollout/age_max"] for line in lines]
    assert len(ages) == 5 and 1 <= max(ages) <= 2
    kls = [(n, line[n]) for line in lines for n in line if n.endswith("behavior_kl")]
    now = [kl for name, kl in kls if name == "train/age_0_behavior_kl"]
    assert now and max(now) < 1e-10  # half the square of an fp32 rounding error
    assert max(kl for name, kl in kls if name != "train/age_0_behavior_kl") > 1e-4
    assert lines[0]["train/mismatch_max"] < 1e-5


WITHOUT_PACKAGES = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode(),
    {"x-api-key": os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
found = len(json.load(urllib.request.urlopen(request))["choices"])
with open(os.environ["BURNISH_REWARD"], "w") as file:
    json.dump({"found": found}, file)
"""


FUNCTION = """
import os

async def agent(task, endpoint, reward):
    assert endpoint.base_url == os.environ["OPENAI_BASE_URL"] and task["prompt"]
    import my_agent  # calls the policy
    return {"found": my_agent.found * reward}
"""


def test_agents_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's settings, with the default interpreter: a command and a function. Without
    bubblewrap: skipped, or failed under CI=true."""
    episodes = yaml.load(block("yaml sandbox"), Loader=RecipeLoader)["rollout"]["episodes"]
    with tempfile.TemporaryDirectory(prefix="burnish-test-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.chdir(folder)
        Path("agents").mkdir()
        Path("agents/my_agent.py").write_text(WITHOUT_PACKAGES)
        Path("agents/function.py").write_text(FUNCTION)
        episodes["sandbox"]["python"] = None
        episodes["max_tokens"] = 32
        function = {
            "agent": "agents/function.py:agent",
            "python": DEFAULT_PYTHON,
            "options": {"reward": 1},
            "sandbox": "bubblewrap",
            "max_tokens": 32,
        }
        try:
            steps = [
                run(tmp_path / name, "max_steps=1", f"rollout.episodes={json.dumps(given)}")[0]
                for name, given in (("command", episodes), ("function", function))
            ]
        except SandboxError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(error))
    for step in steps:
        assert step["episodes/done_frac"] == step["episodes/turns"] == 1
        assert step["reward/mean"] == 1


def address() -> str:
    """An address of this machine, not of the loopback if there is another."""
    found = [
        at.address for of in psutil.net_if_addrs().values() for at in of if at.family == AF_INET
    ]
    return next((one for one in found if not one.startswith("127.")), "127.0.0.1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_agents_on_ray_equal_those_in_one_process(tmp_path: Path, ray_cluster: Any) -> None:
    """With two rollout workers. The server listens on an address of the node's network, if there is
    one; then the agents run in actors."""
    run(tmp_path / "inline")
    on_ray = ["cluster.runtime=ray", "cluster.layout=separate", "cluster.rollout_workers=2"]
    found = run(tmp_path / "ray", *on_ray, f"rollout.episodes.server_host={address()}")
    assert tokens(tmp_path / "ray") == tokens(tmp_path / "inline")
    assert all(step["train/mismatch_max"] < 1e-5 for step in found)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick_vllm_starts")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL)
def test_agents_play_with_vllm(tmp_path: Path) -> None:
    heads = ["model.scratch.num_heads=2", "model.scratch.num_kv_heads=2"]  # of 32
    found = run(tmp_path, "rollout.engine.kind=vllm", "train.lr=1e-2", *heads)
    for step in found:
        # fp32: log-probs of up to 3 by other kernels. Stale weights: 1e-2 and more.
        assert step["train/mismatch_max"] < 1e-5
        assert step["episodes/done_frac"] == 1


def test_a_missing_agent_stops_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("burnish.train.engines.load_causal_lm", load)
    with pytest.raises(LoadError, match="no file"):
        run(tmp_path, f"rollout.episodes={{agent: '{tmp_path}/none.py:f', max_tokens: 32}}")


# ---- docs/agents.md ----------------------------------------------------------------------------

PAGE = (ROOT / "docs/agents.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (text,) = re.findall(rf"^```{re.escape(kind)}\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


def test_the_agent_and_the_recipe_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_agent.py").write_text(block("python agent"))
    rows = [{"prompt": f"What is {i} + 1?", "label": str(i + 1)} for i in range(9)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = yaml.load(block("yaml agent"), Loader=RecipeLoader)
    scratch = "{scratch: {alphabet: '0123456789 +?abcdefghijklmnopqrstuvwxyz'}}"
    smaller = [
        "rollout.episodes.max_tokens=500",
        "rollout.rollout_batch_size=1",
        "train.train_batch_size=8",
        "max_steps=1",
    ]
    found = burnish.run(load_config(recipe, [f"model={scratch}", *smaller]))
    assert found.metrics["episodes/turns"] == 2
    assert found.metrics["episodes/done_frac"] == 1
