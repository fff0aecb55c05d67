"""What is wrong with a recipe is said in words: which key, what was given, what to write."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from burnish.cli import app
from burnish.config import ConfigError, RLConfig, load_config
from burnish.config.equivalents import advice_on


def problems(recipe, *overrides, job=None) -> list[str]:
    """The lines of the error that loading must raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides, job=job)
    first, *lines = str(caught.value).split("\n")
    assert first.endswith(f": {len(lines)} problem{'s' if len(lines) > 1 else ''}"), first
    return [line.removeprefix("  - ") for line in lines]


def only_problem(recipe, *overrides) -> str:
    (line,) = problems(recipe, *overrides)
    return line


def test_the_recipes_that_the_tests_break_are_valid(recipes):
    for job, recipe in recipes.items():
        assert load_config(recipe).job == job


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trian.lr=1", "trian: unknown key 'trian' (nearest: train)"),
        ("train.lrr=1", "train.lrr: unknown key 'lrr' (nearest: lr)"),
        ("model.lora.rank=8", "model.lora.rank: unknown key 'rank' (nearest: lora_rank)"),
        # what other trainers call it
        ("train.learning_rate=1", "train.learning_rate: unknown key 'learning_rate' (nearest: lr)"),
        (
            "rollout.num_generations=4",
            "unknown key 'num_generations' (nearest: n_samples_per_prompt)",
        ),
        # flags and features of other frameworks
        (
            "train.ring_attn_size=2",
            "'ring_attn_size'. OpenRLHF's ring_attn_size is train.engine.sequence_parallel_size",
        ),
        (
            "use_ms=true",
            "OpenRLHF's use_ms has no equivalent; remove it. Download the model and data with",
        ),
        ("cluster.pipeline_parallel_size=2", "Shard all layers with train.engine.sharding=full"),
        ("rollout.engine.kind=sglang", "Use rollout.engine.kind=vllm."),
        # the right key in the wrong place
        ("lr=1", "lr: unknown key 'lr' (did you mean critic.lr or train.lr?)"),
        ("train.clip_high=1", "(did you mean algorithm.policy_loss.clip_high?)"),
        ("train.run_dir=x", "(did you mean run_dir at the top level?)"),
        ("eval_delay_steps=3", "(did you mean eval.delay_steps?)"),
        ("reference.movings=4", "unknown key 'movings' (nearest: moving)"),
        ("tf32=true", "TRL's tf32 has no equivalent; remove it: fp32 is computed in fp32."),
    ],
)
def test_unknown_key_error_names_the_nearest_key(rl_recipe, override, said):
    assert said in "\n".join(problems(rl_recipe, override))


def test_unknown_key_error_lists_the_keys_if_none_is_near(rl_recipe):
    said = only_problem(rl_recipe, "observe.zzz=1")
    assert said.endswith(
        "known here: log_every_n_steps, mlflow, record_rollouts, samples_per_step, tensorboard, "
        "wandb"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lr=fast", "train.lr: must be a number, got 'fast' (lr: Peak learning rate.)"),
        ("train.lr=", "train.lr: must be a number, got null"),
        ("max_steps=1.5", "max_steps: must be a whole number, or null, got 1.5"),
        ("train.gradient_checkpointing=2", "must be true or false, got 2"),
        ("rollout.stop=END", "rollout.stop: must be a list (text each), got 'END'"),
        ("rollout=3", "rollout: must be a mapping (keys: generate_max_len, "),
        ("model=gpt2", "model: must be a mapping (keys: path, gguf_file, "),
        ("rewards=[math]", "rewards[0]: must be a mapping with kind: function | model | "),
        ("train.max_grad_norm=-1", "train.max_grad_norm: must be greater than 0, got -1"),
        ("rollout.top_p=1.5", "rollout.top_p: must be at most 1, got 1.5"),
        ("train.lr=.inf", "train.lr: must be a finite number, got inf"),
        (
            "precision.dtype=bf61",
            "precision.dtype: must be one of fp32, bf16, fp16 (nearest: bf16)",
        ),
        ("data.sources=[]", "data.sources: must have 1 or more items, got []"),
        ("train.adam_betas=[0.9, 0.9, 0.9]", "train.adam_betas: must have at most 2 items"),
        (
            "rollout.engine.kind=vlm",
            "rollout.engine: unknown kind 'vlm' (nearest: vllm); kinds: local, vllm, vllm_server",
        ),
        (
            "rollout.engine={kind: vllm, engine_args: {dtype: bfloat16}}",
            "engine_args.dtype is set by precision.rollout_dtype; use that key",
        ),
        (
            "rollout.engine={kind: vllm, engine_args: {quantization: fp8}}",
            "engine_args.quantization cannot be passed to vLLM: it computes in another number",
        ),
        (
            "rollout.engine={kind: vllm, engine_args: {max_num_batched_token: 512}}",
            "max_num_batched_token is not an argument of vLLM (nearest: max_num_batched_tokens)",
        ),
        (
            "rollout.engine={kind: vllm_server, urls: ['127.0.0.1:8000']}",
            "urls[0] is '127.0.0.1:8000', which starts with neither http:// nor https://",
        ),
        (
            "rollout.engine={kind: vllm_server, urls: ['http://localhost:8000/v1']}",
            "urls[0] is 'http://localhost:8000/v1', but must be the base address of a server",
        ),
        (
            "rollout.engine={kind: vllm_server, urls: ['http://[::1]:80', 'http://[::1]:80/']}",
            "urls contains the same URL twice",
        ),
        (
            "rollout.engine={kind: vllm_server, urls: ['http://gpu-7:8000']}",
            "weights_folder is not set, and gpu-7 may be another machine",
        ),
        (
            "rollout.engine={kind: vllm_server, urls: ['http://localhost:1'], token_env: a-b}",
            "token_env must be the name of an environment variable",
        ),
    ],
)
def test_wrong_value_error_gives_the_accepted_values(rl_recipe, override, said):
    assert said in only_problem(rl_recipe, override)


@pytest.mark.parametrize("value", ["true", "false"])
def test_true_is_not_read_as_the_number_1(rl_recipe, value):
    said = only_problem(rl_recipe, f"train.lr={value}")
    assert said.startswith(f"train.lr: must be a number, got '{value}'")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('rollout.stop=["x", ""]', "rollout.stop[1]: must not be empty"),
        ("rollout.stop_token_ids=[-5]", "rollout.stop_token_ids[0]: must be at least 0"),
    ],
)
def test_invalid_stop_sequences_are_rejected(rl_recipe, override, said):
    """An empty text is in every response."""
    assert only_problem(rl_recipe, override).startswith(said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("seeed=1", "seeed: unknown key"),
        ("nonsense={a: [1]}", "nonsense: unknown key"),
        ("rollout.temprature=0.5", "rollout.temprature: unknown key"),
        ("train.lr=abc", "train.lr: must be a number"),
        ("train.lr=true", "train.lr: must be a number"),
        ("rewards=[{kind: math, wieght: 2}]", "rewards[0].wieght: unknown key"),
        ("checkpoint.keep_last=-1", "checkpoint.keep_last: must be at least"),
    ],
)
def test_cross_field_rules_are_reported_in_addition_to_a_wrong_key(rl_recipe, wrong, said):
    """grpo has no critic, and cannot compare a single sample."""
    rules = ("rollout.n_samples_per_prompt=1", "rollout.rollout_batch_size=16")
    told = problems(rl_recipe, wrong, "critic={lr: 1e-4}", "algorithm.advantage=grpo", *rules)
    assert told[0].startswith(said)
    assert [line.partition("critic is set")[1] for line in told].count("critic is set") == 1
    assert any("n_samples_per_prompt=1" in line for line in told)


def test_cross_field_rules_about_a_wrong_key_are_not_reported(rl_recipe):
    """Without its value, the batch would not add up: that is no second mistake."""
    assert "train_batch_size: must be" in only_problem(rl_recipe, "train.train_batch_size=abc")


def test_a_misspelled_key_counts_as_the_nearest_key_for_rules(rl_recipe):
    """learning_rate is what others call lr."""
    assert "learning_rate" in only_problem(rl_recipe, "train.learning_rate=1e-3")
    told = problems(rl_recipe, "rollout.n_sampels_per_prompt=1", "algorithm.advantage=grpo")
    assert len(told) == 1, "the rule about one sample would name the misspelled key"


def test_unknown_kind_error_names_the_nearest_and_all_kinds(rl_recipe):
    assert only_problem(rl_recipe, "algorithm.advantage=grp") == (
        "algorithm.advantage: unknown kind 'grp' (nearest: grpo); kinds: grpo, dr_grpo, rloo, opo, "
        "gae, reinforce_pp, reinforce_pp_baseline, on_policy_distill"
    )


def test_options_of_a_variant_without_its_kind_ask_for_the_kind(rl_recipe):
    said = only_problem(rl_recipe, "algorithm.advantage.eps=1")
    assert said.startswith("algorithm.advantage: kind is not set (eps can only be set together")
    assert "one of: grpo, dr_grpo" in said


def test_options_of_an_unselected_variant_cannot_be_set(rl_recipe):
    said = only_problem(rl_recipe, "algorithm.advantage=gae", "algorithm.advantage.eps=1")
    assert said == (
        "algorithm.advantage.eps: unknown key 'eps' (a key of kind grpo, dr_grpo, rloo, opo); "
        "known here under kind gae: "
        "discount, gamma, kind, lam, whiten"
    )


def test_an_error_in_a_list_item_is_reported_once(rl_recipe):
    """pydantic also says that the list is too short, because the bad item does not count."""
    assert only_problem(rl_recipe, "data.sources=[{kind: dataset, path: x, splt: y}]") == (
        "data.sources[0].splt: unknown key 'splt' (nearest: split)"
    )


def test_a_key_named_like_a_kind_keeps_its_place_in_the_path(rl_recipe):
    """``function`` is a kind of reward and also a key of it."""
    said = only_problem(rl_recipe, "rewards=[{kind: function, function: [3]}]")
    assert said.startswith("rewards[0].function: must be text")


def test_missing_required_key_error_has_its_help(rl_recipe):
    del rl_recipe["data"]
    assert only_problem(rl_recipe) == ("data: is required and not set (data: Training prompts.)")


def test_the_length_of_a_run_is_set_once(rl_recipe):
    said = only_problem(rl_recipe, "max_epochs=2")
    assert "max_steps=3" in said and "max_epochs=2 both set the length" in said
    del rl_recipe["max_steps"]
    assert "max_steps is not set" in only_problem(rl_recipe)


def test_all_problems_are_in_one_message(rl_recipe):
    """A missing and an unknown key, a wrong type, and a broken rule in a part that is sound."""
    del rl_recipe["data"]
    said = problems(rl_recipe, "trian.lr=1", "train.lr=fast", "rollout.temperature=0")
    assert [line.split(":")[0] for line in said] == ["data", "train.lr", "trian", "rollout"]


def test_all_broken_rules_are_in_one_message(rl_recipe):
    said = problems(rl_recipe, "train.train_batch_size=24", "rollout.temperature=0", "model.path=x")
    assert [line.split(":")[0] for line in said] == ["recipe", "model", "rollout"]


def test_indivisible_batch_size_error_names_the_nearest_sizes(rl_recipe):
    """8 prompts x 8 samples = 64; B = 24 does not divide it: the nearest divisors are 16 and 32;
    24 / gcd(24, 8) = 3 prompts fill complete steps: 6 or 9."""
    said = only_problem(rl_recipe, "train.train_batch_size=24")
    assert "= 64 samples, which train_batch_size=24 does not divide" in said
    assert "nearest train_batch_size: 16 or 32, nearest rollout_batch_size: 6 or 9" in said


def test_the_nearest_train_batch_size_also_fits_the_micro_batches(rl_recipe):
    """64 samples, b = 4: divisors of 64 next to 20 that 4 divides are 16 and 32."""
    sizes = ("train.train_batch_size=20", "train.micro_train_batch_size=4")
    assert "nearest train_batch_size: 16 or 32" in only_problem(rl_recipe, *sizes)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("rollout.n_samples_per_prompt=1", "train.train_batch_size=8"),
            "compares the samples of one prompt",
        ),
        (("algorithm.kl.adaptive.target=0.1",), "set init_kl_coef"),
        (("critic={}",), "remove critic or use gae"),
        (("reference={}",), "does not use it"),
        (("checkpoint.best_metric=eval/pass@1",), "is measured by eval, which is not set"),
        (("checkpoint.best_metric=eval/loss", "eval.data={sources: [x]}"), "is never measured"),
        (
            ("checkpoint.best_metric=eval/pass@4", "eval.data={sources: [x]}"),
            "(nearest: eval/pass@1); use a metric of this job: eval/",
        ),
        (("checkpoint.best_metric=reward/functions",), "(nearest: reward/function)"),
        (("checkpoint.best_metric=reward/shaping", "checkpoint.best_mode=max"), "reward/mean"),
        (("checkpoint.best_metric=critic/loss",), "critic/loss is never measured"),
        (("checkpoint.best_metric=loss",), "rollout/..."),
        (("shaping.overlong.buffer_len=256",), "must be below rollout.generate_max_len=256"),
        (
            ("algorithm.policy_loss=reinforce", "train.train_batch_size=32"),
            "one optimizer step per rollout",
        ),
        (
            ("train.max_tokens_per_micro_batch=512", "train.micro_train_batch_size=8"),
            "have no effect",
        ),
    ],
)
def test_cross_field_rule_errors_give_a_fix(rl_recipe, overrides, said):
    assert said in " ".join(only_problem(rl_recipe, *overrides).split())


def test_recipe_for_another_job_error_gives_the_right_command(tmp_path, recipes):
    path = tmp_path / "sft.yaml"
    path.write_text("job: sft\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, job="rl")
    assert "for the job 'sft', not 'rl'" in str(caught.value)
    assert f"run 'burnish sft {path}'" in str(caught.value)


def test_unknown_job_error_names_the_nearest_job(rl_recipe):
    with pytest.raises(ConfigError, match=r"unknown job 'evalute' \(nearest: evaluate\)"):
        load_config({**rl_recipe, "job": "evalute"})


def test_recipe_without_a_job_is_an_error(rl_recipe):
    del rl_recipe["job"]
    with pytest.raises(ConfigError, match="does not set job"):
        load_config(rl_recipe)
    assert isinstance(load_config(rl_recipe, job="rl"), RLConfig)


def test_missing_recipe_error_names_the_nearest_file(tmp_path):
    (tmp_path / "recipe.yaml").write_text("job: rl\n")
    with pytest.raises(ConfigError, match=r"does not exist \(nearest: .*/recipe.yaml\)"):
        load_config(tmp_path / "recepi.yaml")
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("job: [rl\n", "cannot be read as YAML"),
        ("- rl\n", "must be a mapping of keys to values, but it is a list"),
        ("", "but it is empty"),
        ("job: rl\nseed: 1\nseed: 2\n", "the key 'seed' occurs twice"),
        (b"job: \xff\n", "cannot be read as YAML"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_rejected(tmp_path: Path, text, said):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        load_config(path)


@pytest.mark.parametrize(
    ("job", "value", "replacement"),
    [("rl", "group_norm", "grpo"), ("rl", "reinforce", "reinforce_pp"), ("rl", "adam", "adamw")],
)
def test_a_value_of_another_framework_names_its_replacement(
    job: str, value: str, replacement: str
) -> None:
    assert f" is {replacement} here" in advice_on(f"={value}", job)


@pytest.mark.parametrize(
    ("words", "replacement"),
    [
        (["train_ppo_ray", "--pretrain", "m"], "burnish rl"),
        (["openrlhf.cli.train_sft"], "burnish sft"),
        (["dpo"], "burnish preference"),
        (["rl", "--pretrain", "m"], "model.path"),
        (["preference", "--beta=0.1"], "loss.beta"),
        (["rl", "train.sh"], "YAML"),
    ],
)
def test_commands_and_flags_of_other_frameworks_name_their_replacement(
    words: list[str], replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text("python -m openrlhf.cli.train_ppo_ray \\\n  --pretrain m\n")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert replacement in result.stderr and "docs/compare.md" in result.stderr


@pytest.mark.parametrize(
    "fault",
    [
        *({"prompt_max_len": "abc"}, {"prompt_max_len": -1}, {"mix": "x"}, {"mixx": "size"}),
        *({"nokey": 1}, {"held_out": "x"}, {"sources": []}, {"sources": [{"kind": "no"}]}),
        {"sources": [{"path": "a.jsonl", "weight": "heavy"}]},
    ],
)
def test_a_fault_in_a_named_section_is_that_of_a_section(recipes, fault):
    """The key, the type and the help are those of the same fault in a section without a name."""
    recipe, data = recipes["rl"], {"sources": ["a.jsonl"]}
    alone = problems({**recipe, "eval": {"data": {**data, **fault}}})
    named = problems({**recipe, "eval": {"data": data, "sets": {"x": {**data, **fault}}}})
    assert alone and named == [line.replace("eval.data", "eval.sets.x") for line in alone]


@pytest.mark.parametrize(
    ("mcp", "path"),
    [
        ({"files": {"command": 3}}, "files.command"),
        ({"files": {"command": ["x"], "env": {"HOME": 3}}}, "files.env.HOME"),
        ({"files": {"command": ["x"], "toolz": ["a"]}}, "files.toolz"),
    ],
)
def test_a_fault_of_a_named_server_has_its_place(recipes, mcp, path):
    recipe = recipes["rl"]
    episodes = {"mcp": mcp, "max_tokens": 4096}
    (line,) = problems({**recipe, "rollout": {**recipe["rollout"], "episodes": episodes}})
    assert line.startswith(f"rollout.episodes.mcp.{path}: ")


def test_rewards_of_an_environment_cannot_be_scored_from_rows(recipes):
    score = {**recipes["generate"], "job": "score", "rewards": [{"kind": "episode"}]}
    assert only_problem(score).startswith("recipe: kind=episode ")
