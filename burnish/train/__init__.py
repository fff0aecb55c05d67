"""Gradients and optimizer steps: the engine contract, micro-batches, the torch engine."""
