"""An environment of verifiers with one turn: add two numbers."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(last_reply(trace) == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(last_reply(trace)) < 10)


class SumsTaskset(vf.Taskset[SumTask]):
    def load(self):
        for i in range(5):
            data = SumData(prompt=f"What is {i} + 1?", answer=str(i + 1))
            yield SumTask(data, self.config.task)


def last_reply(trace: vf.Trace) -> str:
    replies = [node.message for node in trace.nodes if node.message.role == "assistant"]
    return (replies[-1].content or "").strip()
