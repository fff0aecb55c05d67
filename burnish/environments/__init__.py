"""Environments: tasks that generate prompts and score the responses.

Reading order: base (the interface), make (by name), importing (a user's own class), reasoning_gym.
"""
