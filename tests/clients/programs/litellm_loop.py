"""A tool loop with litellm, over OpenAI's API and then over Anthropic's."""

import json
import os

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def solve(model: str, api_base: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        reply = litellm.completion(
            model=model,
            api_base=api_base,
            api_key=os.environ["BURNISH_API_KEY"],
            messages=messages,
            tools=[TOOL],
            max_tokens=500,
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            content = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


name = os.environ["BURNISH_MODEL"]
answers = [
    solve(f"openai/{name}", os.environ["OPENAI_BASE_URL"], "What is 2 + 3?"),
    solve(f"anthropic/{name}", os.environ["ANTHROPIC_BASE_URL"], "What is 12 + 3?"),
]
with open(os.environ["BURNISH_REWARD"], "w") as file:
    file.write(str(int(answers == ["5", "15"])))
