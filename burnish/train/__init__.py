"""Train engines: the contract, micro-batches, the optimizer, and the torch, FSDP2 and DeepSpeed
engines."""
