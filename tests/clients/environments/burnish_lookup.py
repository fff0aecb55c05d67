"""An environment of verifiers with several turns and tools: look up a number, then double it."""

import verifiers.v1 as vf

__all__ = ["LookupEnv", "LookupTaskset"]

NUMBERS = {"red": 3, "green": 5, "blue": 7}


class LookupTools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def look_up(self, color: str) -> str:
        """Return the number of a color."""
        return str(NUMBERS[color])


class LookupData(vf.TaskData):
    color: str


class LookupTask(vf.Task[LookupData]):
    @classmethod
    def toolsets(cls, config):
        return [LookupTools(vf.ToolsetConfig())]


class LookupTaskset(vf.Taskset[LookupTask]):
    def load(self):
        for color in NUMBERS:
            data = LookupData(prompt=f"Look up the number of {color}.", color=color)
            yield LookupTask(data, self.config.task)


class LookupEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class LookupEnv(vf.Env[LookupEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            found = await interaction.turn()
            doubled = await interaction.turn("Now double it.")
        number = NUMBERS[task.data.color]
        interaction.trace.record_reward("found", float(found.last_reply == str(number)))
        interaction.trace.record_reward("doubled", float(doubled.last_reply == str(2 * number)))


if __name__ == "__main__":
    LookupTools.run()
