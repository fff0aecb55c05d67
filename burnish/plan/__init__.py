"""Predict the memory of a run before it starts: ``burnish plan``.

Reading order: hardware, shapes, model_state, engine_profile with torch_profile and
deepspeed_profile, tracking, passes, activations, kv_cache, role_base, train_role, rollout_role,
roles, memory_plan, predict. Then read fit and time, which evaluate many plans. The command line
calls command, and every run calls launch.

``burnish plan RECIPE --probe`` runs random weights and tokens on the available hardware, in small
steps up to the recipe's full size: probe_stages, probe_worker, probe_command.
"""
