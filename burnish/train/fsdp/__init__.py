"""The torch engine with its model sharded over ranks (FSDP2)."""
