"""Mathematical equality: ``text.py`` finds and compares answers, ``worker.py`` is math-verify."""
