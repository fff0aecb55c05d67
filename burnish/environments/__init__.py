"""Tasks that make prompts and score the answers.

Reading order: base (the interface), make (by name), importing (a user's own class), reasoning_gym.
"""
