"""An agent program that sends parameters and calls the policy in parallel: votes, sub-agents and
two branches of one conversation. Standard library only."""

import asyncio
import json
import urllib.request

PARAMETERS = {"temperature": 0.3, "seed": 7, "top_p": 0.5, "reasoning_effort": "low"}


async def ask(endpoint, *messages, **more):
    """Return the text of a reply."""
    body = {"model": endpoint.model, "messages": list(messages), **PARAMETERS, **more}
    request = urllib.request.Request(
        endpoint.base_url + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )

    def send():
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["choices"][0]["message"]["content"] or ""

    return await asyncio.to_thread(send)


async def in_order(calls):
    """Return the replies to calls that run at once, and that were sent one after the other."""
    tasks = []
    for call in calls:
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0.02)
    return await asyncio.gather(*tasks)


def user(text):
    return {"role": "user", "content": text}


async def agent(task, endpoint):
    """Vote, delegate, and go on with two branches. The reward is the share of digits 1 to 4."""
    question = user(str(task["seed"] % 7))
    votes = await in_order(ask(endpoint, question) for _ in range(3))
    parts = await in_order(ask(endpoint, user(f"{i}?"), max_tokens=1 + i % 2) for i in range(2))
    said = {"role": "assistant", "content": votes[-1]}
    branches = await in_order(ask(endpoint, question, said, user(text)) for text in ("<", ">"))
    text = "".join([*votes, *parts, *branches])
    return {"low": sum(c in "1234" for c in text) / (1 + len(text))}
