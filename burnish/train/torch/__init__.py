"""The torch engine: a replica of the model on each device, optionally with sequence parallelism."""
