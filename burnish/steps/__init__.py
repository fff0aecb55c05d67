"""Training steps. Read ``rl.py`` first: one step of it is the algorithm, line by line."""
