"""Starting a Ray of our own, or joining one that runs: with words where that fails, and never
without end.

``ray.init`` on an address where nothing (or something else) answers tries again for minutes and
then ends the process, so the address is tried first: a plain connection, then ``ray.init`` in a
process of its own, which can be ended. Ray itself is handed in.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import Any

from burnish.messages import library_text
from burnish.runtime.base import ClusterError

PROBE_S = 60.0
"""Longest wait for a cluster's answer."""
_TRY = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except BaseException as error:
    sys.exit("BURNISH " + str(error))
"""
_HOST_PORT = re.compile(r"(\[[^\]]+\]|[^:/\s]+):(\d{1,5})")


def join_ray(ray: Any, address: str, *, timeout_s: float, environment: dict[str, str]) -> None:
    """Connect this process to the cluster at ``address``. Raises ClusterError."""
    _check_address(address)
    try:
        _check_ray_answers(address, version=ray.__version__, timeout_s=min(timeout_s, PROBE_S))
        ray.init(
            address=address,
            runtime_env={"env_vars": environment},
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if isinstance(error, ClusterError):
            raise
        raise _cannot_join(address, str(error).strip(), version=ray.__version__) from error


def start_ray(ray: Any, *, num_cpus: int, environment: dict[str, str]) -> None:
    """Start a Ray on this machine, which ends with this process. Raises ClusterError."""
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": environment},
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"cluster.runtime=ray: Ray {ray.__version__} did not start on this machine "
            f"({str(error).strip()}). What to look at: space in /tmp and /dev/shm, leftover 'ray' "
            "processes, and the log files under /tmp/ray/session_latest/logs"
        ) from error


def _check_address(address: str) -> None:
    """That something takes connections there."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        raise ClusterError(
            f"cluster.ray_address={address!r} is the address of a Ray Client server, and the "
            "controller has to be on a node of the cluster; log in to one and use "
            "cluster.ray_address=auto"
        )
    match = _HOST_PORT.fullmatch(address)
    if match is None:
        raise ClusterError(
            f"cluster.ray_address={address!r} is neither 'auto' nor host:port of a cluster's head "
            "(6379 unless 'ray start --head --port' said otherwise)"
        )
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"cluster.ray_address={address!r}: nothing answers there ({error}); is the cluster "
            "up, and does a firewall stand between? 'ray start --head' starts one and says its "
            "address; without ray_address a Ray of its own is started on this machine"
        ) from error


def _check_ray_answers(address: str, *, version: str, timeout_s: float) -> None:
    """That what answers there is a Ray of this version."""
    command = [sys.executable, "-c", _TRY, address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        why = f"no Ray answered within {timeout_s:g} s; something else may have this port"
        raise _cannot_join(address, why, version=version) from None
    if done.returncode:
        _, _, said = done.stderr.rpartition("BURNISH ")
        why = said.strip() or f"ray.init ended with {done.returncode}"
        raise _cannot_join(address, why, version=version)


def _cannot_join(address: str, why: str, *, version: str) -> ClusterError:
    said = library_text(why) or "no reason given"
    if "ersion mismatch" in why:
        said = " ".join(why.split())
        what = (
            "controller and cluster need the same versions of Ray and Python: install the "
            "cluster's here, or restart the cluster with these"
        )
    else:
        what = (
            "start one with 'ray start --head', log in to one of its nodes, or leave ray_address "
            "out to start a Ray of its own on this machine"
        )
        if "RAY_AUTH_MODE" not in os.environ:
            what += (
                ". Where the cluster asks for a token, have it in ~/.ray/auth_token and set "
                "RAY_AUTH_MODE=token: Ray sends it to an address only if told to"
            )
    return ClusterError(
        f"cluster.ray_address={address!r}: no Ray cluster of this version ({version}) can be "
        f"joined there ({said}); {what}"
    )
