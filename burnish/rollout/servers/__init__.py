"""The rollout engine of vLLM servers that were started before the run."""
