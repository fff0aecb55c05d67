"""The rollout engine that runs vLLM in the worker's process, and the parts of vLLM that servers
share with it."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``PatchedWorker``, the name that users give to ``vllm serve --worker-extension-cls``.
    vLLM looks it up in every worker's process before it makes the model there, so the patches of
    vLLM are applied here."""
    if name != "PatchedWorker":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from burnish.rollout.vllm.engine import patched_extension

    return patched_extension()
