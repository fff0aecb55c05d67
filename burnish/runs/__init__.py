"""Read the folders of runs: tables of several runs, their differences, and data frames of one.

Reading order: :class:`burnish.runs.folder.Run`, then compare.py and tables.py. Nothing here needs
torch or the models, and nothing writes to a run's folder."""
