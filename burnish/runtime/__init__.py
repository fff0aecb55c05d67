"""Where engines live. ``inline.py``: all in this process."""
