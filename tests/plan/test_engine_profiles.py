"""One memory profile per train engine, and a planner that asks nothing else about an engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import burnish.plan
from burnish.config import load_config
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine, TrainEngineConfig
from burnish.plan.engine_profile import Suggestion, TrainEngineProfile, profile_class
from burnish.plan.fit import candidates
from burnish.plan.hardware import parse_cluster
from burnish.plan.model_state import Item
from burnish.plan.oom import suggestions
from burnish.plan.predict import make_plan
from burnish.plan.time import estimate

ROOT = Path(__file__).parents[2]
REGISTERED = get_args(get_args(TrainEngineConfig)[0])


@pytest.mark.parametrize("options", REGISTERED)
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_registered_engine_names_a_complete_profile(options: Any, ranks: int) -> None:
    engine = TrainConfig(engine=options()).engine
    found = profile_class(engine, ranks)
    assert issubclass(found, TrainEngineProfile)
    assert not found.__abstractmethods__, "a hook without an implementation"


def test_only_profiles_know_the_options_of_an_engine() -> None:
    """The planner has no ``isinstance`` on a train engine, and imports no engine's options."""
    names = {options.__name__ for options in REGISTERED}
    folder = Path(burnish.plan.__file__).parent
    using = {
        path.name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in names
    }
    assert using == {"torch_profile.py", "deepspeed_profile.py"}


class CountedProfile(TrainEngineProfile):
    """An engine of another kind: 10 bytes per trained parameter and rank, 1 kB for all else."""

    def state(self) -> list[Item]:
        return [Item("parameters", 10.0 * self.setup.shape.parameters, "10 B")]

    def gradients_in_pass(self, stage: str, *, accumulates: bool, traced: float) -> list[Item]:
        return [Item("gradients", 1e3, "in the pass")]

    def gradients_in_step(self) -> list[Item]:
        return [Item("gradients", 1e3, "in the step")]

    def saving(self, *, gpu: bool) -> list[Item]:
        return [Item("optimizer", 1e3, "saved")]

    def traffic(self, *, passes: float, updates: int, trains: bool) -> float:
        return 1e18 * trains  # by far the longest phase

    @property
    def stepped_entries(self) -> float:
        return 1.0

    @classmethod
    def alternatives(cls, role: TrainRole) -> list[list[str]]:
        return [[], ["train.engine.device=cpu"]]

    @classmethod
    def savings(cls, role: TrainRole) -> Iterator[Suggestion]:
        yield Suggestion(("train.engine.device=cpu",), "slower")


def test_a_profile_is_all_that_the_planner_asks_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory, time, the search space of --fit and the advice of a run out of memory."""
    config = load_config(ROOT / "recipes" / "tiny_1_sft.yaml", ["cluster.runtime=inline"])
    hardware = parse_cluster("A100-80GB")
    named = f"{__name__}:{CountedProfile.__name__}"
    monkeypatch.setattr(TorchEngine, "memory_profile", lambda self, *, ranks: named)

    rows = [r for r in make_plan(config, hardware).rows if r.item in ("parameters", "gradients")]
    entries = {r.bytes / 10 for r in rows if r.how == "10 B"}
    assert len(entries) == 1 and entries.pop() > 1e5
    assert {r.phase for r in rows if r.how == "in the pass"} == {"forward/backward"}
    assert {r.phase for r in rows if r.how == "in the step"} == {"step"}
    time = estimate(config, hardware)
    assert max(time.parts, key=lambda p: p.seconds).how.startswith("communication: 1000000000 GB")
    assert ["train.engine.device=cpu"] in candidates(config, hardware)
    advice = [s.overrides for s in suggestions(config, "step")]
    assert advice[0] == ("train.engine.device=cpu",)
