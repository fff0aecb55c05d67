"""Episodes: what the policy and an environment do in turns, as the exact token ids of every turn.

Reading order: play (the loop of one episode), rows (from its calls to training rows), runner (from
prompts to scored groups), renderer (messages to token ids and back), template (the text between a
turn and the next response), probing (the fixed conversations that test a template), parsing (tool
calls and reasoning of a response), formats (how model families write them).
"""
