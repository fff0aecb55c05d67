"""From files, hubs and environments to token ids, in an order that can be resumed exactly.

Reading order: sources (rows), chat (rows to token-exact ids and masks), stream (which row comes
next), encoded (the two together, with the length limit), then prompts, sft and preference (one
encoder each).
"""
