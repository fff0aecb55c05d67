# house: ok the plans of the recipes, in one table of cases
"""Plans of complete recipes: the nine-node recipe, this machine, invalid input, rejected runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config import ConfigError, load_config
from burnish.config.load import changed_config
from burnish.config.sources import FileSource
from burnish.plan import command, launch, role_base
from burnish.plan.activations import TraceError
from burnish.plan.command import PlanOptions, plan_text
from burnish.plan.faster import faster
from burnish.plan.fit import fewer_ranks, fit, splits
from burnish.plan.hardware import load_tables, parse_cluster, this_machine
from burnish.plan.launch import DoesNotFitError, check_memory
from burnish.plan.memory_plan import PHASES
from burnish.plan.predict import make_plan
from burnish.plan.rollout_role import Demand, bytes_per_token
from burnish.plan.shapes import PlanError, shape_of
from burnish.plan.time import estimate
from burnish.rollout.local.memory import local_cache

ROOT = Path(__file__).parents[2]
NINE = ROOT / "recipes" / "llama3_70b_grpo_9x8.yaml"
TINY = {
    "job": "rl",
    "max_steps": 1,
    "model": {"scratch": {}},
    "data": {"sources": ["prompts.jsonl"], "prompt_max_len": 16},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 8},
    "train": {"train_batch_size": 16},
}


def nine(*overrides, assume=(), cluster="9x8xA800-80GB"):
    return make_plan(load_config(NINE, overrides), parse_cluster(cluster), assume=assume)


def peaks_of(plan, place):
    return [p for p in plan.peaks if p.where == "device" and p.place.endswith(place)]


# ---- the nine nodes --------------------------------------------------------------------------


def test_the_nine_node_recipe_fits_with_a_wide_margin():
    """By rank of the policy: 70.55e9 / 32 x 2 B = 4.41 GB of weights; sums, masters and moments on
    the host. At its worst it takes about a third of 84.9 GB: 26.6 GB."""
    plan = nine()
    assert plan.fits and not plan.problems
    worst = max(peaks_of(plan, "policy"), key=lambda p: p.bytes)
    assert worst.phase == "forward/backward"
    assert worst.bytes == pytest.approx(26.6e9, rel=0.05)  # a new library may move activations
    assert worst.margin / worst.limit > 0.6
    weights = [r for r in plan.rows if r.role == "policy x32" and r.phase == "step"]
    assert sum(r.bytes for r in weights if r.item == "parameters" and "32" in r.how) == (
        pytest.approx(70_553_706_496 / 32 * 2)
    )
    first, *_ = plan.to_text().splitlines()
    assert first.startswith("verdict: fits; ") and first.endswith("free")


def test_gathers_that_are_never_released_do_not_fit():
    """DeepSpeed 0.16.0 to 0.16.7: all 70.55e9 x 2 B = 141 GB are replicated on every GPU."""
    plan = nine(assume=["unreleased-gathers"])
    assert not plan.fits and plan.cannot_run
    worst = max(peaks_of(plan, "policy"), key=lambda p: p.bytes)
    assert worst.bytes > 70_553_706_496 * 2
    assert max(p.bytes for p in peaks_of(plan, "reference")) < 30e9  # has no checkpointing


def test_too_few_gpus_is_an_error_with_both_counts():
    with pytest.raises(PlanError, match="needs 72 GPUs"):
        nine(cluster="8x8xA800-80GB")
    with pytest.raises(PlanError, match="worker's GPUs"):
        nine(cluster="18x4xA800-80GB")
    with pytest.raises(PlanError, match=r"needs? 72 GPUs.*--cluster 9x8x"):
        make_plan(load_config(NINE), this_machine())


def test_host_memory_is_checked_on_the_fullest_node():
    """8 ranks x 70.55e9 / 32 x 20 B (masters, moments, sums, gradient of the step) = 353 GB, with
    processes. Where weights go through Ray's object store 70.55e9 x 2 B = 141 GB more."""
    plan = nine()
    state = 8 * 70_553_706_496 / 32 * 20
    host = plan.peak("host")
    assert state < host.bytes < 2 * state
    stored = nine("sync.kind=auto").peak("host").bytes
    assert stored - host.bytes == pytest.approx(70_553_706_496 * 2, rel=0.01)
    small = load_config(NINE)
    tight = make_plan(small, parse_cluster("9x8xA800-80GB", host_gb=300))
    assert not tight.fits and not tight.peak("host").fits


def test_vllm_servers_take_no_memory_but_a_file_of_weights():
    """1 GiB in shared memory, and at most the largest weight more (53 x 96 x 4 B = 20 kB)."""
    servers = "rollout.engine={kind: vllm_server, urls: ['http://localhost:8000']}"
    plan = make_plan(load_config(TINY, [servers]), parse_cluster("1x1xA800-80GB"))
    rows = [r for r in plan.rows if r.role == "rollout" and r.bytes]
    assert {(r.phase, r.where) for r in rows} == {("sync", "host")}
    assert (1 << 30) < sum(r.bytes for r in rows) < (1 << 30) + 100_000
    assert "use their own memory" in plan.to_text()
    shared = load_config(TINY, [servers, "rollout.engine.weights_folder=/mnt/weights"])
    assert not any(r.role == "rollout" and r.bytes for r in make_plan(shared, this_machine()).rows)


def test_vllm_servers_take_no_gpu_of_the_ranks_on_ray():
    """4 GPUs, all of the policy. The controller's file is on the node of the ranks. In an
    asynchronous run it may exist in every phase, and the servers' time overlaps with
    training: a step takes less than the sum of all phases."""
    servers = "rollout.engine={kind: vllm_server, urls: ['http://localhost:8000']}"
    cluster = {"runtime": "ray", "policy_ranks": 4, "gpus_per_worker": 1}
    hardware = parse_cluster("2x2xA800-80GB")
    config = load_config({**TINY, "cluster": cluster}, [servers])
    plan = make_plan(config, hardware)
    assert plan.fits and {p.place for p in plan.peaks if p.where == "device"} == {"4 x policy"}
    host = {p.phase: p.bytes for p in plan.peaks if p.where == "host"}
    assert host["sync"] - host["step"] == pytest.approx(1 << 30, rel=0.01)
    assert {p.place for p in plan.peaks if p.where == "host"} == {"a node with 2 policy+1 rollout"}
    time = estimate(config, hardware)
    assert set(time.idle) == {"policy", "rollout"}
    (sync,) = (part for part in time.parts if part.phase == "sync")
    assert "host memory, written to files in memory" in sync.how
    bound = ["rollout.asynchronous.max_staleness=1", "algorithm.correction={}"]
    ahead = load_config({**TINY, "cluster": cluster}, [servers, *bound])
    always = {p.phase: p.bytes for p in make_plan(ahead, hardware).peaks if p.where == "host"}
    assert always["step"] - host["step"] == pytest.approx(1 << 30, rel=0.01)
    sides = estimate(ahead, hardware)
    assert sides.seconds < sides.work_s and splits(ahead, hardware) == []


def test_a_plan_as_json_has_its_verdict_and_every_row():
    plan = nine()
    tree = json.loads(plan.to_json())
    assert tree["fits"] is True and tree["margin_bytes"] > 0
    assert tree["problems"] == list(plan.problems)
    assert [row["bytes"] for row in tree["rows"]] == [row.bytes for row in plan.rows]
    assert {row["phase"] for row in tree["rows"]} == set(PHASES)


def test_every_number_of_the_table_has_its_calculation():
    text = nine().to_text(details=True)
    assert "fp32 masters: 70.554e9 / 32 x 4 B" in text
    assert "train_batch_size (B)                128" in text


# ---- other recipes ---------------------------------------------------------------------------


RECIPES = sorted(set((ROOT / "recipes").glob("*.yaml")) - {ROOT / "recipes" / "tiny_score.yaml"})


@pytest.fixture
def no_suggestions(monkeypatch):
    """Leave out the settings that would save time: they plan many changed recipes."""
    monkeypatch.setattr(command, "faster", lambda *_, **__: [])


@pytest.mark.usefixtures("no_suggestions")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_without_options(recipe, monkeypatch, tmp_path):
    """On the cluster of the recipe, and before the preceding recipe of a chain has run."""
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe)
    text, fits = plan_text(config, PlanOptions())
    assert fits and "samples/s" in text
    assert config.cluster.hardware is None or config.cluster.hardware.split("x")[-1] in text


@pytest.mark.usefixtures("no_suggestions")
def test_cluster_option_overrides_the_cluster_of_the_recipe():
    config = load_config(ROOT / "recipes" / "smollm2_chain_sum_grpo.yaml")
    text, _ = plan_text(config, PlanOptions(cluster="RTX4090-24GB"))
    assert "1x1xRTX4090-24GB" in text
    named = load_config(NINE)
    assert named.cluster.hardware == "9x8xA800-80GB"
    assert "10x8xH100-80GB" in plan_text(named, PlanOptions(cluster="10x8xH100-80GB"))[0]


def test_the_masks_of_a_rollout_are_noted_with_their_largest_size():
    """4 prompts x 4 samples of 16 + 8 tokens, with 20 ids of 4 bytes: 30,720 bytes."""
    masked = ["rollout.top_k=20", "algorithm.correction={}"]
    plain, noted = (make_plan(load_config(TINY, o), this_machine()).to_text() for o in ([], masked))
    assert "take up to 3.07e-05 GB of host memory: 16 rows x 24 tokens x 20 ids" in noted
    assert "sampling masks" not in plain


def test_table_contains_the_scratch_model_of_the_first_recipe():
    made = shape_of(load_config(ROOT / "recipes" / "tiny_1_sft.yaml").model)
    listed = shape_of(load_config(ROOT / "recipes" / "tiny_grpo.yaml").model)
    assert listed.units == made.units and listed.parameters == made.parameters


def test_cluster_of_the_recipe_must_have_the_right_form_and_a_known_gpu():
    with pytest.raises(ConfigError, match="hardware='8 GPUs'"):
        load_config(NINE, ["cluster.hardware=8 GPUs"])
    with pytest.raises(PlanError, match="GPU 'Z9'"):
        plan_text(load_config(NINE, ["cluster.hardware=9x8xZ9"]), PlanOptions())


def test_write_needs_fit_and_a_writable_file(tmp_path):
    config = load_config(ROOT / "recipes" / "smollm2_chain_sum_grpo.yaml")
    with pytest.raises(PlanError, match="given; add"):
        plan_text(config, PlanOptions(write=tmp_path / "fits.yaml"))
    with pytest.raises(PlanError, match="folder that"):
        plan_text(config, PlanOptions(fit=True, write=tmp_path / "no" / "fits.yaml"))
    with pytest.raises(PlanError, match="is a folder"):
        plan_text(config, PlanOptions(fit=True, write=tmp_path))


@pytest.mark.usefixtures("no_suggestions")
def test_host_memory_and_network_options_apply_to_this_machine():
    config = load_config(ROOT / "recipes" / "smollm2_chain_sum_grpo.yaml")
    text, fits = plan_text(config, PlanOptions(host_gb=0.5))
    assert not fits and "on this machine, 0.5 GB" in text


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_recipes_for_one_node_fit_one_node(name):
    config = load_config(ROOT / "recipes" / f"llama3_8b_{name}_8gpu.yaml")
    assert make_plan(config, parse_cluster("8xA100-80GB")).fits


def test_sequence_parallelism_halves_activations_but_not_state():
    base = {**TINY, "cluster": {"runtime": "ray", "policy_ranks": 2, "gpus_per_worker": 1}}
    base["train"] = {**TINY["train"], "layout": "padded"}
    spread = {**base["train"], "engine": {"kind": "torch", "sequence_parallel_size": 2}}
    plans = [
        make_plan(load_config({**base, "train": train}), parse_cluster("2xA100-80GB"))
        for train in (base["train"], spread)
    ]
    rows = [
        {
            r.item: r.bytes
            for r in p.rows
            if r.role.startswith("policy") and r.phase == "forward/backward"
        }
        for p in plans
    ]
    assert rows[1]["parameters"] == rows[0]["parameters"]
    # the batch is shared by half as many, so each computes as many rows twice as short
    assert rows[1]["activations"] <= 1.1 * rows[0]["activations"]


def test_a_checkpoint_contains_a_reference_that_follows_the_policy():
    """At 4 bytes per parameter: a third of the policy's masters and two moments."""
    tree = {**TINY, "algorithm": {"kl": {"init_kl_coef": 0.1}}}
    moving = {**tree, "reference": {"moving": {"every_n_steps": 4}}}
    frozen, follows = (
        make_plan(load_config(c), parse_cluster("1xA100-80GB")).disk_per_checkpoint
        for c in (tree, moving)
    )
    size = {"fp32": 4, "bf16": 2}[load_config(tree).precision.dtype]
    assert follows - frozen == pytest.approx(frozen * size / 12)


def test_tensor_parallel_plan_needs_no_guess():
    tree = {**TINY, "cluster": {"runtime": "ray", "policy_ranks": 2, "gpus_per_worker": 1}}
    engine = {"kind": "torch", "tensor_parallel_size": 2}
    parallel = {**tree, "train": {**TINY["train"], "engine": engine}}
    plans = [make_plan(load_config(c), parse_cluster("2xA100-80GB")) for c in (tree, parallel)]
    whole, part = (
        next(
            r.bytes
            for r in p.rows
            if (r.role, r.phase, r.item) == ("policy x2", "step", "parameters")
        )
        for p in plans
    )
    assert 0.5 * whole < part < 0.75 * whole, "embeddings and norms are on both"
    assert plans[1].guessed == 0 and plans[0].disk_per_checkpoint == plans[1].disk_per_checkpoint
    assert plans[0].models == plans[1].models


def test_colocated_roles_take_turns_and_a_sleeping_vllm_is_not_counted():
    """With kept caches, the peaks of all processes add up, except vLLM's."""
    stays = ["cluster.offload_between_phases=[]", "rollout.engine.gpu_memory_utilization=0.45"]
    config = load_config(ROOT / "recipes" / "llama3_8b_grpo_8gpu.yaml", stays)
    hardware = parse_cluster("8xA100-80GB")
    turns, kept = (
        {p.phase: p.bytes for p in make_plan(config, hardware, assume=assume).peaks[:7]}
        for assume in ([], ["kept-cache"])
    )
    awake = 0.45 * 79.1 * 2**30
    assert kept["rollout"] - kept["forward/backward"] == pytest.approx(awake, rel=0.05)
    assert max(turns.values()) < max(kept.values())
    assert turns["forward/backward"] < turns["rollout"] < turns["forward/backward"] + awake


def test_on_cpus_all_processes_share_the_memory_of_the_machine():
    more = {"runtime": "ray", "policy_ranks": 2, "rollout_workers": 2}
    one = make_plan(load_config(TINY), this_machine())
    four = make_plan(load_config({**TINY, "cluster": more}), this_machine())
    process = load_tables().overhead["process_gb"] * 1e9
    assert four.worst.bytes - one.worst.bytes == pytest.approx(
        3 * process, rel=0.1
    )  # and the second copies of tiny tensors
    vllm = {
        "cluster": {"runtime": "ray"},
        "rollout": TINY["rollout"] | {"engine": {"kind": "vllm"}},
    }
    rows = make_plan(load_config(TINY | vllm), this_machine()).rows
    found = {row.bytes for row in rows if row.how == "a Python process with vLLM"}
    assert found == {load_tables().overhead["vllm_process_gb"] * 1e9}


def test_local_cache_is_planned_as_the_engine_grows_it():
    """4 slots of 60 + 8 positions, in blocks of 64; 2 layers x 2 x 2 heads x 16 x 4 B = 512 B a
    token, and one of four tensors twice while it grows. With graphs, 3 slots are 4."""
    from burnish.config.model import ModelConfig
    from burnish.rollout.local.config import LocalEngine

    shape = shape_of(ModelConfig.model_validate({"scratch": {}}))
    assert bytes_per_token(shape, "fp32") == 512
    for max_slots, graphs in ((4, False), (3, True)):
        engine = LocalEngine(max_batch_size=max_slots)
        item, slots = local_cache(shape, engine, Demand(9, 60, 8), "fp32", graphs=graphs)
        assert slots == 4 and item.bytes == 4 * 128 * 512 * 1.25


def test_ranks_length_and_checkpointing_change_the_peak_in_the_right_direction():
    base = max(p.bytes for p in peaks_of(nine(), "policy"))
    assert max(p.bytes for p in peaks_of(nine("rollout.generate_max_len=4096"), "policy")) > base
    without = nine("train.gradient_checkpointing=false")
    assert max(p.bytes for p in peaks_of(without, "policy")) > 2 * base


# ---- what cannot be traced -------------------------------------------------------------------


def test_model_that_cannot_be_traced_is_planned_by_formula_with_a_margin(monkeypatch):
    traced = make_plan(load_config(TINY), this_machine())

    def fail(*_):
        raise TraceError("DataDependentOutputException: aten._local_scalar_dense")

    monkeypatch.setattr(role_base, "measure", fail)
    plan = make_plan(load_config(TINY), this_machine())
    assert plan.guessed > 0 and traced.guessed == 0
    assert "could not be traced on fake tensors" in plan.to_text()
    assert "with 30% added" in plan.to_text()
    assert plan.worst.bytes > traced.worst.bytes * 0.9


@pytest.mark.parametrize("overrides", [(), ("train.gradient_checkpointing=true",)])
def test_formula_is_within_a_factor_of_two_of_the_trace(monkeypatch, overrides):
    """Within a factor of two of what is traced; the margin is for that."""
    config = load_config(ROOT / "recipes" / "smollm2_chain_sum_grpo.yaml", overrides)
    first = make_plan(config, this_machine())
    monkeypatch.setattr(role_base, "measure", lambda *_: (_ for _ in ()).throw(TraceError("x")))
    second = make_plan(config, this_machine())

    def activations(plan):
        items = [r for r in plan.rows if r.role == "policy" and r.phase == "forward/backward"]
        held = sum(r.bytes for r in items if r.item in ("activations", "logits/loss"))
        return held - plan.guessed

    assert 0.5 < activations(second) / activations(first) < 2


# ---- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8xB300", "GPU 'B300' is not known.*Known: A100-80GB"),
        ("8xA100", "choose from A100-80GB, A100-40GB"),
        ("4x8", "not of the form"),
        ("0x8xA800-80GB", "not of the form"),
        ("", "not of the form"),
        ("2x2x2xH100-80GB", "not of the form"),
    ],
)
def test_unknown_cluster_error_lists_the_known_gpus(text, message):
    with pytest.raises(PlanError, match=message):
        parse_cluster(text)


def test_model_without_a_config_error_lists_the_known_models(tmp_path):
    cases = {
        "nobody/nothing-9b": r"the sizes of the model nobody/nothing-9b are not known",
        str(tmp_path): r"model\.path: the model folder .* is empty",
    }
    for path, told in cases.items():
        with pytest.raises(PlanError, match=told):
            make_plan(load_config({**TINY, "model": {"path": path}}), this_machine())


def test_a_folder_with_only_a_config_is_sufficient(tmp_path, tiny_model):
    tiny_model.config.save_pretrained(tmp_path)
    plan = make_plan(load_config({**TINY, "model": {"path": str(tmp_path)}}), this_machine())
    assert f"{sum(p.numel() for p in tiny_model.parameters()):,} parameters" in plan.to_text()


def test_users_add_gpus_in_a_file(tmp_path):
    more = tmp_path / "gpus.yaml"
    fields = (
        "capability: 7.5, bf16_tflops: 1, fp32_tflops: 1, memory_gbs: 1, link_gbs: 1, pcie_gbs: 1"
    )
    more.write_text(
        f"gpus:\n  Z1-8GB: {{memory_gib: 7.5, {fields}}}\nefficiency: {{matmul: 0.3}}\n"
    )
    tables = load_tables(more)
    assert parse_cluster("2xZ1-8GB", tables=tables).limit == 7.5 * 2**30
    capabilities = [
        parse_cluster(name, tables=tables).kernels.capability for name in ("Z1-8GB", "V100-32GB")
    ]
    assert capabilities == [(7, 5), (7, 0)]
    assert tables.efficiency["matmul"] == 0.3
    for wrong in ("gpus: {X: {memory_gib: 1}}", "speed: {x: 1}", "overhead: {nccl: 1}", "[1", "3"):
        more.write_text(wrong)
        load_tables.cache_clear()
        with pytest.raises(PlanError, match=r"gpus\.yaml"):
            load_tables(more)
    with pytest.raises(PlanError, match=r"none\.yaml does not exist"):
        load_tables(tmp_path / "none.yaml")


def test_unknown_assumption_error_lists_the_known_ones():
    with pytest.raises(PlanError, match="unreleased-gathers"):
        nine(assume=["good-luck"])


# ---- fit and time ----------------------------------------------------------------------------


def test_fit_proposes_recipes_that_fit_the_fastest_first():
    config = load_config(ROOT / "recipes" / "qwen25_7b_grpo_lora_1gpu.yaml")
    hardware = parse_cluster("A100-80GB")
    found = fit(config, hardware)
    assert found.proposals
    assert all(make_plan(p.config, hardware).fits for p in found.proposals)
    times = [p.seconds for p in found.proposals]
    assert times == sorted(times)
    again = load_config(config.model_dump(mode="json"), found.proposals[0].overrides)
    assert again == found.proposals[0].config and make_plan(again, hardware).fits


def test_if_nothing_fits_the_smallest_cluster_is_reported():
    """Masters and moments of 70e9 parameters: 1.1 TB do not go into 8 x 79 GiB with offload to a
    host of 100 GB."""
    recipe = {
        **TINY,
        "model": {"path": "meta-llama/Meta-Llama-3-8B"},
        "precision": {"dtype": "bf16"},
        "cluster": {"runtime": "ray", "policy_ranks": 2, "gpus_per_worker": 1},
        "train": {
            "engine": {"kind": "deepspeed", "zero_stage": 3, "zero_init": True},
            "train_batch_size": 8,
            "micro_train_batch_size": 1,
        },
        "rollout": {**TINY["rollout"], "rollout_batch_size": 2, "engine": {"kind": "vllm"}},
    }
    found = fit(load_config(recipe), parse_cluster("1x2xRTX4090-24GB", host_gb=64))
    assert not found.proposals
    assert found.smallest is None or "xRTX4090-24GB, with cluster.policy_ranks=" in found.smallest


# ---- the command and the start of a run ------------------------------------------------------


def test_the_command_prints_plan_and_time_and_exits_with_the_verdict(tmp_path):
    run = CliRunner().invoke
    good = run(app, ["plan", str(NINE), "--cluster", "9x8xA800-80GB"])
    assert good.exit_code == 0 and "verdict: fits" in good.stdout and "samples/s" in good.stdout
    bad = run(
        app,
        [
            "plan",
            str(NINE),
            "--cluster",
            "9x8xA800-80GB",
            "--assume",
            "unreleased-gathers",
            "--json",
        ],
    )
    assert bad.exit_code == 4 and json.loads(bad.stdout)["fits"] is False
    wrong = run(app, ["plan", str(NINE), "--cluster", "9x8xA9"])
    assert wrong.exit_code == 2 and "is not known" in wrong.stderr


def test_fit_writes_the_first_proposal_as_a_recipe(tmp_path):
    recipe, out = tmp_path / "r.yaml", tmp_path / "fits.yaml"
    recipe.write_text(json.dumps(TINY))
    options = ["--fit", "--write", str(out), "--cluster", "A100-80GB"]
    result = CliRunner().invoke(app, ["plan", str(recipe), *options])
    assert result.exit_code == 0 and "settings tried" in result.stdout
    written = load_config(out)
    assert written.cluster.hardware == "A100-80GB", "the cluster on which it fits"
    assert plan_text(written, PlanOptions())[1]


def huge():
    return load_config({**TINY, "model": {"path": "meta-llama/Meta-Llama-3-70B"}})


def test_fit_halves_the_ranks_for_a_smaller_cluster_and_warns_once(caplog):
    tree = {**TINY, "model": {"scratch": {"hidden_size": 64}}, "algorithm": {"advantage": "gae"}}
    kl = {"init_kl_coef": 0.1, "placement": "reward", "estimator": "k3"}
    tree["algorithm"]["kl"] = kl
    tree["cluster"] = {"runtime": "ray", "policy_ranks": 8, "critic_ranks": 8, "gpus_per_worker": 1}
    config = load_config(tree)
    warnings = [record.message for record in caplog.records]
    hardware = parse_cluster("2xA100-80GB")
    assert fewer_ranks(config, hardware) == ["cluster.policy_ranks=2", "cluster.critic_ranks=2"]
    assert fewer_ranks(config, parse_cluster("8xA100-80GB")) == []
    text, fits = plan_text(config, PlanOptions(fit=True, cluster="2xA100-80GB"))
    assert fits and "cluster.policy_ranks=2 cluster.critic_ranks=2" in text
    assert warnings and [record.message for record in caplog.records] == warnings


def test_run_that_does_not_fit_is_rejected_before_loading(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "label": "2"}\n' * 4, encoding="utf-8")
    data = huge().data.model_copy(update={"sources": (FileSource(path=str(rows)),)})
    config = huge().model_copy(update={"run_dir": str(tmp_path / "run"), "data": data})
    with pytest.raises(DoesNotFitError, match=r"does not fit(?s:.)*--force"):
        burnish.run(config)
    assert "verdict: does not fit" in (tmp_path / "run" / "plan.txt").read_text()
    with pytest.raises(DoesNotFitError):  # the folder of a refused run can be used again
        burnish.run(config)


def test_force_runs_despite_the_plan(tmp_path):
    plan = check_memory(huge(), tmp_path, force=True)
    assert plan is not None and not plan.fits


def test_planner_error_does_not_stop_a_run(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("error in the planner")

    monkeypatch.setattr(launch, "make_plan", fail)
    assert check_memory(load_config(TINY), tmp_path) is None
    assert "error in the planner" in (tmp_path / "plan.txt").read_text()


def test_the_margin_alone_does_not_reject_a_run(tmp_path, monkeypatch):
    """Over the limit by less than the margin that was added to the formula's activations."""
    plan = make_plan(load_config(TINY), this_machine())
    from dataclasses import replace

    short = replace(plan.peaks[0], bytes=plan.peaks[0].limit + 10)
    near = replace(plan, peaks=(short,), guessed=20.0)
    assert not near.fits and not near.cannot_run
    monkeypatch.setattr(launch, "make_plan", lambda *_, **__: near)
    assert check_memory(load_config(TINY), tmp_path) is near


def test_invisible_gpus_are_planned_only_if_the_recipe_sets_hardware(tmp_path):
    assert check_memory(load_config(NINE, ["cluster.hardware=null"]), tmp_path) is None
    assert "cannot detect the workers' GPUs" in (tmp_path / "plan.txt").read_text()
    plan = check_memory(load_config(NINE), tmp_path)
    assert plan is not None and plan.hardware == "9x8xA800-80GB"


def test_generate_is_planned_as_the_rollout_of_rl():
    """4 prompts x 4 samples of 16 + 8 tokens in both."""
    generate = {k: v for k, v in TINY.items() if k not in ("max_steps", "train")}
    cluster = parse_cluster("1x1xA800-80GB")
    ours = make_plan(load_config(generate | {"job": "generate"}), cluster)
    theirs = make_plan(load_config(TINY), cluster)

    def caches(plan):
        return {r.phase: r.bytes for r in plan.rows if r.item == "KV cache" and r.bytes}

    assert caches(ours) and caches(ours).items() <= caches(theirs).items()
    assert {r.role for r in ours.rows} == {"rollout"}
    assert estimate(load_config(generate | {"job": "generate"}), cluster).samples == 16


def test_the_settings_that_save_most_are_faster_and_fit():
    """The shipped 70B recipe waits for gathers between nodes; tensor parallelism within a node
    replaces most of them."""
    config = load_config(ROOT / "recipes" / "llama3_70b_grpo_8x8.yaml")
    cluster = parse_cluster("8x8xH100-80GB")
    now = estimate(config, cluster).seconds
    changes = faster(config, cluster, make_plan(config, cluster), now)
    assert "tensor_parallel_size" in changes[0].overrides[0]
    assert [change.seconds for change in changes] == sorted(change.seconds for change in changes)
    for change in changes:
        changed = changed_config(config, list(change.overrides))
        assert make_plan(changed, cluster).fits
        assert estimate(changed, cluster).seconds == change.seconds < now
        assert change.saved_s == pytest.approx(now - change.seconds)


def test_host_memory_of_a_table_is_that_of_a_node():
    """Eight ranks of the policy are on each node."""
    config = load_config(ROOT / "recipes" / "llama3_70b_grpo_8x8.yaml")
    plan = make_plan(config, parse_cluster("8x8xH100-80GB"))
    rows = [r for r in plan.rows if r.role.startswith("policy") and r.phase == "log-probs"]
    count = {"each": 8, "first": 1}
    size = sum(r.bytes * count[r.ranks] for r in rows if r.where == "host")
    line = next(x for x in plan.to_text().splitlines() if x.lstrip().startswith("log-probs"))
    assert float(line.split()[-1]) == pytest.approx(size / 1e9, rel=0.01)
