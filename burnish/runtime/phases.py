"""Move offloaded roles to host memory when a phase of another role begins on the same device.

The runtime wraps its engines. The first call of an engine of another phase begins that phase:
offloaded engines of all other phases are moved out, then those of the called engine's are moved in.
Training loops do not know about phases.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

from burnish.config.cluster import ClusterConfig, ClusterRole
from burnish.config.placement_rules import PHASE_OF
from burnish.observe.timeline import Proxy
from burnish.train.base import BASE_SPANS, PASSES, TrainEngine

OFFLOAD_SPANS: Mapping[str, str] = MappingProxyType({"offload": "offload", "reload": "reload"})
_TRAIN_CALLS = (*PASSES, "optim_step", "weights", "save", "save_async", "load")
_ROLLOUT_CALLS = ("submit", "poll", "generate")
_SYNC_CALLS = ("push", "stage")

T = TypeVar("T")


@dataclass
class _Offloaded:
    """An engine that is moved between device and host."""

    role: ClusterRole
    engine: TrainEngine
    proxy: object
    """The same engine as the job sees it."""
    on_device: bool = False


class Phases:
    """Phases of the engines of one runtime."""

    def __init__(self, cluster: ClusterConfig | None = None) -> None:
        """``cluster``: source of the offloaded roles. None: nothing is offloaded."""
        offloaded = () if cluster is None else cluster.offload_between_phases
        self._offloaded: frozenset[ClusterRole] = frozenset(offloaded)
        self._shared = cluster.shared_roles if cluster is not None and offloaded else frozenset()
        self._engines: list[_Offloaded] = []
        self._lock = threading.Lock()
        """Responses are scored in other threads than they are sampled in."""

    def spans(self, role: ClusterRole, spans: Mapping[str, str]) -> dict[str, str]:
        """Return the timeline spans of an engine, including those of its moves."""
        return {**spans, **BASE_SPANS, **(OFFLOAD_SPANS if role in self._offloaded else {})}

    def train_engine(self, engine: T, role: ClusterRole) -> T:
        """Return ``engine`` as a proxy whose computations begin the phase of ``role``."""
        if role not in self._shared:
            return engine
        proxy, train_engine = self._wrap(engine, role, _TRAIN_CALLS), cast(TrainEngine, engine)
        if role in self._offloaded:
            self._engines.append(_Offloaded(role, train_engine, proxy))
        return proxy

    def rollout(self, engine: T) -> T:
        """Return a rollout engine as a proxy whose sampling begins the phase of the rollout."""
        return self._wrap(engine, "rollout", _ROLLOUT_CALLS)

    def sync(self, sync: T) -> T:
        """Return a weight transfer as a proxy that begins the policy's phase."""
        return self._wrap(sync, "policy", _SYNC_CALLS)

    def release(self, engine: object) -> None:
        """Forget an engine that is no longer used."""
        self._engines = [each for each in self._engines if each.proxy is not engine]

    def begin(self, role: ClusterRole) -> None:
        """Begin the phase of ``role``, unless it is running: move the offloaded engines of other
        phases to the host and those of ``role`` to the device."""
        with self._lock:
            for each in self._engines:
                if each.on_device and PHASE_OF[each.role] != PHASE_OF[role]:
                    each.engine.offload()
                    each.on_device = False
            for each in self._engines:
                if each.role == role and not each.on_device:
                    each.engine.reload()
                    each.on_device = True

    def _wrap(self, obj: T, role: ClusterRole, names: Sequence[str]) -> T:
        if role not in self._shared:
            return obj

        def call(name: str, *args: Any, **kwargs: Any) -> Any:
            self.begin(role)
            return getattr(obj, name)(*args, **kwargs)  # house: ok proxy of any object

        return Proxy(obj, {name: partial(call, name) for name in names})  # type: ignore[return-value]
