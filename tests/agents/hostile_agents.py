"""Agents that fail in every way, for tests of agent programs. Standard library only: as functions
they run in a worker, and as a program (``python hostile_agents.py NAME``) once per episode."""

import asyncio
import contextlib
import glob
import json
import os
import signal
import socket
import stat
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


def dies_with_a_process_in_another_session(task, endpoint):
    ask(endpoint, [{"role": "user", "content": "hi"}])
    with open(os.environ["HOSTILE_PIDS"], "a") as file:
        file.write(f"{subprocess.Popen(['sleep', '600'], start_new_session=True).pid}\n")
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


def ends_by_a_signal_without_a_name(task, endpoint):
    good(task, endpoint)
    os.kill(os.getpid(), 40)


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


# ---- in a sandbox: each returns what it could do, as a reward of 1 by name ----------------------


def worked(attempt, *arguments):
    """Return whether an attempt to leave the sandbox succeeds."""
    try:
        attempt(*arguments)
    except OSError:
        return False
    return True


def writes_outside(task, endpoint):
    good(task, endpoint)
    places = [*task["places"], "/proc/1/cwd", "/proc/1/root/etc", "/proc/2/cwd"]
    for place in places:
        with contextlib.suppress(OSError), open(os.path.join(place, "hostile"), "w") as file:
            file.write("x")
    return {}


def connects_elsewhere(task, endpoint):
    good(task, endpoint)

    def connect(family, address):
        with socket.socket(family) as client:
            client.settimeout(1)
            client.connect(address)

    addresses = [("127.0.0.1", port) for port in task["ports"]]
    addresses += [("127.0.0.1", 22), (task["address"], task["ports"][0]), ("192.0.2.1", 80)]
    found = {str(a): 1 for a in addresses if worked(connect, socket.AF_INET, a)}
    paths = ["\0" + task["abstract"], task["outside"] + "/socket"]
    return found | {str(p): 1 for p in paths if worked(connect, socket.AF_UNIX, p)}


def reads_secrets(task, endpoint):
    good(task, endpoint)
    files = [f"/proc/{p}/{f}" for p in os.listdir("/proc") for f in ("environ", "cmdline")]
    files += [task["outside"] + "/secret", os.path.join(os.getcwd(), "pyproject.toml")]
    found = {}
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            text = file.read()
            if b"hostile-secret" in text or b"[project]" in text:
                found[path] = 1
    return found


def looks_for_other_episodes(task, endpoint):
    """Its key does not open other episodes, and it sees neither their processes nor their files."""
    good(task, endpoint)
    found = {}
    root = endpoint.base_url.rpartition("/s/")[0]
    for base, key in ((f"{root}/s/other/v1", endpoint.api_key), (endpoint.base_url, "other-key")):
        request = urllib.request.Request(
            base + "/models", headers={"Authorization": "Bearer " + key}
        )
        if worked(urllib.request.urlopen, request):
            found[base] = 1
    shown = [os.readlink(p) for p in glob.glob("/proc/[0-9]*/exe") if os.access(p, os.R_OK)]
    found |= {"processes": 1} if len([p for p in shown if "python" in p]) > 2 else {}
    sockets = [p for p in glob.glob("/run/*") + glob.glob("/tmp/*") if stat.S_ISSOCK(os.stat(p)[0])]
    return found | ({} if sockets == ["/run/burnish"] else {"sockets": 1})


def fills_the_disk(task, endpoint):
    good(task, endpoint)
    try:
        for number in range(1000):
            with open(f"/tmp/{number}", "wb") as file:
                file.write(bytes(1 << 20))
    except OSError:
        for name in range(number + 1):
            os.unlink(f"/tmp/{name}")
        return {} if number < 100 else {"disk": 1}
    return {"disk": 1}


def forks_without_end(task, endpoint):
    good(task, endpoint)
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.1)


def allocates_without_end(task, endpoint):
    good(task, endpoint)
    kept = []
    while True:
        kept.append(bytearray(16 << 20))


def prints_forever(task, endpoint):
    good(task, endpoint)
    while True:
        print("x" * 10000)


def kills_the_relay(task, endpoint):
    good(task, endpoint)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def forges_a_result(task, endpoint):
    good(task, endpoint)
    try:
        with open(f"/proc/{os.getppid()}/fd/1", "w") as file:
            file.write('{"code": -77, "reward": [[')
    except PermissionError:  # (the pipe belongs to root)
        kills_the_relay(task, endpoint)


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
