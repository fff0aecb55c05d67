"""Around the steps of a job: the contract of loops, metrics, checkpoints, records and signals."""
