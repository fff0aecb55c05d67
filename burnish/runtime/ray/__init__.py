"""Engines as groups of Ray workers."""
