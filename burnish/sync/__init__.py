"""Weights from the trainer to the rollout engine: versioned, in buckets, verified."""
