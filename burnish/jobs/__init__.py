"""The controllers. Read ``rl.py`` first: a step there is the algorithm, line by line."""
