"""Weights that a run reads from folders again must be those of its start: on resume, in exports of
adapters, and for adapters of batch inference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

import burnish
from burnish.checkpoint import CheckpointError, CheckpointStore
from burnish.checkpoint.manifest import read_manifest, write_manifest
from burnish.checkpoint.state import load_state, save_state
from burnish.config import JobConfig, load_config
from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.driver.errors import RunError
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.runtime.ray.worker_group import WorkerGroup
from burnish.train.spec import EngineSpec

SCRATCH = {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}
SCRATCH |= {"max_position_embeddings": 64}
LORA = {"lora_rank": 2}
KL = {"kl": {"init_kl_coef": 0.1}}
PPO = {"advantage": "gae"}
MakeConfig = Callable[..., JobConfig]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """A language model and a reward model, each in three folders."""
    names = {name: str(tmp_path / name) for name in ("policy", "other", "third", "reward")}
    for seed, name in enumerate(("policy", "other", "third")):
        model = ModelConfig.model_validate({"scratch": {**SCRATCH, "seed": seed}})
        load_causal_lm(model, dtype="fp32", device="cpu").save_pretrained(names[name])
        load_tokenizer(model).save_pretrained(names[name])
    config = AutoConfig.from_pretrained(names["policy"], num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(names["reward"])
    load_tokenizer(model).save_pretrained(names["reward"])
    return names


@pytest.fixture
def make(tmp_path: Path, write_rows: Callable[..., str], folders: dict[str, str]) -> MakeConfig:
    """``make(job, keys, max_steps)``: 4 rows or samples per step, with the model ``policy``."""
    pairs = [(a, b) for a in range(4) for b in range(3)]
    rows = write_rows("rows", [{"prompt": f"{a}+{b}=", "response": str(a), "label": "1",
                                "chosen": str(a), "rejected": "+"} for a, b in pairs])  # fmt: skip

    def config(job: str, keys: dict[str, Any], max_steps: int = 1) -> JobConfig:
        tree: dict[str, Any] = {
            "job": job,
            "run_dir": str(tmp_path / "run"),
            "max_steps": max_steps,
            "model": {"path": folders["policy"]},
            "data": {"sources": [rows], "max_len": 16},
            "train": {"train_batch_size": 4, "lr": 1e-2},
        }
        if job == "rl":
            tree["data"] = {"sources": [rows], "prompt_max_len": 16}
            tree["rollout"] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
            tree["rollout"] |= {"generate_max_len": 4}
        text = yaml_text({**tree, **keys}, folders)
        return load_config(text)

    return config


def yaml_text(tree: Any, folders: dict[str, str]) -> Any:
    """Return a recipe with ``$name`` replaced by the folder of that name."""
    if isinstance(tree, dict):
        return {key: yaml_text(value, folders) for key, value in tree.items()}
    if isinstance(tree, list):
        return [yaml_text(value, folders) for value in tree]
    is_name = isinstance(tree, str) and tree.startswith("$")
    return folders[tree[1:]] if is_name else tree


def replace_weights(folder: str, factor: float = 0.5) -> None:
    """Write other weights into files of the same names and sizes."""
    for file in Path(folder).glob("*.safetensors"):
        tensors = {name: tensor * factor for name, tensor in load_file(file).items()}
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})


def reward(response: str) -> float:
    return sum(c.isdigit() for c in response) / 4


def start(config: JobConfig, resume: Path | None = None) -> Path:
    has_function = any(entry.needs_callable for entry in config.scoring.rewards)
    return burnish.run(config, rewards=reward if has_function else None, resume=resume).run_dir


READ_AGAIN: dict[str, tuple[str, dict[str, Any], str]] = {
    "base of sft": ("sft", {"model": {"path": "$policy", "lora": LORA}}, "policy"),
    "base of a reward model": ("rm", {"model": {"path": "$policy", "lora": LORA}}, "policy"),
    "base of a critic": (
        "rl",
        {"critic": {"model": {"path": "$other", "lora": LORA}}, "algorithm": PPO},
        "other",
    ),
    "policy at the start": ("rl", {"algorithm": {"advantage": "grpo"} | KL}, "policy"),
    "policy at the start of preference": ("preference", {}, "policy"),
    "reference": ("preference", {"reference": {"model": {"path": "$other"}}}, "other"),
    "adapter of a reference": (
        "preference",
        {"reference": {"model": {"path": "$other", "lora": {"path": "$adapter"}}}},
        "adapter",
    ),
    "teacher": ("distill", {"teacher": {"model": {"path": "$other"}}}, "other"),
    "reward model": (
        "rl",
        {"rewards": [{"kind": "model", "model": {"path": "$reward"}}]},
        "reward",
    ),
}


def _set_key(file: Path, key: str, value: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | {key: value}))


@pytest.mark.parametrize(
    ("file", "key", "value", "is_refused"),
    [
        ("config.json", "rms_norm_eps", 0.5, True),
        ("config.json", "rope_parameters", {"rope_type": "default", "rope_theta": 7.0}, True),
        ("config.json", "transformers_version", "0.0.0", False),
        ("generation_config.json", "eos_token_id", [1, 2], True),
        ("generation_config.json", "temperature", 0.5, False),
    ],
)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_changed_config_of_a_trained_model_is_refused_if_it_changes_results(
    make: MakeConfig,
    folders: dict[str, str],
    role: str,
    file: str,
    key: str,
    value: Any,
    is_refused: bool,
) -> None:
    critic = {"critic": {"model": {"path": "$other"}}, "algorithm": PPO}
    keys = critic | {"rewards": [{"kind": "function"}]}
    folder = Path(folders["policy" if role == "policy" else "other"])
    run_dir = start(make("rl", keys))
    _set_key(folder / file, key, value)
    if not is_refused:
        start(make("rl", keys, 2), resume=run_dir)
        return
    with pytest.raises(RunError) as refused:
        start(make("rl", keys, 2), resume=run_dir)
    assert f"the config of the {role} in {folder}" in str(refused.value)


CODE = "def score(response):\n    return float('1' in response)\n"
ENVIRONMENT = """
class Once:
    def reset(self, task, seed):
        return {"messages": [{"role": "user", "content": "1+1="}]}

    def step(self, message):
        return {"rewards": {"x": 1.0}, "done": True}
"""
CODE_KEYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "reward": lambda file: {
        "rewards": [{"kind": "function", "name": "x", "function": f"{file}:score"}]
    },
    "module": lambda file: {
        "rewards": [{"kind": "function", "name": "x", "function": f"{file.stem}:score"}]
    },
    "environment": lambda file: {"environment": f"{file}:Once", "history": "keep"},
}


@pytest.mark.parametrize("kind", CODE_KEYS)
def test_changed_code_is_used_on_resume_and_named(
    make: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    file, keys = tmp_path / "changed_code.py", CODE_KEYS[kind](tmp_path / "changed_code.py")
    file.write_text(CODE + ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    if kind == "environment":
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        keys = {
            "model": {"scratch": SCRATCH, "chat_template": template},
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
            | {"generate_max_len": 4, "episodes": keys | {"max_tokens": 32}},
        }
    run_dir = start(make("rl", keys))
    assert [len(c) for c in json.loads((run_dir / "code_digests.json").read_text()).values()] == [1]
    start(make("rl", keys, 2), resume=run_dir)
    assert str(file) not in caplog.text
    file.write_text("# corrected\n" + CODE + ENVIRONMENT)
    start(make("rl", keys, 3), resume=run_dir)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum(str(file) in warning for warning in warnings) == 1
    start(make("rl", keys, 4), resume=run_dir)  # it is not new any more
    assert sum(str(file) in r.getMessage() for r in caplog.records) == 1
    ((name, contents),) = json.loads((run_dir / "code_digests.json").read_text()).items()
    assert name == str(file) and len({content["sha256"] for content in contents}) == 2


@pytest.mark.parametrize("case", READ_AGAIN)
def test_a_run_with_replaced_weights_is_not_resumed_until_they_are_restored(
    make: MakeConfig, folders: dict[str, str], tmp_path: Path, case: str
) -> None:
    job, keys, replaced = READ_AGAIN[case]
    if replaced == "adapter":
        folders["adapter"] = str(adapter(make, tmp_path))
    run_dir = start(make(job, keys))
    shutil.copytree(folders[replaced], tmp_path / "kept")
    replace_weights(folders[replaced])
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError) as refused:
        start(make(job, keys, 2), resume=run_dir)
    assert folders[replaced] in str(refused.value)
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(folders[replaced])
    (tmp_path / "kept").rename(folders[replaced])
    start(make(job, keys, 2), resume=run_dir)
    assert [line["step"] for line in read_metrics(run_dir) if line["step"]] == [1, 2]


def adapter(make: MakeConfig, tmp_path: Path) -> Path:
    """Train and export an adapter for the model ``other``."""
    keys = {"model": {"path": "$other", "lora": LORA}, "run_dir": str(tmp_path / "tuned")}
    return burnish.export(start(make("sft", keys)), tmp_path / "adapter", lora="adapter")


@pytest.mark.parametrize(
    ("job", "keys", "replaced"),
    [
        ("sft", {}, "policy"),
        ("rm", {}, "policy"),
        ("rl", {"critic": {"model": {"path": "$other"}}, "algorithm": PPO}, "other"),
        (
            "preference",
            {"reference": {"moving": {"every_n_steps": 1}, "model": {"path": "$other"}}},
            "other",
        ),
    ],
)
def test_weights_that_checkpoints_contain_may_be_replaced(
    make: MakeConfig, folders: dict[str, str], job: str, keys: dict[str, Any], replaced: str
) -> None:
    run_dir = start(make(job, keys))
    replace_weights(folders[replaced])
    start(make(job, keys, 2), resume=run_dir)
    assert [line["step"] for line in read_metrics(run_dir) if line["step"]] == [1, 2]


@pytest.mark.parametrize("is_adapter", [False, True])
def test_deleted_weights_that_checkpoints_contain_can_be_those_of_an_export(
    make: MakeConfig, folders: dict[str, str], tmp_path: Path, is_adapter: bool
) -> None:
    """The resumed run gives the metrics of one whose folder kept its weights."""
    keys: dict[str, Any] = {"model": {"path": "$policy"}}
    folder, form = Path(folders["policy"]), "merge"
    if is_adapter:
        first = start(make("sft", {"run_dir": str(tmp_path / "first"), "model": {
            "path": "$policy", "lora": LORA}}))  # fmt: skip
        folder, form = burnish.export(first, tmp_path / "adapter", lora="adapter"), "adapter"
        keys["model"]["lora"] = {"path": str(folder)}
    run_dir = start(make("sft", keys))
    shutil.copytree(run_dir, tmp_path / "copy")
    start(make("sft", {**keys, "run_dir": str(tmp_path / "copy")}, 2), resume=tmp_path / "copy")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(RunError, match="burnish export"):
        start(make("sft", keys, 2), resume=run_dir)
    burnish.export(run_dir, tmp_path / "out", lora=cast(Any, form))
    for file in (tmp_path / "out").glob("*.safetensors*"):
        shutil.move(file, folder)
    start(make("sft", keys, 2), resume=run_dir)
    losses = [[m["train/loss"] for m in read_metrics(d)] for d in (run_dir, tmp_path / "copy")]
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_a_moved_folder_is_compared_by_content_and_another_frozen_model_may_be_chosen(
    make: MakeConfig, folders: dict[str, str]
) -> None:
    """The policy at the start and the teacher: a copy of the policy's folder continues the run,
    another one is refused; another teacher is the user's choice, and replaced later is refused."""
    keys: dict[str, Any] = {"algorithm": {"advantage": "on_policy_distill"} | KL}
    keys["teacher"] = {"model": {"path": "$other"}}
    run_dir = start(make("rl", keys))
    keys["model"] = {"path": "$third"}
    with pytest.raises(RunError, match="policy at the start"):
        start(make("rl", keys, 2), resume=run_dir)
    shutil.rmtree(folders["third"])
    shutil.move(folders["policy"], folders["third"])
    start(make("rl", keys, 2), resume=run_dir)
    keys["teacher"] = {"model": {"path": "$policy"}}
    shutil.copytree(folders["third"], folders["policy"])
    start(make("rl", keys, 3), resume=run_dir)
    replace_weights(folders["policy"])
    with pytest.raises(RunError, match="teacher"):
        start(make("rl", keys, 4), resume=run_dir)


@pytest.mark.parametrize("lora", ["merge", "adapter"])
@pytest.mark.parametrize("source", ["run", "checkpoint", "copy", "only weights"])
def test_adapters_are_not_exported_with_another_base(
    make: MakeConfig, folders: dict[str, str], tmp_path: Path, lora: Any, source: str
) -> None:
    keys = {"model": {"path": "$policy", "lora": LORA}}
    keys["checkpoint"] = {"every_n_steps": 1, "keep": "weights", "keep_last": 2}
    run_dir = start(make("sft", keys, 2))
    reduced, newest = CheckpointStore(run_dir / "checkpoints", keep_last=2, best_mode="max").all()
    shutil.copytree(newest, tmp_path / "copy")
    place = {"run": run_dir, "checkpoint": newest, "copy": tmp_path / "copy"}
    checkpoint = place.get(source, reduced)
    shutil.copytree(folders["policy"], tmp_path / "kept")
    replace_weights(folders["policy"])
    with pytest.raises(CheckpointError, match="--base"):
        burnish.export(checkpoint, tmp_path / "out", lora=lora)
    assert not (tmp_path / "out").exists()
    burnish.export(checkpoint, tmp_path / "out", lora=lora, base=str(tmp_path / "kept"))
    burnish.export(checkpoint, tmp_path / "chosen", lora=lora, base=folders["policy"])


def test_the_export_at_the_end_of_a_run_needs_the_base_of_its_start(
    make: MakeConfig, folders: dict[str, str]
) -> None:
    keys: dict[str, Any] = {"model": {"path": "$policy", "lora": LORA}}
    keys |= {"algorithm": {"advantage": "grpo"}, "checkpoint": {"export_at_end": True}}
    config = make("rl", keys)

    def replaces(response: str) -> float:
        replace_weights(folders["policy"])
        return 1.0

    with pytest.raises(RunError, match=r"export .* failed"):
        burnish.run(config, rewards=replaces)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "own.jinja", None])
def test_a_changed_tokenizer_or_chat_template_is_a_warning(
    make: MakeConfig,
    folders: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    name: str | None,
) -> None:
    folder, own = Path(folders["policy"]), Path(folders["policy"]) / "own.jinja"
    for file in (folder / "chat_template.jinja", own):
        file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    keys: dict[str, Any] = {"model": {"path": "$policy"}}
    if name == "own.jinja":
        keys["model"]["chat_template"] = str(own)
    run_dir = start(make("sft", keys))
    if name is not None:
        (folder / name).write_text((folder / name).read_text() + "\n")
    for steps, is_warned in ((2, name is not None), (3, False)):
        caplog.clear()
        start(make("sft", keys, steps), resume=run_dir)
        warnings = [r for r in caplog.records if "tokenizer or chat template" in r.getMessage()]
        assert bool(warnings) is is_warned


@pytest.mark.parametrize("files", ["*tok*", "chat_template.jinja"])
def test_a_removed_tokenizer_of_the_start_adapter_is_a_warning(
    files: str,
    make: MakeConfig,
    folders: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The resumed run would continue with the base's."""
    adapter = burnish.export(start(make("sft", {"model": {"path": "$policy", "lora": LORA}})),
                             tmp_path / "adapter", lora="adapter")  # fmt: skip
    model = {"path": "$policy", "lora": {"path": str(adapter)}}
    keys = {"run_dir": str(tmp_path / "next"), "model": model}
    if files == "chat_template.jinja":
        for file in adapter.glob("*tok*"):
            file.unlink()
        (adapter / files).write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    run_dir = start(make("sft", keys))
    for file in adapter.glob(files):
        file.unlink()
    caplog.clear()
    start(make("sft", keys, 2), resume=run_dir)
    assert any("tokenizer or chat template" in record.getMessage() for record in caplog.records)


def test_a_lost_worker_group_does_not_load_replaced_weights(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of the workers would load the folder; a restart with the same weights does."""
    starts: list[str] = []

    def count(group: WorkerGroup) -> None:
        starts.append(group.name)
        group._complete = True

    monkeypatch.setattr(WorkerGroup, "_start", count)
    train, model = TrainConfig(train_batch_size=1), ModelConfig(path=folders["other"])
    role = TrainRole.alone("reference", train, model, trainable=False)
    cluster: Any = SimpleNamespace(config=ClusterConfig())
    group = WorkerGroup(cluster, EngineSpec(role), scalar=False, seed=0)
    for replaces, expected in ((False, 2), (True, 2)):
        group._complete = False
        if replaces:
            replace_weights(folders["other"])
        with pytest.raises(ModelError, match="other") if replaces else nullcontext():
            group.restart()
        assert len(starts) == expected


def test_a_run_of_an_earlier_version_is_not_compared(
    make: MakeConfig, folders: dict[str, str]
) -> None:
    keys = {"teacher": {"model": {"path": "$other"}}}
    run_dir = start(make("distill", keys))
    (checkpoint,) = CheckpointStore(run_dir / "checkpoints", keep_last=1, best_mode="max").all()
    session = load_state(checkpoint, "session")
    assert session.pop("weights").keys() == {"teacher", "tokenizer", "policy config"}
    save_state(checkpoint, "session", session)
    write_manifest(checkpoint, extra=read_manifest(checkpoint).extra, step=1)
    replace_weights(folders["other"])
    start(make("distill", keys, 2), resume=run_dir)
    replace_weights(folders["other"])
    with pytest.raises(RunError, match="teacher"):
        start(make("distill", keys, 3), resume=run_dir)
