"""Rewards: one number per response.

Reading order: base (the interface and its checks), shaping, function, math, environment,
model, remote, build.
"""
