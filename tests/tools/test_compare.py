"""docs/compare.md is up to date, names keys that exist, and has the flags of the installed TRL and
of OpenRLHF 0.11.2."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from burnish.config.equivalents import equivalents, key_types

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import compare

FRAMEWORKS = equivalents()
COMMANDS = [(name, command) for name, known in FRAMEWORKS.items() for command in known.commands]


def test_the_page_is_up_to_date(capsys):
    assert compare.main([]) == 0, capsys.readouterr().out


def is_valid(job, key):
    """Whether a job has the key, and the value after its ``=``, if there is one, is valid."""
    dotted, sign, value = key.partition("=")
    for annotation in key_types(job, dotted):
        try:
            if sign:
                TypeAdapter(annotation).validate_python(yaml.safe_load(value))
            return True
        except ValidationError:
            continue
    return False


@pytest.mark.parametrize(("framework", "command"), COMMANDS)
def test_keys_in_rows_and_texts_exist(framework, command):
    known = FRAMEWORKS[framework]
    named = [
        (flag, key)
        for flag, row in known.flags(command).items()
        for key in (
            *row.keys,
            *re.findall(r"`([a-z_]+(?:\.\w+)+(?:=\w+)?)`", row.note + row.missing),
        )
        if key != "metrics.jsonl"
    ]
    assert not [pair for pair in named if not is_valid(known.commands[command].job, pair[1])]


@pytest.mark.parametrize(("framework", "command"), COMMANDS)
def test_a_row_has_a_key_or_a_text_and_is_not_also_missing(framework, command):
    rows = FRAMEWORKS[framework].flags(command).values()
    assert not [row.flags for row in rows if not (row.keys or row.note or row.missing)]
    assert not [row.flags for row in rows if row.missing and (row.keys or row.note)]


@pytest.mark.parametrize(
    "key",
    ["rollout.top_p", "train.lr.peak", "data.sources.path", "loss.kind=dpop", "reference.0.model"],
)
def test_a_wrong_key_or_value_is_found(key):
    assert not is_valid("preference", key)
    assert is_valid("preference", "data.sources.0.path") and is_valid("preference", "loss.kind=dpo")


@pytest.mark.parametrize("name", ["GRPOConfig", "SFTConfig", "DPOConfig"])
def test_every_field_of_trl_has_a_row_or_a_reason(name):
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(getattr(trl, name))}
    known = FRAMEWORKS["TRL"]
    rows = set(known.flags(name))
    assert fields - rows == set(known.left_out)
    assert rows <= fields


@pytest.mark.parametrize("command", FRAMEWORKS["OpenRLHF"].commands)
def test_every_flag_of_openrlhf_has_a_row(command):
    lines = (Path(__file__).parent / "openrlhf_flags.txt").read_text().splitlines()[1:]
    flags = {flag for flag, *commands in map(str.split, lines) if command in commands}
    assert len(flags) > 70
    assert not flags - set(FRAMEWORKS["OpenRLHF"].flags(command))


IN_DEMAND = {
    ("OpenRLHF", "train_ppo_ray"): "logger.wandb.project async_train async_queue_size "
    "partial_rollout_enable agent_func_path load_in_4bit vllm_tensor_parallel_size "
    "deepspeed_enable_sleep vllm_enable_sleep ref_reward_offload colocate_all_models "
    "attn_implementation num_episodes max_epochs max_samples freezing_actor_steps "
    "critic.freezing_steps save_value_network eval_dataset actor.optim ds.ring_attn_size "
    "ckpt.save_hf ckpt.disable_ds",
    ("OpenRLHF", "train_sft"): "use_wandb load_in_4bit lora_rank target_modules max_samples",
    ("OpenRLHF", "train_dpo"): "ref_offload ipo label_smoothing nll_loss_coef packing_samples",
    ("TRL", "GRPOConfig"): "use_vllm vllm_mode vllm_server_base_url loss_type scale_rewards "
    "sync_ref_model report_to push_to_hub optim lr_scheduler_type mask_truncated_completions",
    ("TRL", "SFTConfig"): "packing assistant_only_loss neftune_noise_alpha eos_token push_to_hub",
    ("TRL", "DPOConfig"): "loss_type precompute_ref_log_probs sync_ref_model f_divergence_type",
}
"""Flags that users of the other framework often set, by command."""


def test_flags_in_demand_have_a_replacement():
    for (framework, command), flags in IN_DEMAND.items():
        rows = FRAMEWORKS[framework].flags(command)
        assert not [flag for flag in flags.split() if rows[flag].missing], command
