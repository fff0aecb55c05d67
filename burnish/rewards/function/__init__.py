"""Rewards of Python functions, and of reward files of OpenRLHF."""
