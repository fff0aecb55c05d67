"""How much memory a run will take, before it takes any: ``burnish plan``.

Reading order: hardware, shapes, model_state, tracking, activations, kv_cache, roles, plan; then fit
and time, which ask many plans; command and launch are what the command line and a run call.

``burnish plan RECIPE --probe`` runs random weights and tokens on the hardware at hand, in small
steps to the recipe's own size: probe_stages, probe_worker, probe_command.
"""
