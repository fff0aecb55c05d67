"""The mathematics, as pure functions of tensors, without config, engines or logging.

Read in the order of an RL step: ``kl.py`` (distance from the reference), ``advantages.py`` (from
rewards to per-token advantages), ``policy_losses.py`` and ``value_losses.py`` (per-token losses),
``reduce.py`` (every denominator). ``correction.py`` measures the mismatch of sampler and trainer;
``preference.py`` is for reward models, ``distill.py`` for a student with a teacher. Functions of
one kind are selected once, by name, from the plain dicts below.
"""

from burnish.algorithms.advantages import ADVANTAGES
from burnish.algorithms.distill import DIVERGENCES
from burnish.algorithms.kl import KL_ESTIMATORS
from burnish.algorithms.policy_losses import POLICY_LOSSES
from burnish.algorithms.preference import PREFERENCE_LOSSES
from burnish.algorithms.reduce import reduce

__all__ = [
    "ADVANTAGES",
    "DIVERGENCES",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "reduce",
]
