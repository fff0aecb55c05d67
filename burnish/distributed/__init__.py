"""Ranks of a train engine: their collectives, and the shards of parameters in a tensor-parallel
group."""
