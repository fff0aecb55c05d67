"""From responses to one number each.

Reading order: base (the interface and its checks), shaping, function, math, environment,
model, remote, build.
"""
