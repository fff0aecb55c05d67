"""Starting a Ray of our own, or joining one that runs: with words where that fails, and never
without end.

``ray.init`` on an address where nothing (or something else) answers tries again for minutes and
then ends the process, so the address is tried first: a plain connection, then ``ray.init`` in a
process of its own, which can be ended. Ray itself is handed in.

A Ray of our own listens on the loopback interface only and requires a token that only this process
and its workers have: whoever could talk to it could run code as this user.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from burnish.messages import library_text
from burnish.runtime.base import ClusterError

MIN_RAY = (2, 52)
"""The first Ray version that requires a token."""
_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Address at which ranks on one machine meet"""
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


def start_ray(ray: Any, *, num_cpus: int, environment: dict[str, str]) -> Callable[[], None]:
    """Start a Ray on this machine, which ends with this process. Its processes inherit this
    process's environment. Raises ClusterError.

    Returns the function to call after Ray's shutdown: it puts the environment back.
    """
    _check_version(ray)
    restore = _set_private(ray)
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": _LOOPBACK | environment},
        )
        _check_private(ray)
    except BaseException as error:
        restore()
        if not isinstance(error, (OSError, RuntimeError, ValueError, ray.exceptions.RayError)):
            raise
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(
            f"cluster.runtime=ray: Ray {ray.__version__} did not start on this machine "
            f"({str(error).strip()}). What to look at: space in /tmp and /dev/shm, leftover 'ray' "
            "processes, and the log files under /tmp/ray/session_latest/logs"
        ) from error

    return restore


def _check_version(ray: Any) -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2])
    if version < MIN_RAY:
        raise ClusterError(
            f"cluster.runtime=ray: Ray {ray.__version__} cannot ask for a token, so everybody on "
            "this machine could run code as you; install "
            f"ray>={MIN_RAY[0]}.{MIN_RAY[1]}"
        )


def _set_private(ray: Any) -> Callable[[], None]:
    """Have the next Ray use a new token and the loopback; returns what undoes it."""
    constants = ray._private.ray_constants
    wanted = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # before the one in ~/.ray, which others may read
        _ENABLE_CLUSTER: "0",  # Ray's own name for: addresses of other machines may be used
    }
    before = {name: os.environ.get(name) for name in wanted}
    enabled = constants.ENABLE_RAY_CLUSTER  # the variable, as it was when Ray was imported

    def restore() -> None:
        constants.ENABLE_RAY_CLUSTER = enabled
        _set_environment(ray, before)

    constants.ENABLE_RAY_CLUSTER = False
    _set_environment(ray, wanted)
    return restore


def _set_environment(ray: Any, values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    with suppress(AttributeError):  # Ray keeps what it read before; another version may not
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_private(ray: Any) -> None:
    """Raise ClusterError, with Ray ended, if other machines can reach it."""
    address = str(ray.nodes()[0]["NodeManagerAddress"])
    if ipaddress.ip_address(address).is_loopback:
        return
    ray.shutdown()
    raise ClusterError(
        f"cluster.runtime=ray: Ray {ray.__version__} listens on {address}, which other machines "
        "can reach, although it was told to use the loopback; install the version of Ray in "
        "constraints/cpu.txt, or start a cluster yourself (docs/launch.md) and set "
        "cluster.ray_address"
    )


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
