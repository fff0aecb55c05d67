"""Scores of the environment that created a prompt."""
