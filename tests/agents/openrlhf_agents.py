"""An agent file in the form of OpenRLHF, for tests: an environment that asks twice."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Score:
    """Like a tensor of one element."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"] + states["label"]}

    async def step(self, states, **kwargs):
        assert states["observation_text"].startswith("2+2=")
        self.turns += 1
        done = self.turns == 2
        return {
            "rewards": Score(float(len(states["action_text"]) > 0)),
            "scores": Score(1.0),
            "environment_feedback": "\n" if done else " wrong, again: ",
            "done": done,
            "sampling_params": states["sampling_params"],
            "extra_logs": {},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
