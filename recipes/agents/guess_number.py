"""An agent program that plays a number game with the policy, through OpenAI's client.

It knows nothing of Burnish: the client finds its address and key in environment variables. Run it
against any server of this API:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python guess_number.py
"""

import asyncio
import json
import os
import random
import re
import sys
from functools import cache

from openai import AsyncOpenAI

TURNS = 3


async def play(client: AsyncOpenAI, model: str, seed: int, highest: int = 7) -> float:
    """Let the model guess a number from 1 to ``highest``. Return 1 if it finds it."""
    secret = random.Random(seed).randint(1, highest)
    messages = [{"role": "user", "content": "?"}]
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model=model, messages=messages)
        if reply.choices[0].finish_reason == "length":
            return 0.0
        text = reply.choices[0].message.content or ""
        found = re.search(r"\d+", text)
        guess = int(found[0]) if found else None
        if guess == secret:
            return 1.0
        answer = "?" if guess is None else ">" if secret > guess else "<"
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": answer},
        ]
    return 0.0


@cache
def connections() -> AsyncOpenAI:
    """Return a client whose connections all episodes share. Creating one takes 25 ms."""
    return AsyncOpenAI(base_url="http://localhost", api_key="set for each episode")


async def agent(task: dict, endpoint) -> dict:
    """Play one episode. Burnish calls this function (``episodes.agent``)."""
    client = connections().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    return {"found": await play(client, endpoint.model, task["seed"])}


async def main() -> None:
    """Play one episode as a program of its own (``episodes.command``)."""
    task, model = {"seed": 0}, os.environ.get("BURNISH_MODEL", "policy")
    if "BURNISH_TASK" in os.environ:
        with open(os.environ["BURNISH_TASK"]) as file:
            task = json.load(file)
    async with AsyncOpenAI() as client:
        found = await play(client, model, task["seed"])
    if "BURNISH_REWARD" in os.environ:
        with open(os.environ["BURNISH_REWARD"], "w") as file:
            json.dump({"found": found}, file)
    print("found" if found else "not found", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
