"""Weight transfer from the trainer to rollout engines: versioned, bucketed and verified."""
