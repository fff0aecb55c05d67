"""The rollout engine in the trainer's process: continuous batching over the policy's weights."""
