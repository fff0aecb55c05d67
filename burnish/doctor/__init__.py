"""``burnish doctor``: report installed packages, hardware and known incompatibilities, and test
every installed engine. Reading order: facts, known, selftest, command."""
