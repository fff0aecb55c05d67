"""The launch files do what they say: the SLURM script runs a whole job on a Ray cluster that it
starts and ends (with stand-ins for SLURM's own commands), the KubeRay file names what exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import fork_server
import psutil
import pytest
import yaml

from burnish.config import RLConfig, load_config
from burnish.config.placement import placement_groups
from burnish.rewards.remote.config import RemoteReward
from burnish.rollout.vllm.weights import FILE_BYTES

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"

SRUN = """#!/usr/bin/env bash
while [[ ${1-} == --* ]]; do shift; done
exec "$@"
"""
TINY = """
job: sft
run_dir: run
max_steps: 3
model: {scratch: {hidden_size: 32}}
data: {sources: [{path: rows.jsonl}]}
train: {train_batch_size: 2, micro_train_batch_size: 1}
cluster: {runtime: ray, start_timeout_s: 120}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of an allocation of one node, this one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    python = shlex.quote(fork_server.interpreter())
    script(commands / "srun", SRUN)
    script(commands / "scontrol", "#!/bin/sh\necho localhost\n")
    script(commands / "hostname", "#!/bin/sh\necho 127.0.0.1\n")
    script(commands / "python", f'#!/bin/sh\nexec {python} "$@"\n')
    script(commands / "burnish", f'#!/bin/sh\nexec {python} -m burnish "$@"\n')
    ray = "from ray.scripts.scripts import main; import sys; sys.argv[0] = 'ray'; main()"
    script(commands / "ray", f'#!/bin/sh\nexec {python} -c {shlex.quote(ray)} "$@"\n')
    return os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_GPUS_ON_NODE": "0",
        "SLURM_CPUS_PER_TASK": "2",
        "RAY_PORT": str(free_port()),
        "RAY_TMPDIR": "/tmp",
    }


def submitted(
    recipe: str, slurm: dict[str, str], folder: Path, name: str = "slurm.sh"
) -> subprocess.CompletedProcess[str]:
    """The run of an SFT recipe by a script, to its end."""
    return subprocess.run(
        [str(LAUNCH / name), "sft", recipe],
        cwd=folder,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=300,
    )


def ray_processes(port: str) -> list[str]:
    """Command lines of the cluster's processes."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if f":{port}" in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


@pytest.mark.slow
def test_the_slurm_script_runs_a_job_on_its_own_cluster_and_stops_it(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    rows = [json.dumps({"prompt": f"{a}+1=", "response": f"{a + 1}"}) for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    done = submitted("tiny.yaml", slurm, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["step"] == 3
    _, alive = psutil.wait_procs(
        [p for p in psutil.process_iter() if _of_cluster(p, slurm["RAY_PORT"])], timeout=30
    )
    assert not alive, ray_processes(slurm["RAY_PORT"])


def _of_cluster(process: psutil.Process, port: str) -> bool:
    try:
        return f":{port}" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm.sh", "slurm_ranks.sh"])
def test_the_slurm_script_returns_the_exit_code_of_the_job(
    name: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    done = submitted("missing.yaml", slurm, tmp_path, name)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    assert "missing.yaml does not exist" in done.stderr


def test_the_kuberay_file_runs_a_recipe_that_exists_with_keys_that_exist() -> None:
    """Nine workers of eight GPUs are what the recipe takes; the head offers nothing."""
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]
    command = shlex.split(job["entrypoint"])
    assert command[:2] == ["burnish", "rl"]
    recipe = ROOT / "recipes" / Path(command[2]).name
    overrides = [part for part in command[3:] if "=" in part]
    config = load_config(recipe, overrides, job="rl")
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    cpus = workers["replicas"] * int(container["resources"]["limits"]["cpu"])
    placements = placement_groups(config)
    assert sum(p.count * p.gpus for p in placements) == gpus == 72
    assert sum(p.count * p.cpus for p in placements) <= cpus
    assert job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    volumes = {v["name"]: v for v in workers["template"]["spec"]["volumes"]}
    assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
    store = int(workers["rayStartParams"]["object-store-memory"])
    shared = volumes["shm"]["emptyDir"]["sizeLimit"]
    assert shared.endswith("Gi")
    file = FILE_BYTES + 128_256 * 8192 * 2  # and one tensor in bf16; /dev/shm is used if two fit
    assert int(shared.removesuffix("Gi")) << 30 > 2 * file + store


def urls_of(command: str) -> list[str]:
    """Reward servers in a recipe's overrides."""
    words = [w for w in shlex.split(command) if w.startswith("rewards.0.urls=")]
    config = load_config(ROOT / "recipes" / "llama3_70b_grpo_9x8.yaml", words, job="rl")
    assert isinstance(config, RLConfig)
    (reward,) = config.rewards
    assert isinstance(reward, RemoteReward) and reward.token_env is not None
    return list(reward.urls)


def test_every_command_of_the_nine_node_recipe_sets_reward_urls_and_token() -> None:
    """The recipe's own URL, localhost, is right on no cluster; a server that other machines can
    reach asks for a token."""
    recipe = (ROOT / "recipes" / "llama3_70b_grpo_9x8.yaml").read_text(encoding="utf-8")
    kuberay = (LAUNCH / "kuberay.yaml").read_text(encoding="utf-8")
    slurm = (LAUNCH / "slurm.sh").read_text(encoding="utf-8")
    launch = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    shown = {
        "recipe": commented(recipe, "#   burnish rl "),
        "slurm": commented(slurm, "#   sbatch "),
        "docs": commented(launch, "sbatch --nodes 9 "),
        "kuberay": yaml.safe_load(kuberay)["spec"]["entrypoint"],
    }
    for place, command in shown.items():
        (url,) = urls_of(command)
        assert "localhost" not in url, place
    for text in (recipe, kuberay):
        words = re.search(r"burnish serve-reward [^#`\n]*", text)
        assert words is not None and "--token-env REWARD_TOKEN" in words[0]


def commented(text: str, begin: str) -> str:
    """The command that begins so, with the lines that it goes on in."""
    lines = iter(text[text.index(begin) :].splitlines())
    command = next(lines)
    while command.endswith("\\"):
        command = command.removesuffix("\\") + next(lines)
    return command.replace("#", " ")


def test_the_slurm_script_asks_for_the_nodes_of_the_recipe_it_shows() -> None:
    text = (LAUNCH / "slurm.sh").read_text(encoding="utf-8")
    nodes = re.search(r"#SBATCH --nodes=(\d+)", text)
    gpus = re.search(r"#SBATCH --gpus-per-node=(\d+)", text)
    assert nodes and gpus
    assert int(nodes[1]) * int(gpus[1]) == 72
