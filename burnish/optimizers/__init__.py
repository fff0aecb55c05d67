"""Optimizers, a folder for each kind. Start with ``config.py``; ``kinds.py`` is the registry."""
