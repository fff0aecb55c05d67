"""Features that Burnish does not have are refused with the reason and with something to use
instead, which works."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from burnish.config import ConfigError, load_config
from burnish.config.model import ModelConfig
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.teacher import shared_vocabulary
from burnish.models.tensor_parallel import check_head_counts
from burnish.train.torch.sequence_parallel import check_sequence_parallel

RANKS = "cluster={runtime: ray, policy_ranks: 4, rollout_workers: 4}"
VLLM = "rollout.engine.kind=vllm"
SERVERS = "rollout.engine={kind: vllm_server, urls: ['http://localhost:8000']}"
DEEPSPEED, SHARDED = "train.engine={kind: deepspeed}", "train.engine.sharding=full"

REFUSED: dict[str, tuple[list[str], str, str, str]] = {
    # the rest of the recipe, the refused override, the alternative in its error, its override
    "pipeline parallelism": (
        [RANKS],
        "cluster.pipeline_parallel_size=2",
        "train.engine.sharding=full (FSDP2)",
        SHARDED,
    ),
    "context parallelism in a ring": (
        [RANKS],
        "train.engine.context_parallel_size=2",
        "Use train.engine.sequence_parallel_size",
        "train.engine.sequence_parallel_size=2",
    ),
    "OpenRLHF's ring attention": (
        [RANKS],
        "train.ring_attn_size=2",
        "ring_attn_size is train.engine.sequence_parallel_size",
        "train.engine.sequence_parallel_size=2",
    ),
    "expert parallelism": (
        [RANKS],
        "train.engine.expert_parallel_size=2",
        "experts with train.engine.sharding=full",
        SHARDED,
    ),
    "hybrid sharding": (
        [RANKS],
        "train.engine.hsdp_size=2",
        "over all ranks with train.engine.sharding=full",
        SHARDED,
    ),
    "tensor and sequence parallelism together": (
        [RANKS],
        "train.engine={tensor_parallel_size: 2, sequence_parallel_size: 2}",
        "use one of the two (sequence_parallel_size with sharding=full",
        "train.engine={sequence_parallel_size: 2, sharding: full}",
    ),
    "tensor parallelism with DeepSpeed": (
        [RANKS],
        "train.engine={kind: deepspeed, tensor_parallel_size: 2}",
        "Use train.engine.kind=torch",
        "train.engine={kind: torch, tensor_parallel_size: 2}",
    ),
    "an option of DeepSpeed with the torch engine": (
        [RANKS],
        "train.engine={kind: torch, zero_stage: 3}",
        "(a key of kind deepspeed)",
        "train.engine={kind: deepspeed, zero_stage: 3}",
    ),
    "Megatron": ([RANKS], "train.engine.kind=megatron", "kind=torch with sharding=full", SHARDED),
    "accelerate as an engine": (
        [RANKS],
        "train.engine.kind=accelerate",
        "Use train.engine.kind=torch",
        "train.engine.kind=torch",
    ),
    "SGLang": ([], "rollout.engine.kind=sglang", "Use rollout.engine.kind=vllm", VLLM),
    "transformers as a rollout engine": (
        [],
        "rollout.engine.kind=hf",
        "Use rollout.engine.kind=local",
        "rollout.engine.kind=local",
    ),
    "rollout workers with vLLM servers": (
        [SERVERS, "cluster={runtime: ray, policy_ranks: 4}"],
        "cluster.rollout_workers=2",
        "remove rollout_workers, and list all servers in rollout.engine.urls",
        "cluster.rollout_workers=null",
    ),
    "connections to vLLM servers": (
        [SERVERS, "cluster={runtime: ray, policy_ranks: 4}"],
        "sync.kind=collective",
        "use sync.kind=object_store",
        "sync.kind=object_store",
    ),
    "the cache of older weights on vLLM servers": (
        [
            "rollout.asynchronous.max_staleness=1",
            "rollout.asynchronous.in_flight=continue",
            "algorithm.correction={}",
        ],
        SERVERS,
        "use in_flight=recompute (the default) or finish",
        "rollout.engine.kind=vllm",
    ),
    "a quantized rollout engine": (
        [VLLM],
        "rollout.engine.engine_args.quantization=fp8",
        "or use precision.rollout_dtype=bf16",
        "precision.rollout_dtype=bf16",
    ),
    "pipeline parallelism in vLLM": (
        [VLLM, "cluster={runtime: ray, policy_ranks: 2, rollout_workers: 2, layout: separate}"],
        "rollout.engine.engine_args.pipeline_parallel_size=2",
        "or use rollout.engine.tensor_parallel_size",
        "rollout.engine.tensor_parallel_size=2",
    ),
    "several ranks in one process": (
        ["cluster.policy_ranks=2", "cluster.rollout_workers=2"],
        "cluster.runtime=inline",
        "set runtime=ray, or start the ranks with torchrun",
        "cluster.runtime=ray",
    ),
    "repeated passes with shards": (
        [RANKS, SHARDED],
        "train.on_oom=retry_smaller",
        "use on_oom=fail",
        "train.on_oom=fail",
    ),
    "repeated passes with ZeRO": (
        [RANKS, DEEPSPEED],
        "train.on_oom=retry_smaller",
        "use on_oom=fail with a smaller micro_train_batch_size",
        "train.max_tokens_per_micro_batch=1000",
    ),
    "background saves with ZeRO": (
        [RANKS, DEEPSPEED],
        "checkpoint.in_background=true",
        "train.engine.sharding=full (train.engine.kind=torch)",
        "checkpoint.in_background=false",
    ),
    "8-bit Adam with tensor parallelism": (
        [RANKS, "train.optimizer.kind=adamw_8bit"],
        "train.engine.tensor_parallel_size=2",
        "use the torch engine with sharding=full and tensor_parallel_size=1",
        SHARDED,
    ),
    "Adafactor with DeepSpeed": (
        [RANKS, "train.optimizer.kind=adafactor"],
        DEEPSPEED,
        "use train.engine.kind=torch (sharding=full",
        "train.engine={kind: torch, sharding: full}",
    ),
    "4-bit weights with ZeRO-3": (
        [RANKS, "model.lora={quantization: nf4}"],
        "train.engine={kind: deepspeed, zero_stage: 3}",
        "use train.engine.kind=torch",
        "train.engine={kind: torch, sharding: full}",
    ),
    "norms of weights with tensor parallelism": (
        [RANKS, "model.lora={use_dora: true}"],
        "train.engine={tensor_parallel_size: 2}",
        "use tensor_parallel_size=1 with train.engine.sharding=full",
        "train.engine={tensor_parallel_size: 1, sharding: full}",
    ),
    "a correction by an unknown number of tokens": (
        ["algorithm.correction={}", "rollout.top_p=0.9"],
        "rollout.top_k=0",
        "set rollout.top_k to at most 1024",
        "rollout.top_k=1024",
    ),
    "half-precision sums with shards": (
        [RANKS, SHARDED, "precision.dtype=bf16"],
        "precision.grad_accum_dtype=bf16",
        "use fp32",
        "precision.grad_accum_dtype=fp32",
    ),
    "ZeRO-0 in fp16": (
        [RANKS, "precision={dtype: fp16, grad_accum_dtype: fp16}"],
        "train.engine={kind: deepspeed, zero_stage: 0}",
        "use zero_stage=1",
        "train.engine={kind: deepspeed, zero_stage: 1}",
    ),
    "in-process transfers on Ray": (
        [RANKS],
        "sync.kind=inproc",
        "use sync.kind=object_store",
        "sync.kind=object_store",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_alternative_that_a_refusal_names_is_accepted(
    case: str, rl_recipe: dict[str, Any]
) -> None:
    rest, wrong, said, instead = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        load_config(rl_recipe, [*rest, wrong])
    _, *lines = str(caught.value).split("\n")
    assert len(lines) == 1, lines
    assert said in lines[0]
    load_config(rl_recipe, [*rest, instead])


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        ("use_ms=true", "Download the model and data with ModelScope's client, and set paths"),
        ("checkpoint.use_ds_universal_ckpt=true", "can be resumed on another number of ranks"),
        ("train.engine.load_universal=true", "Continue with --resume."),
        ("train.use_uld_loss=true", "the job generate, and train on its output with the job sft"),
        ("train.torch_compile=true", "TRL's torch_compile has no equivalent; remove it: training"),
    ],
)
def test_a_missing_feature_without_a_key_names_the_way_out(
    rl_recipe: dict[str, Any], wrong: str, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(rl_recipe, [wrong])
    assert instead in str(caught.value)


def test_head_counts_that_are_not_replicated_name_the_sizes_that_work() -> None:
    llama: PretrainedConfig = AutoConfig.for_model(
        "llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=2
    )
    with pytest.raises(ModelError, match=r"none is replicated\); use one of 1, 2, with sharding="):
        check_head_counts(llama, 4)
    check_head_counts(llama, 2)
    with pytest.raises(ModelError, match=r"8 attention heads .* use one of 1, 2, 4, 8"):
        check_sequence_parallel(llama, 3)
    check_sequence_parallel(llama, 4)


def test_a_teacher_of_another_tokenizer_is_refused_with_training_on_its_samples() -> None:
    student = ModelConfig.model_validate({"scratch": {"alphabet": "abc"}})
    teacher = ModelConfig.model_validate({"scratch": {"alphabet": "bca"}})
    with pytest.raises(ModelError, match=r"sample the teacher \(burnish generate\) and train on"):
        shared_vocabulary(student, teacher, load_tokenizer(student))
    assert shared_vocabulary(student, student, load_tokenizer(student)) > 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("loss=sigmoid", "orpo, kto. TRL's sigmoid is dpo here."),
        ("f_divergence=js_divergence", "got 'js_divergence'. TRL's js_divergence is js here."),
        ("data.overlong=keep_start", "TRL's keep_start is truncate_right here."),
        ("added_losses={kto: 1}", r"added_losses\.kto: must be one of dpo, .*got 'kto'"),
    ],
)
def test_a_value_of_another_framework_is_translated(override: str, said: str) -> None:
    tree = {
        "job": "preference",
        "model": {"scratch": {}},
        "data": {"sources": ["pairs.jsonl"]},
        "train": {"train_batch_size": 4},
    }
    with pytest.raises(ConfigError, match=said):
        load_config(tree, [override])


@pytest.mark.parametrize(
    ("job", "override"),
    [
        ("sft", "precision.rollout_dtype=bf16"),
        ("sft", "observe.record_rollouts=true"),
        ("rm", "observe.samples_per_step=3"),
        ("generate", "observe.record_rollouts=true"),
        ("rm", "data.response_key=answer"),
        ("distill", "teacher.model.chat_template=x"),
        ("distill", "teacher.model.chat_template_kwargs={enable_thinking: false}"),
    ],
)
def test_a_key_that_only_acts_elsewhere_is_refused(job, override, recipes):
    load_config(recipes[job])
    with pytest.raises(ConfigError, match="has no effect") as caught:
        load_config(recipes[job], [override])
    assert override.split("=")[0].split(".")[-1] in str(caught.value)
