"""smolagents: ToolCallingAgent."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIModel(os.environ["BURNISH_MODEL"], api_base=base_url, api_key=key)
result = ToolCallingAgent(tools=[add], model=model, max_steps=4).run("What is 2 + 3, plus 10?")
with open(os.environ["BURNISH_REWARD"], "w") as file:
    file.write("1" if str(result) == "15" else "0")
