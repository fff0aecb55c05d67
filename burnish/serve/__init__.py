"""Models behind HTTP.

Reading order: base (options), scorer (texts to numbers), batcher (many requests, one pass), app
(the protocol and its limits), reward (all of it as a process).
"""
