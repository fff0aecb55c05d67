"""Models and tokenizers from folders: results, refusals and error messages."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    PreTrainedTokenizerBase,
)

from burnish.config.episodes import AgentEpisodes
from burnish.config.model import Dtype, LoraConfig, ModelConfig, ScratchConfig
from burnish.data.chat import encode_prompt
from burnish.episodes.template import ChatTemplate
from burnish.jobs.episodes import agent_spec
from burnish.models.checks import check_compute_dtype
from burnish.models.digest import present_tokenizer_digest
from burnish.models.empty import read_tensor
from burnish.models.load import (
    ModelError,
    load_causal_lm,
    load_tokenizer,
    num_positions,
    place,
    resolve_device,
)
from burnish.models.lora_base import other_base
from burnish.models.shrink import build, shrink
from burnish.models.value_head import load_scalar_model
from burnish.special_tokens import turn_end_ids


@pytest.fixture
def folder(
    tmp_path: Path, tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerBase
) -> Path:
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def classifier(folder: Path, *, labels: int = 1) -> LlamaForSequenceClassification:
    config = LlamaConfig.from_pretrained(folder)
    config.num_labels = labels
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def edit(file: Path, **changes: object) -> None:
    body = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in body.items() if v is not None}))


# ---- language models
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_folder_is_loaded_in_the_requested_dtype(
    dtype: str, expected: torch.dtype, folder: Path, tiny_model: LlamaForCausalLM
) -> None:
    model = load_causal_lm(ModelConfig(path=str(folder)), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {expected}
    for (name, ours), theirs in zip(model.named_parameters(), tiny_model.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(expected)), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rotary_frequencies_stay_fp32_in_half_precision(
    dtype: Dtype, folder: Path, tmp_path: Path
) -> None:
    """Rounded to 8 bits a frequency is off by up to 2^-9 of itself, and the position multiplies
    that."""
    exact = load_causal_lm(ModelConfig(path=str(folder))).model.rotary_emb.inv_freq
    classifier(folder).save_pretrained(tmp_path / "one")
    bodies = [
        load_causal_lm(ModelConfig(path=str(folder)), dtype=dtype).model,
        load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)), dtype=dtype).model,
        load_scalar_model(ModelConfig(path=str(tmp_path / "one")), dtype=dtype).model,
        load_scalar_model(ModelConfig(path=str(folder)), dtype=dtype, new_head="random").model,
    ]
    for body in bodies:
        frequencies = body.rotary_emb.inv_freq
        assert frequencies.dtype == torch.float32 and torch.equal(frequencies, exact)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(
            ModelError, match=r"the model folder .*/nowhere does not exist .*; check model\.path"
        ):
            load(ModelConfig(path=str(tmp_path / "nowhere")))


def test_a_name_that_could_be_a_local_folder_is_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """owner/name is a name of the hub's, which without a network takes its time to fail."""
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path, told in (("models/sft", True), ("owner/name", False), ("name", False)):
        caplog.clear()
        with pytest.raises(ModelError, match="not a local folder"):
            load_tokenizer(ModelConfig(path=path))
        assert ("although the folder models does" in caplog.text) == told


def test_a_file_in_place_of_a_folder_has_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ModelError, match=r"is a file; set the folder .* model\.gguf_file=model\.gguf"
    ):
        load_causal_lm(ModelConfig(path=str(tmp_path / "model.gguf")))


def test_a_missing_gguf_file_lists_the_existing_ones(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r" a\.gguf, b\.gguf"):
        load_causal_lm(ModelConfig(path=str(tmp_path), gguf_file="c.gguf"))
    with pytest.raises(ModelError, match=r"model\.gguf_file=a\.gguf"):
        load_causal_lm(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickle_only_weights_are_refused_unread(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04not to be read")
    with pytest.raises(ModelError, match="only as pickle files, which can run code"):
        load_causal_lm(ModelConfig(path=str(folder)))
    with pytest.raises(ModelError, match="only as pickle files"):
        load_scalar_model(ModelConfig(path=str(folder)), new_head="random")


def test_pickle_next_to_safetensors_is_not_read(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04not to be read")
    load_causal_lm(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("keep", [0, 5, 1000])
def test_a_truncated_weight_file_is_a_model_error(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="cannot load the model"):
        load_causal_lm(ModelConfig(path=str(folder)))


def test_a_folder_without_a_config_is_a_model_error(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot load the model"):
        load_causal_lm(ModelConfig(path=str(folder)))


def test_missing_weights_are_an_error(tmp_path: Path, folder: Path) -> None:
    """An untied classifier as a language model would get a random output projection."""
    edit(folder / "config.json", tie_word_embeddings=False)
    classifier(folder).save_pretrained(tmp_path / "other")
    edit(tmp_path / "other" / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(
        ModelError, match=r"no weights for 1 parameters .*lm_head\.weight: they would be random"
    ):
        load_causal_lm(ModelConfig(path=str(tmp_path / "other")))


def test_cuda_is_refused_on_a_machine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ModelError, match=r"device='cuda:1' requires CUDA.*use device=cpu"):
        resolve_device("cuda:1")


# ---- tokenizers
# ------------------------------------------------------------------------------------


def test_a_tokenizer_without_an_end_token_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match=r"no end-of-sequence token.*set model\.eos_token"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_tokenizer_without_texts_of_tokens_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of mistral-common, which transformers makes of tekken.json, has methods instead."""

    class Backend:
        def added_tokens_decoder(self) -> None: ...

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Backend())
    with pytest.raises(ModelError, match=r"is a Backend .*tekken.json.*model.tokenizer_path"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_tokenizer_without_a_pad_token_gets_its_end_token(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_a_tokenizer_may_come_from_elsewhere(folder: Path) -> None:
    config = ModelConfig(scratch=ScratchConfig(alphabet="ab"), tokenizer_path=str(folder))
    assert len(load_tokenizer(config)) == 53


def test_a_chat_template_may_be_text_or_a_file(folder: Path, tmp_path: Path) -> None:
    text = "{{ messages[0]['content'] }}!"
    (tmp_path / "chat.jinja").write_text(text)
    for template in (text, str(tmp_path / "chat.jinja")):
        tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=template))
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        assert rendered == "a!"


THINKING = """{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif -%}
{%- if note %}{{ note }}{% endif -%}
{%- endif -%}"""
"""The generation prompt of Qwen3: an empty block of reasoning unless the policy may think."""


def thinking(folder: Path, template: str = THINKING, **values: Any) -> Any:
    config = ModelConfig(path=str(folder), chat_template=template, chat_template_kwargs=values)
    return load_tokenizer(config)


def test_template_variables_hold_in_data_in_episodes_and_after_an_export(
    folder: Path, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "a"}]
    end = load_tokenizer(ModelConfig(path=str(folder))).eos_token
    plain = f"<|user|>a{end}<|assistant|>"
    for values, text in (
        ({}, plain),
        ({"enable_thinking": True}, plain),
        ({"enable_thinking": False}, plain + "<think></think>"),
        ({"enable_thinking": False, "note": "é\n'%}\""}, plain + "<think></think>é\n'%}\""),
        ({"note": -1.5}, plain + "-1.5"),
        ({"note": None}, plain),
    ):
        tokenizer = thinking(folder, **values)
        assert encode_prompt(tokenizer, messages)[0] == text
        tokenizer.save_pretrained(tmp_path / "exported")
        exported = load_tokenizer(
            ModelConfig(path=str(folder), tokenizer_path=str(tmp_path / "exported"))
        )
        assert encode_prompt(exported, messages)[0] == text
    template = ChatTemplate(thinking(folder, enable_thinking=False), today=datetime(2026, 1, 2))
    assert template.text(messages, (), generate=True) == plain + "<think></think>"
    again = exported.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, note="other"
    )
    assert again == plain + "other"  # a caller's own value wins


def test_models_are_compared_by_their_template_variables() -> None:
    made = [
        ModelConfig(path="a", chat_template_kwargs=values)
        for values in ({"x": 1, "y": "b"}, {"y": "b", "x": 1}, {"x": 2, "y": "b"})
    ]
    assert len(dict.fromkeys(made)) == 2


def test_a_template_keeps_its_text_under_default_variables(folder: Path) -> None:
    """Leading newlines and spaces of a template are part of its text."""
    for text in ("\n\n  x{{ note }}", "  {% if true %}x{% endif %}{{ note }}"):
        messages = [{"role": "user", "content": "a"}]
        found = thinking(folder, text, note="y").apply_chat_template(messages, tokenize=False)
        plain = load_tokenizer(ModelConfig(path=str(folder), chat_template=text))
        assert found == plain.apply_chat_template(messages, tokenize=False, note="y")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_thinkin": False}, r"enable_thinkin: .* \(nearest: enable_thinking\).* reads "),
        ({"eos_token": "x"}, r"does not read eos_token.*it reads enable_thinking, note$"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(
    values: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        thinking(folder, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": "x"}, "set by every rendering"),
        ({"a b": 1}, "no variable"),
        ({"x": [1]}, r"x=[1] is not a text"),
        ({"x": float("inf")}, r"x=inf is not a text"),
    ],
)
def test_names_that_no_recipe_can_set_are_refused_at_load(
    values: dict[str, Any], message: str
) -> None:
    (found,) = ModelConfig(scratch=ScratchConfig(), chat_template_kwargs=values).rules()
    assert message in found


# ---- scalar models
# ---------------------------------------------------------------------------------


def test_a_language_model_without_a_head_is_no_reward_model(folder: Path) -> None:
    with pytest.raises(ModelError, match="reward head"):
        load_scalar_model(ModelConfig(path=str(folder)))


def test_a_reward_of_two_outputs_needs_their_weights(folder: Path, tmp_path: Path) -> None:
    classifier(folder, labels=2).save_pretrained(tmp_path / "two")
    with pytest.raises(ModelError, match=r"2 outputs \(LABEL_0, LABEL_1\).*output_weights"):
        load_scalar_model(ModelConfig(path=str(tmp_path / "two")))


def test_a_classifier_of_one_output_keeps_its_scores(folder: Path, tmp_path: Path) -> None:
    theirs = classifier(folder).eval()
    theirs.save_pretrained(tmp_path / "one")
    ours = load_scalar_model(ModelConfig(path=str(tmp_path / "one")))
    tokens = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        score = ours.score(ours.model(tokens).last_hidden_state)[0, -1, 0]
        torch.testing.assert_close(score, theirs(tokens).logits[0, 0])


def test_a_head_of_another_form_is_not_replaced_by_a_new_one(folder: Path, tmp_path: Path) -> None:
    """OpenRLHF saves a reward model with its own class; the fields of the message let it be read,
    and saving the language model alone removes the head."""
    theirs = classifier(folder).eval()
    theirs.save_pretrained(tmp_path / "rm")
    edit(tmp_path / "rm" / "config.json", architectures=["RewardModel"])
    config = ModelConfig(path=str(tmp_path / "rm"))
    for empty in (False, True):
        with pytest.raises(ModelError, match=r"trained head \(score\.weight\).*\[RewardModel\]"):
            load_scalar_model(config, new_head="random", empty=empty)
    LlamaForCausalLM.from_pretrained(tmp_path / "rm").save_pretrained(tmp_path / "new")
    load_scalar_model(ModelConfig(path=str(tmp_path / "new")), new_head="random")
    fields = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    edit(tmp_path / "rm" / "config.json", **fields)
    read = load_scalar_model(config, new_head="random").score.weight
    assert torch.equal(read, theirs.score.weight)


def test_a_new_head_is_drawn_from_its_seed_alone(tiny_config: ModelConfig) -> None:
    def head(seed: int) -> torch.Tensor:
        torch.manual_seed(99 + seed)
        return load_scalar_model(tiny_config, seed=seed, new_head="random").score.weight

    assert torch.equal(head(3), head(3)) and not torch.equal(head(3), head(4))
    zero = load_scalar_model(tiny_config, seed=3, new_head="zero").score.weight
    assert zero.shape == head(3).shape and not zero.any()


def test_adapters_of_a_scalar_model_train_with_its_head(folder: Path, tmp_path: Path) -> None:
    classifier(folder).save_pretrained(tmp_path / "one")
    lora = LoraConfig(lora_rank=2)
    for path, new_head in ((tmp_path / "one", None), (folder, "random")):
        model = load_scalar_model(ModelConfig(path=str(path), lora=lora), new_head=new_head)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert "score.weight" in trained and len(trained) == 1 + 2 * 2 * 7, "2 layers of 7 matrices"
        assert all(".lora_" in name for name in trained - {"score.weight"})


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_a_tied_head_or_embedding_is_refused(target: str) -> None:
    config = ModelConfig(
        scratch=ScratchConfig(hidden_size=32, tie_word_embeddings=True),
        lora=LoraConfig(target_modules=("q_proj", target)),
    )
    with pytest.raises(ModelError, match="of this model are tied"):
        load_causal_lm(config)


def test_a_mistyped_adapter_target_is_named() -> None:
    config = ModelConfig(
        scratch=ScratchConfig(), lora=LoraConfig(target_modules=("q_proj", "qproj"))
    )
    with pytest.raises(ModelError, match=r"'qproj' matches no module .* o_proj, q_proj, up_proj"):
        load_causal_lm(config)


@pytest.fixture
def adapted(folder: Path, tmp_path: Path) -> ModelConfig:
    """A base model with an adapter, whose folder has another template and end token."""
    adapter = tmp_path / "adapter"
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    tokenizer.add_special_tokens({"eos_token": "="})
    tokenizer.chat_template = "{% for m in messages %}+{{ m.content }}={% endfor %}"
    tokenizer.save_pretrained(adapter)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return ModelConfig.model_validate({"path": str(folder), "lora": {"path": str(adapter)}})


def test_the_tokenizer_in_the_folder_of_an_adapter_replaces_that_of_the_base(
    folder: Path, adapted: ModelConfig
) -> None:
    """A run with the adapter reads prompts, and ends responses, as its training did. It does so in
    every reader of the tokenizer's files."""
    assert adapted.lora is not None and adapted.lora.path is not None
    adapter = adapted.lora.path
    named = adapted.model_copy(update={"tokenizer_path": adapter})
    tokenizer, base = load_tokenizer(adapted), load_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.eos_token == "=" != base.eos_token
    assert encode_prompt(tokenizer, [{"role": "user", "content": "1"}])[0] == "+1="
    assert present_tokenizer_digest(adapted) == present_tokenizer_digest(named)
    spec = agent_spec(AgentEpisodes(kind="agent", agent="openrlhf:agent.py", max_tokens=8), adapted)
    assert spec.options["tokenizer"] == adapter


def test_the_recipe_and_an_adapter_without_a_tokenizer_select_that_of_the_base(
    folder: Path, adapted: ModelConfig
) -> None:
    assert adapted.lora is not None and adapted.lora.path is not None
    base = load_tokenizer(ModelConfig(path=str(folder)))
    chosen = load_tokenizer(adapted.model_copy(update={"tokenizer_path": str(folder)}))
    assert (chosen.eos_token, chosen.chat_template) == (base.eos_token, base.chat_template)
    (Path(adapted.lora.path) / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"model\.tokenizer_path={folder}"):
        load_tokenizer(adapted)
    for file in Path(adapted.lora.path).glob("tokenizer*"):
        file.unlink()
    assert load_tokenizer(adapted).eos_token == base.eos_token


def test_a_chat_template_alone_in_the_folder_of_an_adapter_is_that_of_the_run(
    folder: Path, adapted: ModelConfig
) -> None:
    """With the base's tokenizer. Its digest is one of the run's."""
    assert adapted.lora is not None and adapted.lora.path is not None
    base = load_tokenizer(ModelConfig(path=str(folder)))
    for file in Path(adapted.lora.path).glob("*token*"):
        file.unlink()
    file = Path(adapted.lora.path) / "chat_template.jinja"
    assert [f.name for f in file.parent.glob("*") if "adapter" not in f.name] == [file.name]
    chosen = load_tokenizer(adapted)
    assert chosen.chat_template == file.read_text() != base.chat_template
    assert (chosen.eos_token, chosen.get_vocab()) == (base.eos_token, base.get_vocab())
    own = adapted.model_copy(update={"chat_template": "{{ messages }}"})
    assert load_tokenizer(own).chat_template == "{{ messages }}"
    named = adapted.model_copy(update={"tokenizer_path": str(folder)})
    assert load_tokenizer(named).chat_template == base.chat_template
    digest = present_tokenizer_digest(adapted)
    file.write_text("{{ messages }}")
    assert digest != present_tokenizer_digest(adapted)


@pytest.mark.parametrize(
    ("path", "base", "differs"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", False),
        ("/data/models/Qwen3-0.6B", "Qwen/Qwen3-0.6B", False),
        ("/hub/models--Qwen--Qwen3-0.6B/snapshots/8f3a", "qwen/Qwen3-0.6B", False),
        ("Qwen/Qwen3-0.6B", "unsloth/Qwen3-0.6B-bnb-4bit", False),
        ("/data/Qwen3-0.6B/main", "/home/me/models/Qwen3-0.6B", False),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base", True),
        ("Qwen/Qwen3-0.6B", "", False),
        ("copy", "base", False),
        ("other", "base", True),
    ],
)
def test_another_base_than_that_of_an_adapter_is_a_warning(
    path: str, base: str, differs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names are compared; of two folders, the weights. The adapters of this test have none, which
    is an error after the warning."""
    for name in {path, base} & {"base", "copy", "other"}:
        model = load_causal_lm(ModelConfig(scratch=ScratchConfig(hidden_size=32)))
        torch.nn.init.constant_(model.model.norm.weight, 2.0 if name == "other" else 1.0)
        model.save_pretrained(tmp_path / name)
    path, base = (str(tmp_path / n) if (tmp_path / n).is_dir() and n else n for n in (path, base))
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    text = json.dumps(settings | {"base_model_name_or_path": base})
    (adapter / "adapter_config.json").write_text(text)
    config = ModelConfig.model_validate({"path": path, "lora": {"path": str(adapter)}})
    assert other_base(config) == (base if differs else None)
    if Path(path).is_dir():
        with pytest.raises(ModelError, match="needs adapter_config"):
            load_causal_lm(config)
        assert differs == any("names the base" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("revision", "named", "differs"),
    [
        *((None, None, False), ("v1", None, False), ("v1", "v1", False), (None, "main", False)),
        *(("v1", "v2", True), (None, "v1", True)),
    ],
)
def test_another_revision_than_that_of_an_adapter_is_another_base(
    revision: str | None, named: str | None, differs: bool, tmp_path: Path
) -> None:
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    text = json.dumps(settings | {"base_model_name_or_path": "hub/name", "revision": named})
    (tmp_path / "adapter_config.json").write_text(text)
    model = {"path": "hub/name", "revision": revision, "lora": {"path": str(tmp_path)}}
    found = other_base(ModelConfig.model_validate(model))
    assert found == (f"hub/name at revision {named}" if differs else None)


@pytest.mark.parametrize("end", ["<|system|>", "<|eot|>"])
def test_the_end_of_turn_is_read_from_the_template(end: str) -> None:
    """A token with a name, and an added one."""
    tokenizer = load_tokenizer(ModelConfig(scratch=ScratchConfig()))
    assert turn_end_ids(tokenizer) == {tokenizer.eos_token_id}
    tokenizer.add_tokens([AddedToken(end, special=True)])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}" + end + "\n{% endfor %}"
    )
    assert turn_end_ids(tokenizer) == {tokenizer.convert_tokens_to_ids(end)}
    tokenizer.chat_template = None
    assert turn_end_ids(tokenizer) == frozenset()


def test_positions_are_read_without_loading_the_model(tmp_path: Path) -> None:
    assert num_positions(ModelConfig(scratch=ScratchConfig(max_position_embeddings=77))) == 77
    load_causal_lm(
        ModelConfig(scratch=ScratchConfig(max_position_embeddings=99))
    ).config.save_pretrained(tmp_path)
    assert num_positions(ModelConfig(path=str(tmp_path))) == 99
    for other in (GPT2Config(n_positions=55), LlavaConfig(text_config=LlamaConfig())):
        other.save_pretrained(tmp_path / other.model_type)
    assert num_positions(ModelConfig(path=str(tmp_path / "gpt2"))) == 55
    assert num_positions(ModelConfig(path=str(tmp_path / "llava"))) == 2048
    assert num_positions(ModelConfig(path=str(tmp_path / "nothing"))) is None


def test_a_chat_template_that_is_neither_a_file_nor_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match=r"chat_template='missing\.jinja' is not a file \(working"):
        load_tokenizer(ModelConfig(scratch=ScratchConfig(), chat_template="missing.jinja"))


@pytest.mark.parametrize("model_type", ["gemma4_text", "mamba", "qwen3_5_text", "ctrl"])
def test_models_that_need_token_ids_are_tried_in_half_precision(model_type: str) -> None:
    """Gemma 4 reads ids in addition to embeddings (per-layer inputs). CTRL scales them in place."""
    model = build(shrink(AutoConfig.for_model(model_type)))
    place(model, dtype="bf16", device="cpu")
    check_compute_dtype(model.get_decoder(), model_type, backward=True)


def test_a_reward_model_is_no_language_model(folder: Path, tmp_path: Path) -> None:
    """With tied ends it has all weights of one."""
    classifier(folder).save_pretrained(tmp_path / "one")
    for empty in (False, True):
        with pytest.raises(ModelError, match=r"LlamaForSequenceClassification.*not a language"):
            load_causal_lm(ModelConfig(path=str(tmp_path / "one")), empty=empty)


def test_one_file_is_read_before_the_index_of_several(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by transformers, also by ranks that read their rows."""
    other = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    single = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    other.save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").write_bytes(single)
    config = ModelConfig(path=str(folder))
    weight = load_causal_lm(config).get_parameter("model.layers.0.mlp.up_proj.weight")
    assert not torch.equal(weight, other.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(weight, read_tensor(config, "model.layers.0.mlp.up_proj.weight"))
    assert "remove one of them" in caplog.text
