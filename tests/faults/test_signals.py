"""SIGTERM and Ctrl-C: save, say how to go on, end with 128 + n. Twice: end at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish import cli
from burnish.config import JobConfig, dump_yaml
from burnish.user_calls import UserCalls

Recipe = Callable[..., JobConfig]
Measured = Callable[[Path], list[dict[str, Any]]]
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def signals_outside_of_runs() -> Iterator[None]:
    """A signal that no run handles fails the test, instead of ending all tests."""

    def fail(number: int, _frame: Any) -> None:
        raise AssertionError(f"signal {number} came when no run handled it")

    before = signal.signal(signal.SIGTERM, fail)
    yield
    signal.signal(signal.SIGTERM, before)


def _share_of_digits(response: str) -> float:
    return sum(c.isdigit() for c in response) / 4


def _stopping(call: int, number: signal.Signals, *, times: int = 1) -> Callable[..., list[float]]:
    """A batch reward that sends this process a signal in its ``call``-th call."""
    calls = 0

    def score(responses: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        for _ in range(times if calls == call else 0):
            os.kill(os.getpid(), number)
        return [_share_of_digits(r) for r in responses]

    return score


def _without_function(config: JobConfig) -> JobConfig:
    """The recipe with its reward function left to the caller."""
    tree = config.model_dump(mode="json")
    tree["rewards"] = [{"kind": "function"}]
    return burnish.load_config(tree)


def _steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_the_current_step_and_the_resumed_run_is_bit_identical(
    number: signal.Signals, recipe: Recipe, measured: Measured
) -> None:
    never = "checkpoint.every_n_steps=0"
    whole = _without_function(recipe("grpo", never, name="whole"))
    stopped = _without_function(recipe("grpo", never, name="stopped"))
    burnish.run(whole, rewards=_share_of_digits)
    run_dir = Path(stopped.run_dir)
    handler = signal.getsignal(number)
    with pytest.raises(burnish.Interrupted) as caught:
        burnish.run(stopped, rewards=_stopping(5, number))
    assert caught.value.signal_number == number
    assert f"--resume {run_dir}" in str(caught.value)
    assert _steps(run_dir) == ["step_000005"]
    assert signal.getsignal(number) == handler, "the caller has its own handler back"
    burnish.run(stopped, resume=run_dir, rewards=_share_of_digits)
    assert measured(run_dir) == measured(Path(whole.run_dir))


def test_a_signal_during_the_first_evaluation_does_not_measure_it_twice(
    recipe: Recipe, tmp_path: Path, measured: Measured
) -> None:
    config = _without_function(
        recipe("grpo", "max_steps=2", f"eval.data.sources=[{tmp_path / 'rows.jsonl'}]")
    )
    with pytest.raises(burnish.Interrupted):
        burnish.run(config, rewards=_stopping(1, signal.SIGTERM))
    run_dir = Path(config.run_dir)
    assert _steps(run_dir) == ["step_000000"]
    burnish.run(config, resume=run_dir, rewards=_share_of_digits)
    assert [line["step"] for line in measured(run_dir)] == [0, 1, 2]


def test_a_second_ctrl_c_ends_at_once_and_leaves_older_checkpoints(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards are called in this thread: signals that another one sends at once arrive as one."""
    monkeypatch.setattr(UserCalls, "run", lambda _, function, *arguments: function(*arguments))
    config = _without_function(recipe("grpo"))
    with pytest.raises(KeyboardInterrupt):
        burnish.run(config, rewards=_stopping(4, signal.SIGINT, times=2))
    run_dir = Path(config.run_dir)
    assert _steps(run_dir) == ["step_000002", "step_000003"], "step 4 is neither done nor saved"
    burnish.run(config, resume=run_dir, rewards=_share_of_digits)
    assert _steps(run_dir)[-1] == "step_000012"


@pytest.mark.parametrize("number", SIGNALS)
def test_the_command_line_exits_with_128_plus_the_signal_and_a_resume_command(
    number: signal.Signals,
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_reward.py").write_text(
        "import os\n"
        "calls = 0\n"
        "def share_of_digits(responses):\n"
        "    global calls\n"
        "    calls += 1\n"
        f"    if calls == 4: os.kill(os.getpid(), {int(number)})\n"  # the first call is the check
        "    return [len(r) / 4 for r in responses]\n"
    )
    config = recipe("grpo", "max_steps=5", "checkpoint.every_n_steps=0")
    (tmp_path / "recipe.yaml").write_text(dump_yaml(config))

    def command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["burnish", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    assert command("rl", str(tmp_path / "recipe.yaml")) == 128 + number
    said = capsys.readouterr().err
    assert f"burnish rl --resume {config.run_dir}" in said
    assert command("rl", "--resume", config.run_dir) == 0
    assert _steps(Path(config.run_dir)) == ["step_000003", "step_000005"]
