"""Rewards: one number per response. A folder for each kind.

Reading order: base (the interface), config (the settings), kinds (the registry), build, reward_set
(scores of groups), shaping; then the folders of the kinds.
"""
