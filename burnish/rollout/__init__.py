"""Sampling from the policy: the engine contract, the engines, and scoring of groups."""
