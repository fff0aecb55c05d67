"""openai-agents as it is by default: the Responses API, function tools, a hand-off by tool."""

import asyncio
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    agent = Agent("Adder", "Use the tools.", model=os.environ["BURNISH_MODEL"], tools=[add])
    result = await Runner.run(agent, "What is 2 + 3?")
    again = [*result.to_input_list(), {"role": "user", "content": "And plus 10?"}]
    result = Runner.run_streamed(agent, again)
    async for _ in result.stream_events():
        pass
    with open(os.environ["BURNISH_REWARD"], "w") as file:
        file.write("1" if result.final_output == "15" else "0")


asyncio.run(main())
