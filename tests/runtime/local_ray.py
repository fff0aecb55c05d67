"""A Ray as a local run starts it, seen from inside. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil


def listening() -> list[str]:
    """Addresses on which this process and all that it started wait for connections."""
    me = psutil.Process()
    everyone = [me, *me.children(recursive=True)]
    return sorted(
        {
            c.laddr.ip.removeprefix("::ffff:")
            for process in everyone
            for c in process.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
    )


def main() -> None:
    import ray

    from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
    from burnish.distributed.process_group import CollectiveTimeouts
    from burnish.runtime.ray.connect import start_ray
    from burnish.runtime.worker import TrainWorker, WorkerInfo

    restore = start_ray(ray, num_cpus=2, environment={"OMP_NUM_THREADS": "1"})

    @ray.remote
    def environment() -> dict[str, str]:
        return dict(os.environ)

    model = ModelConfig(scratch=ScratchConfig(hidden_size=16))
    workers = [
        ray.remote(TrainWorker)
        .options(num_cpus=0)
        .remote(WorkerInfo("policy", rank, 2, "cpu", 1), model, PrecisionConfig())
        for rank in range(2)
    ]
    host, port = ray.get(workers[0].open_rendezvous.remote(60.0))
    limits = CollectiveTimeouts(call_s=60.0, pass_s=60.0)
    ray.get([w.join.remote(host, port, timeout_s=60.0, limits=limits) for w in workers])
    inside = ray.get(environment.remote())
    secrets = [inside["HF_TOKEN"], inside["RAY_AUTH_TOKEN"]]
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    command = ["grep", "-rlFI", *(f"-e{secret}" for secret in secrets), str(session)]
    found = {
        "mode": inside["RAY_AUTH_MODE"],
        "token": inside["RAY_AUTH_TOKEN"],
        "inherited": inside["HF_TOKEN"],
        "listening": listening(),
        "written": subprocess.run(command, capture_output=True, text=True).stdout.split(),
    }
    ray.shutdown()
    restore()
    left = {k: v for k, v in os.environ.items() if k.startswith(("RAY_AUTH", "RAY_ENABLE"))}
    print(json.dumps({**found, "after": left}))


if __name__ == "__main__":
    sys.exit(main())
