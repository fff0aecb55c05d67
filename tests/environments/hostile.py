"""Environments that misbehave on request, in worker processes of the tests. Imports nothing of
Burnish, so that it runs under any interpreter."""

import asyncio
import os
import random
import signal
import subprocess
import time


class Hostile:
    """Does what the seed selects: works, raises, hangs, returns garbage, or ends its process."""

    def __init__(self, rate: float = 0.0, turns: int = 3, hang_s: float = 60.0) -> None:
        self.rate, self.turns, self.hang_s = rate, turns, hang_s

    def reset(self, task: dict, seed: int) -> dict:
        self.random = random.Random(f"{seed} {task.get('salt', '')}")
        self.left = self.random.randint(1, self.turns)
        self._misbehave("reset")
        return {"messages": [{"role": "user", "content": f"{seed % 7}"}]}

    def step(self, message: dict) -> dict:
        garbage = self._misbehave("step")
        if garbage is not None:
            return garbage
        self.left -= 1
        done = self.left == 0
        return {
            "messages": [] if done else [{"role": "user", "content": str(len(message["content"]))}],
            "done": done,
            "rewards": {"turns": 1.0},
        }

    def _misbehave(self, method: str):
        if self.random.random() >= self.rate:
            return None
        kind = self.random.choice(["raise", "hang", "garbage", "kill", "exit"])
        if kind == "raise":
            raise ValueError(f"{method} failed")
        if kind == "hang":
            time.sleep(self.hang_s)
        if kind == "kill":
            os._exit(7)
        if kind == "exit":
            raise SystemExit(1)
        return {"nonsense": 1} if method == "step" else None


class Async:
    """Works with coroutine functions, and counts its closings in a file."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    async def reset(self, task, seed):
        return {"messages": [{"role": "user", "content": task["prompt"]}]}

    async def step(self, message):
        print("output of an environment must not disturb the protocol")
        return {"done": True, "rewards": {"length": len(message["content"])}}

    async def close(self):
        with open(self.path, "a") as file:
            file.write("closed\n")


class Together:
    """Finishes a step once ``size`` episodes are in theirs."""

    inside = 0
    full = None

    def __init__(self, size: int) -> None:
        self.size = size

    async def reset(self, task, seed):
        Together.full = Together.full or asyncio.Event()
        return {"messages": [{"role": "user", "content": "?"}]}

    async def step(self, message):
        Together.inside += 1
        if Together.inside >= self.size:
            self.full.set()
        await self.full.wait()
        return {"done": True}


class WithoutStep:
    """Lacks a method."""

    def reset(self, task, seed):
        return {"messages": []}


class Fixed:
    """Answers with what the task says."""

    def reset(self, task, seed):
        self.task = task
        return {"messages": task["start"], "tools": task.get("tools", [])}

    def step(self, message):
        return self.task["step"]


class Digits:
    """Shows digits, up to ``rounds`` turns. Each turn is rewarded if it repeats its digit. Tasks
    with a seed divisible by ``bad`` cannot be played."""

    def __init__(self, rounds: int = 3, bad: int = 0) -> None:
        self.rounds, self.bad = rounds, bad

    def reset(self, task, seed):
        if self.bad and seed % self.bad == 0:
            raise ValueError(f"no task {seed}")
        self.random = random.Random(seed)
        self.left = self.random.randint(1, self.rounds)
        return {"messages": [self._next()]}

    def step(self, message):
        right = self.digit in message["content"]
        self.left -= 1
        done = self.left == 0
        return {
            "messages": [] if done else [self._next()],
            "done": done,
            "rewards": {"right": right - 0.1 * len(message["content"]), "played": float(done)},
        }

    def _next(self):
        self.digit = str(self.random.randint(1, 4))
        return {"role": "user", "content": self.digit}


class Odd:
    """Does one odd thing in each step, named by the task."""

    def reset(self, task, seed):
        self.kind = task["kind"]
        return {"messages": [{"role": "user", "content": "a"}]}

    def step(self, message):
        return {"messages": [{"role": "user", "content": getattr(self, self.kind)()}]}

    def works(self):
        return "works"

    def is_slow(self):
        time.sleep(0.5)
        return "slow"

    def huge_reply(self):
        return "a" * (20 << 20)

    def huge_error(self):
        raise ValueError("a" * (20 << 20))

    def error_without_text(self):
        class WithoutTextError(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        raise WithoutTextError

    def child_reads_stdin(self):
        child = subprocess.run(["head", "-c", "5"], stdout=subprocess.PIPE, check=True)
        return f"the child read {child.stdout!r}"

    def exits(self):
        os._exit(7)

    def parent(self):
        return str(os.getppid())

    def fork_survives(self):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        os._exit(7)

    def child_holds_pipes(self):
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        return str(child.pid)


class Shared:
    """A step that waits, blocks the event loop of its worker, or stops the process."""

    def reset(self, task, seed):
        self.kind, self.path = task["kind"], task["path"]
        return {"messages": [{"role": "user", "content": "a"}]}

    async def step(self, message):
        await asyncio.ensure_future(getattr(self, self.kind)())
        return {"done": True}

    async def waits(self):
        await asyncio.sleep(60)

    async def blocks(self):
        self.mark()
        time.sleep(60)

    async def stops(self):
        self.mark()
        os.kill(os.getpid(), signal.SIGSTOP)

    def mark(self):
        with open(self.path, "w") as file:
            file.write("begun")


class Blocking:
    """Blocks the event loop of its worker with a coroutine that never yields, after it has started
    a process."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    def reset(self, task, seed):
        return {"messages": [{"role": "user", "content": "a"}]}

    async def step(self, message):
        child = subprocess.Popen(["sleep", "60"])
        with open(self.path, "w") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
        time.sleep(60)
