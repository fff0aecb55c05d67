"""``burnish plan RECIPE --probe``: random weights and tokens on the hardware at hand, in small
steps to the recipe's own size; the plan beside what was measured. Reading order: rungs, worker,
command."""
