"""Rewards of reward models: ``reward.py`` scores the token rows of ``rows.py``."""
