"""Solutions with a label on every step."""
