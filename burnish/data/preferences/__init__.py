"""Pairs of responses to one prompt, and single responses with a label."""
