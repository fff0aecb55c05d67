"""Checks before a run: inputs, models, ranks and rows, so that a mistake costs seconds."""
