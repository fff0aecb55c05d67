"""Run an agent file of OpenRLHF (``--agent_func_path``) as it is.

Loaded by path in a worker process: this file only uses the standard library. If the package
``openrlhf`` is missing, the base classes that agent files import are defined here.

Two forms are supported. A class ``AgentInstance`` with ``reset`` and ``step`` gets the loop of
OpenRLHF: the text so far is the next prompt, without a chat template. A class ``AgentExecutor``
with an ``execute`` method of its own runs its own loop on token ids; its engine is the policy's
server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
import types
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit


class EpisodeEndedError(RuntimeError):
    """The policy accepts no more calls: a limit of the episode is reached."""


async def agent(task: dict[str, Any], endpoint: Any, *, path: str, **options: Any) -> float:
    """Play one episode with the agent file ``path``. Return the sum of its rewards.

    ``options``: ``tokenizer`` (folder or hub name, for an ``AgentExecutor``), ``max_length``
    (tokens of a conversation), and ``max_tokens`` (of a response; default: ``max_length``), which
    agents may read. The run's own limits apply, too.
    """
    module = load(path)
    policy = EpisodePolicy(endpoint)
    executor = own_executor(module)
    if executor is None:
        return await play(module.AgentInstance, task, policy, options)
    sampling = sampling_params(options)
    result = await executor().execute(
        task["prompt_text"],
        task["label"],
        sampling,
        max_length=options["max_length"],
        hf_tokenizer=tokenizer(options.get("tokenizer")),
        llm_engine=policy,
    )
    return number(result["reward"])


async def play(
    agent_class: Any, task: dict[str, Any], policy: EpisodePolicy, options: dict[str, Any]
) -> float:
    """Play one episode with an ``AgentInstance``."""
    instance = await created(agent_class)
    label = task["label"]
    prompt = task["prompt_text"]
    start = await instance.reset({"observation": prompt, "prompt": prompt, "label": label})
    text, total = start["observation"], 0.0
    while True:
        try:
            action = (await policy.complete(text))["text"]
        except EpisodeEndedError:
            return total
        states = {
            "observation_text": text,
            "action_text": action,
            "label": label,
            "sampling_params": sampling_params(options),
        }
        step = await instance.step(states)
        total += number(step["rewards"])
        if step["done"]:
            return total
        text += action + step["environment_feedback"]


async def created(agent_class: Any) -> Any:
    """Return an instance. ``__init__`` may be a coroutine function, as in OpenRLHF's examples."""
    instance = agent_class.__new__(agent_class)
    waiting = agent_class.__init__(instance)
    if inspect.isawaitable(waiting):
        await waiting
    return instance


def number(value: Any) -> float:
    """Return a reward as a number. Agents give tensors of one element, arrays or numbers."""
    is_array = hasattr(value, "item")  # house: ok a user's object
    return float(value.item() if is_array else value)


def sampling_params(options: dict[str, Any]) -> Any:
    """Return an object like vLLM's ``SamplingParams``. The run's own parameters apply."""
    max_tokens = options.get("max_tokens", options["max_length"])
    return types.SimpleNamespace(max_tokens=max_tokens, temperature=1.0, top_p=1.0, logprobs=1, n=1)


@lru_cache
def tokenizer(name: str | None) -> Any:
    """Return the tokenizer for an ``AgentExecutor``. Raises ValueError if no name is given."""
    if name is None:
        raise ValueError(
            "an AgentExecutor with an execute method of its own works on token ids; set "
            "episodes.options.tokenizer to the folder or hub name of the model"
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def check_options(*, path: str, **_: Any) -> None:
    """Import the agent file when the worker starts."""
    load(path)


# ---- the agent file ----------------------------------------------------------------------------


@lru_cache
def load(path: str) -> Any:
    """Import an agent file. Raises AttributeError if it has no agent."""
    define_base_classes()
    spec = importlib.util.spec_from_file_location("openrlhf_agent_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["openrlhf_agent_file"] = module
    spec.loader.exec_module(module)
    if "AgentInstance" not in vars(module) and own_executor(module) is None:
        raise AttributeError(
            f"{path} has neither a class AgentInstance (reset, step) nor a class AgentExecutor "
            "with its own execute method"
        )
    return module


def own_executor(module: Any) -> Any:
    """Return the class ``AgentExecutor`` of a file if it overrides ``execute``, else None."""
    executor = vars(module).get("AgentExecutor")
    execute = inspect.getattr_static(executor, "execute", None) if executor is not None else None
    if execute is None or execute.__module__.split(".")[0] in ("openrlhf", __name__):
        return None
    return executor


def define_base_classes() -> None:
    """Define ``openrlhf.utils.agent`` if the package is not installed."""
    try:
        importlib.import_module("openrlhf.utils.agent")
        return
    except ImportError:
        pass
    names = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
    modules = {name: types.ModuleType(name) for name in names}
    for base in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor):
        setattr(modules[names[2]], base.__name__, base)
    sys.modules.update(modules)


class AgentInstanceBase:
    """Stand-in for OpenRLHF's base class of environments."""

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the states unchanged."""
        return states


class AgentExecutorBase:
    """Stand-in for OpenRLHF's base class of executors. Its arguments differ between versions."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stand-in for OpenRLHF's loop, which :func:`play` replaces."""


# ---- the policy --------------------------------------------------------------------------------


class EpisodePolicy:
    """The policy of one episode, and the engine of an ``AgentExecutor``."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint

    async def complete(self, prompt: Any, **parameters: Any) -> dict[str, Any]:
        """Return the response to a prompt (text or token ids), as a choice of OpenAI's completions.

        Raises EpisodeEndedError if a limit of the episode is reached.
        """
        body = {"model": self._endpoint.model, "prompt": prompt, **parameters}
        status, reply = await post(self._endpoint, "/completions", body)
        if status == 410 or reply.get("error", {}).get("code") == "context_length_exceeded":
            raise EpisodeEndedError(reply["error"]["message"])
        if status != 200:
            raise RuntimeError(f"the policy refused a call ({status}): {reply}")
        choice: dict[str, Any] = reply["choices"][0]
        return choice

    async def generate(self, prompt_token_ids: Any, sampling_params: Any) -> Any:
        """Return a response in the form of OpenRLHF's engine: ``outputs[0]`` with ``token_ids``,
        ``text``, ``logprobs`` and ``finish_reason``."""
        choice = await self.complete(
            list(prompt_token_ids),
            max_tokens=sampling_params.max_tokens,
            logprobs=0,
            return_token_ids=True,
        )
        ids = choice["token_ids"]
        logprobs = [
            {token: types.SimpleNamespace(logprob=choice["logprobs"]["token_logprobs"][i])}
            for i, token in enumerate(ids)
        ]
        output = types.SimpleNamespace(
            token_ids=ids,
            text=choice["text"],
            logprobs=logprobs,
            finish_reason=choice["finish_reason"],
        )
        return types.SimpleNamespace(outputs=[output], prompt_token_ids=list(prompt_token_ids))


async def post(endpoint: Any, path: str, body: Any) -> tuple[int, Any]:
    """Send a request; return the status and the parsed reply."""
    url = urlsplit(endpoint.base_url + path)
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(
            f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
            f"Authorization: Bearer {endpoint.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
        )
        writer.write(content)
        head, _, reply = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(head.split(maxsplit=2)[1]), json.loads(reply)
