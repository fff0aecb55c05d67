"""Engines on the ranks of a launcher (torchrun, accelerate, srun), without a controller."""
