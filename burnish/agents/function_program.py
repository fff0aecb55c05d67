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
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


async def run(worker: Any, given: dict[str, Any]) -> None:
    """Load the function and, unless this is a check, call it and write its result. All processes
    that the function has left behind are killed before."""
    made = worker.Worker(asyncio.get_running_loop())
    made.load_agent(given["spec"], given["options"])
    if "check" in sys.argv[2:]:
        return
    with open(os.environ["BURNISH_TASK"], encoding="utf-8") as file:
        task = json.load(file)
    endpoint = worker.Endpoint(
        root_url=os.environ["ANTHROPIC_BASE_URL"],
        api_key=os.environ["BURNISH_API_KEY"],
        model=os.environ["BURNISH_MODEL"],
    )
    result = await made.run("episode", task, endpoint)
    text = json.dumps(result, default=worker.plain)
    relay = load_module(os.path.join(sys.argv[1], "relay.py"))
    relay.end_others(os.getppid())
    if result is not None:
        with open(os.environ["BURNISH_REWARD"], "w", encoding="utf-8") as file:
            file.write(text)


def main() -> None:
    """Run the function of the folder that the first argument names."""
    folder = sys.argv[1]
    worker = load_module(os.path.join(folder, "worker.py"))
    with open(os.path.join(folder, "function.json"), encoding="utf-8") as file:
        given = json.load(file)
    try:
        asyncio.run(run(worker, given))
    except BaseException as error:  # becomes the message of the episode's failure
        said = worker.describe(error)
        print(f"{said['traceback']}{said['type']}: {said['message']}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without waiting for threads of user code


if __name__ == "__main__":
    main()
