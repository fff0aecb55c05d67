"""Interpret Ray's errors: lost workers, workers that were never created, and errors that a worker
raised. Ray is passed as an argument."""

from __future__ import annotations

from typing import Any

from burnish.messages import library_text
from burnish.runtime.base import ClusterError, WorkerLostError


def failure(ray: Any, ref: Any) -> BaseException | None:
    """Return the error of a finished call, as the worker raised it."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        return error.cause if isinstance(error.cause, BaseException) else error  # type: ignore[no-any-return]
    except ray.exceptions.RayError as error:
        return error  # type: ignore[no-any-return]
    return None


def is_worker_loss(ray: Any, error: BaseException) -> bool:
    """Return whether an error is about a lost process or machine, rather than raised by a
    worker."""
    return isinstance(error, ray.exceptions.RayError) and not isinstance(
        error, ray.exceptions.RayTaskError
    )


def constructor_error(ray: Any, error: BaseException, name: str) -> ClusterError | None:
    """Return the error of a worker that cannot be created for a reason that would also stop its
    replacement, or None for any other error. Examples: its class cannot be loaded or instantiated
    on the node, or its environment cannot be set up."""
    kinds = ray.exceptions
    broken = isinstance(error, kinds.RayActorError) and error.actor_init_failed
    if not broken and not isinstance(error, kinds.RuntimeEnvSetupError):
        return None
    lines = str(error).strip().splitlines()
    return ClusterError(
        f"{name} could not be created, and a replacement would fail too: {lines[-1].strip()}\n"
        "Check that the same version of burnish, with its dependencies, is installed on every "
        "node. Message from Ray:\n" + "\n".join(lines)
    )


def loss_reason(ray: Any, error: BaseException) -> str:
    """Return how a worker was lost. Raises the error itself if a worker raised it. Raises
    WorkerLostError if its input is lost, because a replacement would need the same input."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        error = cause if isinstance(cause, BaseException) else error
    if isinstance(error, ray.exceptions.ObjectLostError):
        raise WorkerLostError(f"weights in the object store are lost ({library_text(error)})")
    if not is_worker_loss(ray, error):
        raise error
    return died(error)


def died(error: BaseException) -> str:
    """Return a worker's cause of death, for messages."""
    return f"died: {library_text(error)}"
