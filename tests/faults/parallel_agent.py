"""An agent program that sends parameters and calls the policy in parallel: votes, sub-agents and
two branches of one conversation. Standard library only.

It sends each call completely before the next one, and reads the replies afterwards.
"""

import http.client
import json
from urllib.parse import urlsplit

PARAMETERS = {"temperature": 0.3, "seed": 7, "top_p": 0.5, "reasoning_effort": "low"}


def ask(endpoint, *calls):
    """Return the texts of the replies to calls, (messages, more parameters), sent at once."""
    url = urlsplit(endpoint.base_url)
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    connections = []
    for messages, more in calls:
        connection = http.client.HTTPConnection(url.hostname, url.port)
        body = {"model": endpoint.model, "messages": messages, **PARAMETERS, **more}
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        connections.append(connection)
    texts = []
    for connection in connections:
        reply = json.load(connection.getresponse())
        texts.append(reply["choices"][0]["message"]["content"] or "")
        connection.close()
    return texts


def user(text):
    return {"role": "user", "content": text}


def agent(task, endpoint):
    """Vote, delegate, and go on with two branches. The reward is the share of digits 1 to 4."""
    question = user(str(task["seed"] % 7))
    votes = ask(endpoint, *[([question], {})] * 3)
    parts = ask(endpoint, *(([user(f"{i}?")], {"max_tokens": 1 + i % 2}) for i in range(2)))
    said = {"role": "assistant", "content": votes[-1]}
    branches = ask(endpoint, *(([question, said, user(text)], {}) for text in ("<", ">")))
    text = "".join([*votes, *parts, *branches])
    return {"low": sum(c in "1234" for c in text) / (1 + len(text))}
