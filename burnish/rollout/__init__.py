"""Sampling from the policy: the engine contract, the local engine, and prompts to scored groups."""
