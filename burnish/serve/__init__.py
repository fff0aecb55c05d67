"""Models behind HTTP.

Reading order: guard (who may ask, how much, how long), running (start and end of a server); for
reward models: base (options), scorer (texts to numbers), batcher (many requests, one pass), app
(the protocol), reward (all of it as a process). chat is the smallest client of a language model,
which ``agents/app.py``, ``agents/serving.py`` and ``jobs/serve.py`` serve.
"""
