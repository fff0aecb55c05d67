"""Prompts with a response each, to be scored."""
