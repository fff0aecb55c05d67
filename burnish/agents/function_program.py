"""The program that runs an agent function as one process per episode, for a sandbox.

``function_program.py FOLDER`` calls the function that ``FOLDER/function.json`` names, with the task
and the endpoint of the environment variables of an agent program, and writes its result as the
reward. ``function_program.py FOLDER check`` only loads it. Exit code 1: it raised.

Copied into the sandbox, next to ``relay.py`` and ``worker.py`` of the environments: standard
library only, Python 3.9 or newer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from typing import Any


def load_module(path: str) -> Any:
    """Return the module of a file: a worker process, which loads and calls user code, or the
    relay."""
    name = f"burnish_{os.path.basename(path)[:-3]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


async def run(worker_module: Any, settings: dict[str, Any]) -> None:
    """Load the function and, unless this is a check, call it and write its result. All processes
    that the function has left behind are killed before."""
    handler = worker_module.CallHandler(asyncio.get_running_loop())
    handler.load_agent(settings["spec"], settings["options"])
    if "check" in sys.argv[2:]:
        return
    with open(os.environ["BURNISH_TASK"], encoding="utf-8") as file:
        task = json.load(file)
    endpoint = worker_module.Endpoint(
        root_url=os.environ["ANTHROPIC_BASE_URL"],
        api_key=os.environ["BURNISH_API_KEY"],
        model=os.environ["BURNISH_MODEL"],
        max_tokens=int(os.environ["BURNISH_MAX_TOKENS"]),
    )
    result = await handler.run("episode", task, endpoint)
    text = json.dumps(result, default=worker_module.plain)
    relay = load_module(os.path.join(sys.argv[1], "relay.py"))
    relay.end_others(os.getppid())
    if result is not None:
        with open(os.environ["BURNISH_REWARD"], "w", encoding="utf-8") as file:
            file.write(text)


def main() -> None:
    """Run the function of the folder that the first argument names."""
    folder = sys.argv[1]
    worker_module = load_module(os.path.join(folder, "worker.py"))
    with open(os.path.join(folder, "function.json"), encoding="utf-8") as file:
        settings = json.load(file)
    try:
        asyncio.run(run(worker_module, settings))
    except BaseException as error:  # becomes the message of the episode's failure
        failure = worker_module.describe(error)
        print(f"{failure['traceback']}{failure['type']}: {failure['message']}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without waiting for threads of user code


if __name__ == "__main__":
    main()
