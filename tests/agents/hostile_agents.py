"""Agents that fail in every way, for tests of agent programs. Standard library only: as functions
they run in a worker, and as a program (``python hostile_agents.py NAME``) once per episode."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request


class _Address:
    """The endpoint of a program, from its environment."""

    base_url = os.environ.get("OPENAI_BASE_URL", "")
    api_key = os.environ.get("OPENAI_API_KEY", "")


def ask(endpoint, messages):
    """Call the policy without any client."""
    request = urllib.request.Request(
        endpoint.base_url + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {"Authorization": "Bearer " + endpoint.api_key, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["choices"][0]["message"]


def good(task, endpoint):
    messages = [{"role": "user", "content": "hi"}]
    for turn in range(2):
        messages += [ask(endpoint, messages), {"role": "user", "content": str(turn)}]
    return 1.0


async def good_async(task, endpoint):
    return await asyncio.to_thread(good, task, endpoint)


def never_calls(task, endpoint):
    return 1.0


def raises(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "hi"}])
    raise ValueError("agent bug")


def leaves(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "hi"}])
    sys.exit(3)


def returns_garbage(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "hi"}])
    return {"reward": "high"}


def hangs(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "hi"}])
    time.sleep(600)


def ignores_signals(task, endpoint):
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hangs(task, endpoint)


def kills_itself(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "hi"}])
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_process_behind(task, endpoint):
    good(task, endpoint)
    with open(os.environ["HOSTILE_PIDS"], "a") as file:
        file.write(f"{subprocess.Popen(['sleep', '600']).pid}\n")
    return 1.0


def prints_without_end(task, endpoint):
    good(task, endpoint)
    for _ in range(20000):
        print("x" * 1000)
    return 1.0


def writes_a_strange_reward(task, endpoint):
    good(task, endpoint)
    os.mkfifo(os.environ["BURNISH_REWARD"])


def chats_on_after_the_end(task, endpoint):
    messages = [{"role": "user", "content": "hi"}]

    def later():
        time.sleep(0.3)
        ask(endpoint, messages)

    ask(endpoint, messages)
    threading.Thread(target=later, daemon=True).start()
    return 1.0


def calls_on_and_on(task, endpoint):
    while True:
        ask(endpoint, [{"role": "user", "content": "again"}])


def any_of_them(task, endpoint):
    """The agent that the task names."""
    return globals()[task["agent"]](task, endpoint)


if __name__ == "__main__":
    with open(os.environ["BURNISH_TASK"]) as file:
        given = json.load(file)
    result = globals()[given["agent"]](given, _Address())
    if result is not None:
        with open(os.environ["BURNISH_REWARD"], "w") as file:
            json.dump(result, file)
