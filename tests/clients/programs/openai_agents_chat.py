"""openai-agents with an MCP server over stdio and the chat completions API."""

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def main() -> None:
    server = {
        "command": sys.executable,
        "args": [os.path.join(os.path.dirname(__file__), "mcp_numbers.py")],
    }
    async with MCPServerStdio(params=server) as numbers, AsyncOpenAI() as client:
        model = OpenAIChatCompletionsModel(os.environ["BURNISH_MODEL"], client)
        agent = Agent("Adder", "Use the tools.", model=model, mcp_servers=[numbers])
        result = await Runner.run(agent, "What is 2 + 3?")
        again = [*result.to_input_list(), {"role": "user", "content": "And plus 10?"}]
        result = await Runner.run(agent, again)
    with open(os.environ["BURNISH_REWARD"], "w") as file:
        file.write("1" if result.final_output == "15" else "0")


asyncio.run(main())
