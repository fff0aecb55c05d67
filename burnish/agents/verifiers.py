"""Run an environment of the package ``verifiers`` (0.4 or newer) as it is.

Loaded by path in a worker process: this file only uses the standard library and ``verifiers``. The
environment's own client, tool servers and scoring run; only the endpoint of the model is the
policy's. Roles whose config has no harness get ``null``, the chat loop with the task's tools,
unless the taskset has a harness of its own; harnesses that execute no code run in processes of this
machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import verifiers.v1 as vf

MAX_EPISODES = 256
"""Episodes of one serving environment. Then another one starts, because ``verifiers`` keeps an HTTP
client per endpoint until the environment stops."""

numbers = itertools.count()


async def agent(task: dict[str, Any], endpoint: Any, *, env: str, **options: Any) -> dict[str, Any]:
    """Play one episode of the environment ``env``. Return its weighted rewards by name.

    ``options``: config of the environment, as in the ``[env]`` block of ``verifiers``.
    """
    loaded = environments(env, json.dumps(options, sort_keys=True))
    with_key = f"BURNISH_API_KEY_{next(numbers)}"  # processes inherit no variable named API_KEY
    os.environ[with_key] = endpoint.api_key
    client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=with_key)
    context = vf.ModelContext(client=client, model=endpoint.model, sampling=vf.SamplingConfig())
    try:
        async with loaded.serving() as environment:
            (slot,) = environment.slots(loaded.task(task))
            episode = await environment.run_slot(slot, context)
    finally:
        del os.environ[with_key]
    return rewards(episode, client)


def rewards(episode: Any, policy: Any) -> dict[str, float]:
    """Return the weighted rewards of an episode by name; their sum is its reward. Rewards of a role
    that played several times are averaged.

    Raises RuntimeError if the episode failed, or if a role that is not trainable used the policy.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says no reason"
        raise RuntimeError(f"the episode of {episode.env.id} failed: {reason}")
    values_by_name: dict[str, list[float]] = {}
    roles = episode.by_agent
    for role, traces in roles.items():
        for trace in traces:
            if not trace.agent.trainable:
                check_other_model(trace, policy)
                continue
            for name, reward in trace.rewards.items():
                key = name if len(roles) == 1 else f"{role}_{name}"
                values_by_name.setdefault(key, []).append(0.0 if reward is None else reward.value)
    if not values_by_name:
        return {"reward": 0.0}
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def check_other_model(trace: Any, policy: Any) -> None:
    """Raise RuntimeError if a role that is not trainable was played by the policy: its tokens would
    be trained."""
    client = trace.agent.config.client
    if client is None or client.base_url == policy.base_url:
        raise RuntimeError(
            f"the role {trace.agent.name!r} is not trainable, but the policy plays it; set its "
            f"model in episodes.options.{trace.agent.name}.client and .model"
        )


class Environments:
    """Tasks of an environment, and the serving environments that play them."""

    def __init__(self, env: str, options: dict[str, Any]) -> None:
        self._options = with_defaults(env, options)
        environment = self._load()
        taskset = self._taskset = environment.taskset
        self._config = environment.config.taskset.task
        self._tasks: list[Any] | None = list(taskset) if taskset.bounded else None
        if self._tasks == []:
            raise ValueError(f"the environment {env} has no tasks")
        self._serving: asyncio.Future[_Serving] | None = None

    def _load(self) -> Any:
        return vf.load_environment(vf.resolve_env_config(json.loads(json.dumps(self._options))))

    def task(self, row: dict[str, Any]) -> Any:
        """Return the task of a data row: made of its columns if it has a prompt, else the one that
        its seed selects."""
        if row.get("prompt") is None:
            if self._tasks is not None:
                return self._tasks[row["seed"] % len(self._tasks)]
            return next(itertools.islice(self._taskset, row["seed"], None))
        kind = self._taskset.task_type()
        data = kind.data_type()
        fields = {name: value for name, value in row.items() if name in data.model_fields}
        if "answer" in data.model_fields and row.get("label") is not None:
            fields.setdefault("answer", row["label"])
        return kind(data.model_validate(fields), self._config)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        """Yield an environment with running servers, shared with the other episodes."""
        if self._serving is None:
            self._serving = asyncio.ensure_future(_Serving.start(self._load()))
        serving = await asyncio.shield(self._serving)
        serving.begun += 1
        serving.running += 1
        if serving.begun == MAX_EPISODES:
            self._serving = None
        try:
            yield serving.environment
        finally:
            serving.running -= 1
            if serving.begun >= MAX_EPISODES and not serving.running:
                serving.ended.set()


class _Serving:
    """An environment with running servers, started and stopped in one task."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.begun = self.running = 0
        self.ended = asyncio.Event()
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._serve())

    @classmethod
    async def start(cls, environment: Any) -> _Serving:
        serving = cls(environment)
        await serving._started
        return serving

    async def _serve(self) -> None:
        try:
            async with self.environment.serving():
                self._started.set_result(None)
                await self.ended.wait()
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)


def with_defaults(env: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the config of an environment: ``options``, with a harness and a runtime for roles that
    set none."""
    config = {**options, "taskset": {**options.get("taskset", {}), "id": env}}
    kind = vf.env_config_type(env, config.get("id", ""))
    for name, field in kind.model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        role = config[name] = dict(config.get(name) or {})
        pinned = "harness" in role or field.default.harness is not None
        if not pinned and vf.default_harness_id(env) == "bash":  # the taskset has none of its own
            role["harness"] = {"id": "null"}
        set_here = "runtime" in field.default.model_fields_set
        if "runtime" not in role and not set_here and not executes_code(env, role, field.default):
            role["runtime"] = {"type": "subprocess"}
    return config


def executes_code(env: str, role: dict[str, Any], default: Any) -> bool:
    """Return whether the harness of a role runs commands of the model."""
    config = role.get("harness") or default.harness or {"id": vf.default_harness_id(env)}
    name = config["id"] if isinstance(config, dict) else config.id
    harness = vf.load_harness(vf.harness_config_type(name).model_validate({"id": name}))
    return bool(harness.EXECUTES_CODE)


@lru_cache
def environments(env: str, options: str) -> Environments:
    """Return the environment of this worker, loaded once."""
    return Environments(env, json.loads(options))
