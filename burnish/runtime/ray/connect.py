"""Start a Ray cluster, or join a running one, with clear errors and timeouts.

On an address where nothing (or something other than Ray) responds, ``ray.init`` retries for minutes
and then ends the process. The address is therefore tested first: with a plain connection, then with
``ray.init`` in a separate process that can be ended. Ray is passed as an argument.

A Ray started here listens only on the loopback interface and requires a token known only to this
process and its workers. Anyone with access to it could run code as this user."""

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
"""First Ray version that supports a token."""
_ENABLE_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Network interface for ranks on one machine."""
PROBE_S = 60.0
"""Timeout for a cluster's response, in seconds."""
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
    """Start Ray on this machine. It ends with this process, and its processes inherit this
    environment. Raises ClusterError.

    Return a function that restores the environment, to be called after Ray's shutdown."""
    version = tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2])
    if version < MIN_RAY:
        raise ClusterError(
            f"cluster.runtime=ray: Ray {ray.__version__} does not support authentication tokens, "
            "so every user of this machine could run code as you; install "
            f"ray>={MIN_RAY[0]}.{MIN_RAY[1]}"
        )
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
        address = str(ray.nodes()[0]["NodeManagerAddress"])
        if not ipaddress.ip_address(address).is_loopback:
            ray.shutdown()
            raise ClusterError(
                f"cluster.runtime=ray: Ray {ray.__version__} listens on {address}, which other "
                "machines can reach, although it was set to the loopback interface; install the "
                "version of Ray in constraints/cpu.txt, or start a cluster yourself "
                "(docs/launch.md) and set cluster.ray_address"
            )
    except BaseException as error:
        restore()
        if not isinstance(error, (OSError, RuntimeError, ValueError, ray.exceptions.RayError)):
            raise
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(
            f"cluster.runtime=ray: Ray {ray.__version__} did not start on this machine "
            f"({str(error).strip()}). Check the space in /tmp and /dev/shm, leftover 'ray' "
            "processes, and the log files in /tmp/ray/session_latest/logs"
        ) from error
    return restore


def _set_private(ray: Any) -> Callable[[], None]:
    """Make the next Ray use a new token and the loopback interface. Return a function that undoes
    this."""
    constants = ray._private.ray_constants
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # overrides ~/.ray, which others may read
        _ENABLE_CLUSTER: "0",  # Ray's variable that allows addresses of other machines
    }
    before = {name: os.environ.get(name) for name in settings}
    enabled = constants.ENABLE_RAY_CLUSTER  # the variable's value when Ray was imported

    def restore() -> None:
        constants.ENABLE_RAY_CLUSTER = enabled
        _set_environment(ray, before)

    constants.ENABLE_RAY_CLUSTER = False
    _set_environment(ray, settings)
    return restore


def _set_environment(ray: Any, values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    with suppress(AttributeError):  # Ray caches the environment; other versions may not
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_address(address: str) -> None:
    """Raise ClusterError if nothing accepts connections at ``address``, or it is not of a valid
    form."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        raise ClusterError(
            f"cluster.ray_address={address!r} is the address of a Ray Client server, but the "
            "controller must run on a node of the cluster; log in to one and use "
            "cluster.ray_address=auto"
        )
    match = _HOST_PORT.fullmatch(address)
    if match is None:
        raise ClusterError(
            f"cluster.ray_address={address!r} is neither 'auto' nor host:port of a cluster's "
            "head node (port 6379 unless set by 'ray start --head --port')"
        )
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"cluster.ray_address={address!r}: cannot connect ({error}); check that the cluster "
            "is running and that no firewall blocks the port. 'ray start --head' starts a "
            "cluster and prints its address; without ray_address, Burnish starts its own Ray on "
            "this machine"
        ) from error


def _check_ray_answers(address: str, *, version: str, timeout_s: float) -> None:
    """Raise ClusterError unless a Ray of this version responds at ``address``."""
    command = [sys.executable, "-c", _TRY, address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        why = f"no response from Ray within {timeout_s:g} s; another program may use this port"
        raise _cannot_join(address, why, version=version) from None
    if done.returncode:
        _, _, detail = done.stderr.rpartition("BURNISH ")
        why = detail.strip() or f"ray.init exited with code {done.returncode}"
        raise _cannot_join(address, why, version=version)


def _cannot_join(address: str, why: str, *, version: str) -> ClusterError:
    detail = library_text(why) or "no reason given"
    if "ersion mismatch" in why:
        detail = " ".join(why.split())
        advice = (
            "controller and cluster need the same versions of Ray and Python: install the "
            "cluster's versions here, or restart the cluster with these"
        )
    else:
        advice = (
            "start one with 'ray start --head', log in to one of its nodes, or remove "
            "ray_address to start a private Ray on this machine"
        )
        if "RAY_AUTH_MODE" not in os.environ:
            advice += (
                ". If the cluster requires a token, write it to ~/.ray/auth_token and set "
                "RAY_AUTH_MODE=token, without which Ray does not send it"
            )
    return ClusterError(
        f"cluster.ray_address={address!r}: cannot join a Ray cluster of this version ({version}) "
        f"there ({detail}); {advice}"
    )
