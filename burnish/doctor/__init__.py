"""``burnish doctor``: what is installed, what this machine has, what is known not to work together,
and whether every engine that is here really computes. Reading order: facts, known, selftest,
command."""
