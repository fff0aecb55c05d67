"""Demonstrations: conversations, prompts with responses, or plain text."""
