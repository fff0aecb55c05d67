"""Options that change how a run computes: what they must change, and what they must not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from older_runs import save_with_older_keys
from safetensors.torch import load_file
from torch import Tensor

import burnish
from burnish.algorithms.advantages import gdpo
from burnish.config import JobConfig
from burnish.config.load import ConfigError
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.observe.resumes import read_resumes
from burnish.observe.timeline import Timeline
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.runtime.inline import InlineRuntime
from burnish.train.base import Loss, Role
from burnish.train.engine import BaseTrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

MakeConfig = Callable[..., JobConfig]
Reward = Callable[[str], float]
LORA = "model.lora.lora_rank=4"
KL = "algorithm.kl.init_kl_coef=0.1"
TEACHER = "teacher.model.scratch={alphabet: 0123456789+=, hidden_size: 32, num_layers: 1}"
GAE = ["algorithm.advantage=gae", "rollout.rollout_batch_size=16", "rollout.n_samples_per_prompt=1"]


def _newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step_*"))


def _lines(config: JobConfig, reward: Reward) -> list[dict[str, float]]:
    return read_metrics(burnish.run(config, rewards=reward).run_dir)


def _assert_close(
    first: list[dict[str, float]], second: list[dict[str, float]], names: str, *, rel: float
) -> None:
    for one, other in zip(first, second, strict=True):
        chosen = [n for n in one if n.startswith(tuple(names.split())) and "tokens_per_s" not in n]
        assert chosen
        for name in chosen:
            # abs: the policy loss of GRPO is a sum of terms near 1 that cancel to about 1e-8.
            close = pytest.approx(other[name], rel=rel, abs=1e-5, nan_ok=True)
            assert one[name] == close, f"{name} at step {one['step']}"


def test_own_weights_of_the_rollout_engine_do_not_change_the_numbers(
    rl: MakeConfig, reward: Reward
) -> None:
    """A copy that each push updates has the bits of the policy's weights."""
    shared = _lines(rl("train.lr=1e-2", f"run_dir={rl().run_dir}-shared"), reward)
    copied = _lines(rl("train.lr=1e-2", "rollout.engine.own_weights=true"), reward)
    assert "sync/bytes" in copied[0] and "sync/bytes" not in shared[0]
    names = [n for n in shared[0] if n.startswith(("train/", "reward/"))]
    names = [n for n in names if "tokens_per_s" not in n]
    assert [[line[n] for n in names] for line in copied] == [
        [line[n] for n in names] for line in shared
    ]


def test_roles_in_host_memory_between_phases_do_not_change_the_numbers(
    rl: MakeConfig, reward: Reward, evaluation: list[str]
) -> None:
    """PPO with a critic, a reference model, an EMA and evaluations. Each step moves the reference
    in and out, then policy and critic in; both leave when the next step samples."""
    common = [*GAE, KL, *evaluation, "train.lr=1e-2", "rollout.engine.own_weights=true"]
    common += ["train.ema_decay=0.9", "eval.every_n_steps=1"]
    stays = _lines(rl(*common, f"run_dir={rl().run_dir}-stays"), reward)
    moves = "cluster.offload_between_phases=[policy, critic, reference]"
    moved = _lines(rl(*common, moves), reward)

    def numbers(lines: list[dict[str, float]]) -> list[dict[str, float]]:
        groups = ("train/", "reward/", "critic/", "eval/")
        return [{n: v for n, v in line.items() if n.startswith(groups)} for line in lines]

    assert numbers(moved) == numbers(stays) and "critic/grad_norm" in moved[-1]
    assert moved[-1]["time/offload_s"] > 0 and moved[-1]["time/reload_s"] > 0
    assert "time/offload_s" not in stays[-1]


def test_an_engine_sleeps_once_per_step_after_all_that_the_step_samples(
    rl: MakeConfig, evaluation: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the first of several samplings of a step, and not after an evaluation: vLLM drops
    its weights then, and they only come back with the next update."""
    calls: list[str] = []
    generate = LocalRolloutEngine.generate

    def sampled(self: Any, *args: Any) -> Any:
        calls.append("sample")
        return generate(self, *args)

    def slept(self: Any, *, new_weights_follow: bool = False) -> None:
        calls.append("drop" if new_weights_follow else "close")

    monkeypatch.setattr(LocalRolloutEngine, "generate", sampled)
    monkeypatch.setattr(LocalRolloutEngine, "sleep", slept)
    config = rl(
        *evaluation,
        "eval.every_n_steps=1",
        "rollout.engine.sleep_between_rollouts=true",
        "rollout.dynamic_sampling={max_refills: 2}",
    )
    burnish.run(config, rewards=lambda response: 0.0)  # so each step takes two refills
    step = ["sample", "sample", "sample", "drop"]
    assert calls[:11] == ["sample", *step, "sample", *step, "sample"]
    assert set(calls[11:]) <= {"close"}


def test_the_reference_of_a_lora_policy_is_its_base(rl: MakeConfig, reward: Reward) -> None:
    """Adapters start at 0, so the first KL is exactly 0; after steps of 1e-2 it is not."""
    lines = _lines(rl(LORA, KL, "max_steps=4", "train.lr=1e-2"), reward)
    assert lines[0]["train/kl"] == 0.0
    assert lines[-1]["train/kl"] > 1e-4


def test_a_lora_run_saves_adapters_only_and_its_export_is_base_plus_adapter(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    config = rl(LORA, "train.lr=1e-2")
    run_dir = burnish.run(config, rewards=reward).run_dir
    saved = load_file(_newest(run_dir) / "policy" / "master.safetensors")
    assert saved and all(".lora_" in name for name in saved)
    merged = load_file(burnish.export(run_dir, tmp_path / "out") / "model.safetensors")
    full = config.model.model_copy(update={"lora": None})
    base = dict(load_causal_lm(full).named_parameters())
    moved = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    assert moved and all("_proj." in name for name in moved)


def test_a_lora_policy_with_a_critic_trains(rl: MakeConfig, reward: Reward) -> None:
    lines = _lines(rl(LORA, *GAE, "train.lr=1e-2"), reward)
    assert all(line["critic/grad_norm"] > 0 and line["train/grad_norm"] > 0 for line in lines)


def test_the_first_steps_train_a_critic_with_its_own_settings_alone(
    rl: MakeConfig, reward: Reward
) -> None:
    """The policy's schedule starts at its first step: linear over the last 2 of 4 steps. The
    critic's halves over 4."""
    own = "critic={freeze_policy_steps: 2, lr: 1e-3, optimizer: adafactor, max_grad_norm: 0.1, "
    own += "schedule: {lr_scheduler: {kind: polynomial, min_ratio: 0}}}"
    config = rl(*GAE, "train.lr=1e-2", "train.lr_scheduler=linear", "max_steps=4", own)
    lines = _lines(config, reward)
    assert ["train/lr" in line for line in lines] == [False, False, True, True]
    assert [line["train/lr"] for line in lines[2:]] == pytest.approx([1e-2, 5e-3])
    rates = [line["critic/lr"] for line in lines]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    late = "critic.freeze_policy_steps=4"
    with pytest.raises(ConfigError, match="the policy would never be trained"):
        rl(*GAE, "max_steps=4", late)


def test_a_new_critic_expects_nothing_until_it_has_learned(tiny_config: ModelConfig) -> None:
    """Values that are noise would be what the policy learns from. A new reward model has none to
    mislead, and differences between its texts from the start."""
    tokenizer = load_tokenizer(tiny_config)
    runtime = InlineRuntime(
        tokenizer, precision=PrecisionConfig(), device="cpu", timeline=Timeline()
    )
    batch = rows_to_batch([[3, 4, 5, 6, 7]], [[False, False, True, True, True]], prompt_lens=[2])
    roles: tuple[tuple[Role, bool], ...] = (("critic", False), ("reward", True))
    for role, expected in roles:
        spec = EngineSpec(TrainRole.alone(role, TrainConfig(), tiny_config))
        assert bool(runtime.scalar_model(spec, seed=0).values(batch).any()) == expected


def test_a_bf16_run_learns_with_fp32_masters(rl: MakeConfig, reward: Reward) -> None:
    config = rl("precision.dtype=bf16", "max_steps=3")
    run_dir = burnish.run(config, rewards=reward).run_dir
    masters = load_file(_newest(run_dir) / "policy" / "master.safetensors")
    assert {value.dtype for value in masters.values()} == {torch.float32}
    # With a rate of 1e-3, fp32 masters cannot all be bf16 numbers after three steps.
    assert any(not torch.equal(v, v.bfloat16().float()) for v in masters.values())
    assert all(math.isfinite(line["train/grad_norm"]) for line in read_metrics(run_dir))


def test_a_rollout_dtype_of_its_own_gets_new_weights_every_step(
    rl: MakeConfig, reward: Reward
) -> None:
    """bf16 has 8 bits: the sampler's log-probs differ from the trainer's by more than fp32 noise,
    and by no more after four large steps than at first, which a stale copy could not do."""
    lines = _lines(rl("precision.rollout_dtype=bf16", "max_steps=4", "train.lr=1e-2"), reward)
    assert all(1e-5 < line["train/mismatch_abs"] < 0.03 for line in lines)


@pytest.mark.parametrize(
    "cut", [[], ["rollout.top_p=0.9", "rollout.top_k=9", "algorithm.correction={}"]]
)
def test_where_dtypes_agree_sampler_and_trainer_agree_to_fp32_rounding(
    cut: list[str], rl: MakeConfig, reward: Reward
) -> None:
    """Also over the tokens that top-p and top-k keep; over the full vocabulary of the trainer, the
    mean would be the log of their probability, about 0.1 or more."""
    lines = _lines(rl("max_steps=4", "train.lr=1e-2", *cut), reward)
    # Log-probs of a 32-wide fp32 model, computed in another order: the mean is below 2 units in
    # the last place of a log-prob of 4.
    assert all(line["train/mismatch_max"] < 1e-5 for line in lines)
    assert all(line["train/mismatch_abs"] < 1e-6 for line in lines)


@pytest.mark.parametrize("kind", ["grpo", "gae"])
@pytest.mark.parametrize(
    "split",
    ["train.micro_train_batch_size=2", "train.max_tokens_per_micro_batch=40"],
)
def test_how_a_step_is_split_into_micro_batches_changes_no_metric(
    kind: str, split: str, rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    options = [
        *(GAE if kind == "gae" else []),
        KL,
        "algorithm.kl.placement=reward" if kind == "gae" else "algorithm.kl.placement=loss",
        "algorithm.kl.estimator=k1" if kind == "gae" else "algorithm.kl.estimator=k3",
        "algorithm.entropy_coef=0.01",
        "max_steps=3",
    ]
    whole = _lines(rl(*options, f"run_dir={tmp_path / 'whole'}"), reward)
    parts = _lines(rl(*options, split, f"run_dir={tmp_path / 'parts'}"), reward)
    # 1e-3: fp32 sums in another order, through three AdamW steps (which divide by small numbers).
    _assert_close(parts, whole, "train/ reward/ rollout/ critic/", rel=1e-3)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_layout_of_a_micro_batch_changes_no_metric(
    layout: str, rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    options = [KL, "max_steps=3"]
    shared = _lines(rl(*options, f"run_dir={tmp_path / 'shared'}"), reward)
    config = rl(*options, f"train.layout={layout}", f"run_dir={tmp_path / 'other'}")
    # As above.
    _assert_close(_lines(config, reward), shared, "train/ reward/ rollout/", rel=1e-3)


@pytest.mark.parametrize(("updates", "kl"), [(1, "train/kl"), (3, "rollout/kl")])
def test_an_adaptive_kl_weight_moves_as_its_formula_says(
    updates: int, kl: str, rl: MakeConfig, reward: Reward
) -> None:
    """KL is 0 at the first step: error clipped to -0.2, so the second step's weight is
    0.1 x (1 - 0.2 x 16 / 160) = 0.098. So too where several updates have moved the policy away from
    the one that sampled: the KL is that one's."""
    options = [
        "algorithm.kl.adaptive.target=0.05",
        "algorithm.kl.adaptive.horizon=160",
        "max_steps=6",
    ]
    more = ["train.lr=3e-2", f"train.epochs_per_rollout={updates}"]
    lines = _lines(rl(KL, *options, *more), reward)
    assert lines[0][kl] == 0.0 and (lines[0]["train/kl"] != 0.0) == (updates > 1)
    coefs = [line["train/kl_coef"] for line in lines]
    assert coefs[:2] == [0.1, pytest.approx(0.098, rel=1e-9)]
    for line, after in zip(lines, coefs[1:], strict=False):
        error = min(max(line[kl] / 0.05 - 1, -0.2), 0.2)
        expected = line["train/kl_coef"] * (1 + error * 16 / 160)
        assert after == pytest.approx(expected, rel=1e-9)
    assert max(line[kl] for line in lines) > 0.05, "the weight is never seen to rise"


def test_what_a_resumed_run_does_otherwise_is_said(
    rl: MakeConfig, reward: Reward, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    burnish.run(rl(), rewards=reward)
    burnish.run(rl("max_steps=3"), rewards=reward, resume=tmp_path / "run")
    assert "changed settings: max_steps: was 2, now 3\n" in caplog.text + "\n"
    caplog.clear()
    save_with_older_keys(tmp_path / "run")
    burnish.run(rl("max_steps=3"), rewards=reward, resume=tmp_path / "run")
    assert "changed settings" not in caplog.text
    caplog.clear()
    more = ["max_steps=4", "algorithm.advantage=rloo", "train.lr=0.5"]
    burnish.run(rl(*more), rewards=reward, resume=tmp_path / "run")
    for told in (
        "algorithm.advantage.kind: was 'grpo', now 'rloo'",
        "train.lr: was 0.001, now 0.5",
    ):
        assert told in caplog.text
    first, second = read_resumes(tmp_path / "run")
    assert (first.step, first.changes) == (2, {"max_steps": "was 2, now 3"})
    assert (second.step, second.changes["train.lr"]) == (3, "was 0.001, now 0.5")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Resumed after step 3" in page and '{"x": 3, "label": "resumed"}' in page


def _coefs_after_resume(config: JobConfig, reward: Reward, run_dir: Path) -> list[float]:
    burnish.run(config, rewards=reward, resume=run_dir)
    return [line["train/kl_coef"] for line in read_metrics(run_dir)]


def test_a_fixed_kl_weight_stays_and_another_one_on_resume_counts(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    lines = _lines(rl(KL), reward)
    assert [line["train/kl_coef"] for line in lines] == [0.1, 0.1]
    other = rl("algorithm.kl.init_kl_coef=0.3", "max_steps=3")
    assert _coefs_after_resume(other, reward, tmp_path / "run") == [0.1, 0.1, 0.3]


def test_an_adaptive_kl_weight_goes_on_when_resumed_and_begins_anew_from_another_start(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    """The first KL is 0, so the second weight is 0.098 (see above); the third is that of a run
    that went through."""
    options = [
        "algorithm.kl.adaptive.target=0.05",
        "algorithm.kl.adaptive.horizon=160",
        "train.lr=3e-2",
    ]
    whole = _lines(rl(KL, *options, "max_steps=3", f"run_dir={tmp_path / 'whole'}"), reward)
    burnish.run(rl(KL, *options), rewards=reward)
    again = rl(KL, *options, "max_steps=3")
    coefs = _coefs_after_resume(again, reward, tmp_path / "run")
    assert coefs == [line["train/kl_coef"] for line in whole]
    assert len(set(coefs)) == 3, "it moves"
    other = rl("algorithm.kl.init_kl_coef=0.3", *options, "max_steps=4")
    assert _coefs_after_resume(other, reward, tmp_path / "run") == [*coefs, 0.3]


def test_the_moving_average_is_saved_exported_and_behind_the_weights(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    """One step with decay 0.9: ema = 0.9 start + 0.1 end for every weight."""
    config = rl("train.ema_decay=0.9", "max_steps=1")
    run_dir = burnish.run(config, rewards=reward).run_dir
    averaged = burnish.export(run_dir, tmp_path / "ema", model="policy-ema")
    ema = load_file(averaged / "model.safetensors")
    end = load_file(burnish.export(run_dir, tmp_path / "end") / "model.safetensors")
    start = dict(load_causal_lm(config.model).named_parameters())
    for name, value in ema.items():
        # 1e-6: one fp32 interpolation of weights below 1.
        expected = 0.9 * start[name].detach() + 0.1 * end[name]
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)
    assert any(not torch.equal(ema[name], end[name]) for name in ema)


def test_gradient_checkpointing_changes_no_metric(
    rl: MakeConfig, reward: Reward, tmp_path: Path
) -> None:
    plain = _lines(rl(f"run_dir={tmp_path / 'plain'}"), reward)
    config = rl("train.gradient_checkpointing=true", f"run_dir={tmp_path / 'saved'}")
    # 1e-5: the same operations on the same numbers.
    _assert_close(_lines(config, reward), plain, "train/ reward/", rel=1e-5)


@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "opo", "gae", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_every_advantage_runs_with_several_updates_per_rollout(
    advantage: str, rl: MakeConfig, reward: Reward
) -> None:
    options = [f"algorithm.advantage={advantage}", "train.train_batch_size=8"]
    lines = _lines(rl(*options, "train.epochs_per_rollout=2"), reward)
    assert all(math.isfinite(line["train/loss"]) for line in lines)
    # Four updates on one rollout: the ratio has left 1 by the second.
    assert all(line["train/ratio_max"] > 1.0 for line in lines)


def test_cispo_runs_with_several_updates_per_rollout_and_the_samplers_log_probs(
    rl: MakeConfig, reward: Reward
) -> None:
    options = ["algorithm.policy_loss=cispo", "train.train_batch_size=8"]
    lines = _lines(rl(*options, "algorithm.old_policy=sampler"), reward)
    assert all(math.isfinite(line["train/loss"]) for line in lines)
    for line in lines:  # the ratio to the sampler, and its meter, contain the second update
        assert line["train/ratio_max"] > 1.0 and line["train/mismatch_max"] > 1e-3
        assert 0.5 < line["train/effective_sample_frac"] < 1


def test_gspo_runs_with_several_updates_per_rollout_and_a_correction(
    rl: MakeConfig, reward: Reward
) -> None:
    options = ["algorithm.policy_loss=gspo", "train.train_batch_size=8"]
    lines = _lines(rl(*options, "algorithm.correction={level: geometric, mode: mask}"), reward)
    assert all(math.isfinite(line["train/loss"]) for line in lines)
    assert all(line["train/ratio_max"] > 1.0 for line in lines)
    # fp32 on both sides: the sampler's log-probs are the trainer's, and no weight is changed
    assert all(line["train/correction_frac"] == 0.0 for line in lines)
    assert all(line["train/correction_weight"] == pytest.approx(1, abs=1e-4) for line in lines)


def test_each_reward_of_a_run_is_normalized_by_itself(rl: MakeConfig, reward: Reward) -> None:
    """Advantages of the sample files against the formula with their parts: two rewards of different
    spread and weights, and one that is only measured."""
    named = "{kind: function, name: a}, {kind: function, name: b, weight: 0.01}"
    rewards = f"rewards=[{named}, {{kind: math, weight: 0}}]"
    config = rl(rewards, "max_steps=1", "algorithm.advantage={kind: grpo, normalize_each: true}")
    functions = {"a": reward, "b": lambda response: 1000.0 * len(response)}
    run_dir = burnish.run(config, rewards=functions).run_dir
    (file,) = (run_dir / "samples").glob("step_*.parquet")
    rows = pq.read_table(file).to_pylist()
    parts = [json.loads(row["reward_parts"]) for row in rows]
    scores = torch.tensor([[p["a"], p["b"]] for p in parts])
    groups = torch.tensor([row["group_id"] for row in rows])
    expected = gdpo(scores, torch.tensor([1.0, 0.01]), groups, eps=1e-6)
    # 1e-5: fp32 means over the tokens of equal numbers
    assert [row["advantage"] for row in rows] == pytest.approx(expected.tolist(), abs=1e-5)
    assert expected.abs().max() > 0.5


def test_a_share_of_the_tokens_is_trained_and_denominators_stay(
    rl: MakeConfig, reward: Reward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss that the policy gets has advantages on a quarter of the tokens, those of the highest
    entropy of the rollout."""
    seen: list[tuple[Batch, Tensor]] = []
    original = BaseTrainEngine.forward_backward

    def watched(self: BaseTrainEngine, batch: Batch, loss: Loss) -> Stats:
        seen.append((batch, self.entropies(batch)))
        return original(self, batch, loss)

    monkeypatch.setattr(BaseTrainEngine, "forward_backward", watched)
    options = ["algorithm.top_entropy_quantile=0.25", "algorithm.advantage=reinforce_pp"]
    (line,) = _lines(rl(*options, "max_steps=1"), reward)
    ((batch, entropies),) = seen
    assert batch.advantages is not None
    trained = batch.advantages != 0
    count = int(batch.action_mask.sum())
    assert batch.num_tokens == count and int(trained.sum()) == math.ceil(count / 4)
    assert entropies[trained].min() >= entropies[batch.action_mask & ~trained].max()
    assert math.isfinite(line["train/loss"])


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        ([], 1),
        (["train.epochs_per_rollout=2", "algorithm.top_entropy_quantile=0.5"], 2),
        (["algorithm.advantage=gae", KL], 1),
        ([KL, LORA], 1),
        (["algorithm.advantage=on_policy_distill", TEACHER, "rewards=[{kind: function}]"], 1),
    ],
)
def test_steps_make_the_planned_passes(
    overrides: list[str],
    updates: int,
    rl: MakeConfig,
    reward: Reward,
    passes_of_two_steps: Callable[..., Any],
) -> None:
    made, planned = passes_of_two_steps(
        rl(*overrides, "max_steps=3"), updates_per_step=updates, rewards=reward
    )
    assert made == planned
