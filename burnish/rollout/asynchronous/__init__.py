"""Sampling all the time: a service that owns the engine, a schedule that bounds the age of groups,
and the source of groups built of both."""
