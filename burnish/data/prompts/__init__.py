"""Prompts: for rollouts, evaluation and batch inference."""
