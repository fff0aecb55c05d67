"""An agent file of OpenRLHF with a loop of its own, on token ids."""

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges, logprobs = [], [0.0] * len(ids)
        for _ in range(2):
            sampling_params.max_tokens = 20
            output = (await llm_engine.generate(ids, sampling_params)).outputs[0]
            ranges.append((len(ids), len(ids) + len(output.token_ids)))
            logprobs += [output.logprobs[i][t].logprob for i, t in enumerate(output.token_ids)]
            ids = ids + list(output.token_ids)
        assert len(logprobs) == len(ids)
        return {"reward": 0.5, "observation_tokens": ids, "action_ranges": ranges}
