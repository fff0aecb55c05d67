"""Jobs and their training loops. Read ``rl.py`` first: one step of it is the algorithm, line by
line."""
