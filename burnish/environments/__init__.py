"""Environments: tasks that generate prompts and score the responses.

Reading order: base (the interface), make (by name), importing (a user's own class), reasoning_gym;
then multi_turn (episodes), tools (Python functions as tools), pool and worker (their processes).
"""
