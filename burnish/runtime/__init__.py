"""Runtimes, which build and place engines. ``inline.py``: all in this process."""
