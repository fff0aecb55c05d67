"""Models behind HTTP.

Reading order: base (options), scorer (texts to numbers), batcher (many requests, one pass),
guard (who may ask, how much, how long), app (the protocol), reward (all of it as a process).
"""
