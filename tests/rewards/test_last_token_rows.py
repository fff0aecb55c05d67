"""Classifiers that others published score the last token of a rendered conversation; exports of
Burnish the end token of its answer."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_families import byte_bpe
from chat_templates import (
    PUBLISHED,
    REASONING_FORMS,
    published_tokenizer,
    reasoning_tokenizer,
)
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from burnish.config.model import ModelConfig
from burnish.data.chat import encode_prompt
from burnish.data.pieces import encode_piece
from burnish.data.sources import DataError
from burnish.models.scalar_model import reset_head, scores_last_token
from burnish.models.value_head import load_scalar_model
from burnish.rewards.base import Reward, RewardInput
from burnish.rewards.model.config import ModelReward
from burnish.rewards.model.reward import load_model_reward
from burnish.rewards.model.rows import Encode, reward_encoder
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Prompt, Sample

ASKED = [{"role": "user", "content": "What is ab?"}]
ANSWER = "It is ab.\n\nAnd c"


def item_of(
    policy: PreTrainedTokenizerFast, prompt: Any, text: str = ANSWER, *, ended: bool = True
) -> RewardInput:
    rendered, head = encode_prompt(policy, prompt)
    ids = encode_piece(policy, text, after=head[-1:], before=rendered)
    ids += [int(policy.eos_token_id)] * ended
    messages = None if isinstance(prompt, str) else tuple(prompt)
    data = Prompt("p", tuple(head), rendered, messages=messages)
    ones = (0.0,) * len(ids), (True,) * len(ids), (0,) * len(ids)
    finish: Any = "stop" if ended else "length"
    sample = Sample("s", "p", 0, tuple(head), tuple(ids), *ones, text, finish)
    return RewardInput(data, replace(sample, turns=(0,) * len(ids)))


def ids_of(encode: Encode, item: RewardInput) -> list[int]:
    prompt, response = encode(item)
    return [*prompt, *response]


@pytest.mark.parametrize("same", [True, False], ids=["policy's tokens", "other tokens"])
@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_a_published_classifier_reads_what_apply_chat_template_returns(
    family: str, same: bool
) -> None:
    reward = published_tokenizer(family)
    policy = published_tokenizer(family if same else "chatml")
    if not same:
        policy.add_tokens(["another"])
    whole, short = (
        reward_encoder(reward, policy, "rm", to_last_token=last) for last in (True, False)
    )
    item = item_of(policy, ASKED)
    rendered: Any = reward.apply_chat_template(
        [*ASKED, {"role": "assistant", "content": ANSWER}], tokenize=False
    )
    expected = reward(rendered, add_special_tokens=False)["input_ids"]
    ids, begin = ids_of(whole, item), ids_of(short, item)
    assert ids == expected
    if family in ("deepseek_r1", "qwq"):
        return  # their prompts open reasoning, which the rendering does not have
    assert ids[: len(begin)] == begin
    behind = reward.decode(ids[len(begin) :])
    newlines = ("chatml", "smollm2", "qwen3", "qwq", "gemma")
    assert behind == ("\n" if family in newlines else ""), family


@pytest.mark.parametrize("same", [True, False], ids=["policy's tokens", "other tokens"])
def test_a_row_that_fills_the_positions_ends_at_its_end_token(same: bool) -> None:
    """The line break behind it has no position. A row that does not fit without it is complete."""
    reward, policy = published_tokenizer("chatml"), published_tokenizer("chatml")
    if not same:
        policy.add_tokens(["another"])
    item = item_of(policy, ASKED)
    make = partial(reward_encoder, reward, policy, "rm", to_last_token=True)
    ids = ids_of(make(), item)
    for max_len, length in ((len(ids), 0), (len(ids) - 1, 1), (len(ids) - 2, 0)):
        found = ids_of(make(max_len=max_len), item)
        assert found == ids[: len(ids) - length], max_len
    assert reward.decode(ids[-2:]) == "<|im_end|>\n"


@pytest.mark.parametrize(
    "text", ["7", "I add.\n</think>\n\n7", "<think>\nI add.\n</think>\n\n7", ""]
)
@pytest.mark.parametrize("same", [True, False], ids=["policy's tokens", "other tokens"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("form", REASONING_FORMS)
def test_reasoning_is_read_as_the_template_renders_it(
    form: str, thinking: bool, same: bool, text: str
) -> None:
    """Behind a prompt that opens reasoning, an answer begins with the tag of it, unless the
    template writes the tag itself."""
    reward = reasoning_tokenizer(form, thinking=thinking)
    policy = reasoning_tokenizer(form, thinking=thinking) if same else published_tokenizer("chatml")
    prompt, _ = encode_prompt(reward, ASKED)
    whole = reward_encoder(reward, policy, "rm", to_last_token=True)

    def rendered(content: str) -> Any:
        answer = {"role": "assistant", "content": content}
        return reward.apply_chat_template([*ASKED, answer], tokenize=False)

    expected = rendered(text)
    opens = prompt.endswith("<think>\n") and text.startswith("I add")
    if opens and not expected.startswith(prompt):
        expected = rendered(f"<think>\n{text}")
    ids = ids_of(whole, item_of(policy, ASKED, text))
    assert ids == reward(expected, add_special_tokens=False)["input_ids"]


def test_a_conversation_that_cannot_be_rendered_follows_its_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = published_tokenizer("chatml")
    tokenizer.chat_template += (
        "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    )
    whole, short = (
        reward_encoder(tokenizer, tokenizer, "rm", to_last_token=last) for last in (True, False)
    )
    caplog.clear()
    item = item_of(tokenizer, ASKED, "no")
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert ids_of(whole, item) == [*ids_of(short, item), *newline]
    ids_of(whole, item)
    assert sum("cannot render" in message for message in caplog.messages) == 1
    caplog.clear()
    gemma = published_tokenizer("gemma")
    encode = reward_encoder(gemma, tokenizer, "rm", to_last_token=True)
    caplog.clear()
    with pytest.raises(DataError, match="system"):
        encode(item_of(tokenizer, [{"role": "system", "content": "S"}, *ASKED]))
    assert not caplog.messages  # the prompt is at fault


def test_plain_text_and_answers_that_were_cut_have_nothing_behind_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = published_tokenizer("chatml")
    with caplog.at_level(logging.WARNING, logger="burnish"):
        whole, short = (
            reward_encoder(tokenizer, tokenizer, "rm", to_last_token=last) for last in (True, False)
        )
    (notice,) = caplog.messages  # printed, and once
    assert "scores_at" in notice
    for item in (item_of(tokenizer, "What is ab?"), item_of(tokenizer, ASKED, ended=False)):
        assert ids_of(whole, item) == ids_of(short, item)
    assert ids_of(whole, item_of(tokenizer, ASKED)) != ids_of(short, item_of(tokenizer, ASKED))


def test_a_tokenizer_without_a_template_reads_text(caplog: pytest.LogCaptureFixture) -> None:
    bare, policy = byte_bpe((), eos="</s>"), published_tokenizer("chatml")
    item = item_of(policy, ASKED)
    whole, short = (reward_encoder(bare, policy, "rm", to_last_token=b) for b in (True, False))
    assert ids_of(whole, item) == ids_of(short, item)


def classifier(folder: Path, tokenizer: PreTrainedTokenizerFast, **fields: Any) -> Reward:
    """Return the reward model of a random classifier, which is saved in ``folder``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 1, num_attention_heads=2, num_labels=1, **sizes, **fields
    )
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_model_reward(
        ModelReward(model=ModelConfig(path=str(folder))),
        published_tokenizer("chatml"),
        lambda spec: TorchTrainEngine(load_scalar_model(spec.role.model), spec),
    )


def of_transformers(folder: Path, ids: list[int]) -> float:
    judge = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(judge(input_ids=torch.tensor([ids])).logits[0, 0])


def phi3() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose template writes the end-of-sequence token behind the end of the
    answer and a line break."""
    tokenizer = byte_bpe(("<|end|>", "<|user|>", "<|assistant|>"), eos="<|endoftext|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
        "{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
    )
    return tokenizer


@pytest.mark.parametrize("pads", ["eos", "another"])
@pytest.mark.parametrize("family", [*sorted(PUBLISHED), "phi3"])
def test_the_last_token_that_is_no_pad_token_is_scored(
    family: str, pads: str, tmp_path: Path
) -> None:
    """transformers' classifiers score it. TRL pads with the end token if there is no pad token."""
    tokenizer = phi3() if family == "phi3" else published_tokenizer(family)
    pad_id = int(tokenizer.eos_token_id) if pads == "eos" else len(tokenizer)
    reward = classifier(tmp_path, tokenizer, pad_token_id=pad_id)
    policy = published_tokenizer("chatml")
    rendered: Any = tokenizer.apply_chat_template(
        [*ASKED, {"role": "assistant", "content": ANSWER}], tokenize=False
    )
    conversation: Any = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    plain = item_of(policy, "What is ab?")
    text = ids_of(reward_encoder(tokenizer, policy, "rm"), plain)
    expected = [of_transformers(tmp_path, ids) for ids in (conversation, text)]
    assert reward.score([item_of(policy, ASKED), plain]) == pytest.approx(
        expected, abs=1e-5
    )  # fp32, another order


def test_a_row_of_pad_tokens_keeps_one(tmp_path: Path) -> None:
    tokenizer = published_tokenizer("chatml")
    end = int(tokenizer.eos_token_id)
    encode = reward_encoder(tokenizer, tokenizer, "rm", to_last_token=True, pad_id=end)
    sample = Sample("s", "p", 0, (end,), (end,), (0.0,), (True,), (0,), "", "stop")
    item = RewardInput(Prompt("p", (end,), tokenizer.eos_token), sample)
    assert ids_of(encode, item) == [end]


def test_the_config_of_a_classifier_decides(tmp_path: Path) -> None:
    """Its score is the model card's: the classifier on the rendered conversation. With the field of
    an export, it is that of the row up to the end token."""
    tokenizer = published_tokenizer("chatml")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=2, num_labels=1, pad_token_id=0, **sizes
    )
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    item = item_of(tokenizer, ASKED)
    scores = {}
    for name in ("published", "exported"):
        if name == "exported":
            model.config.update({"scores_at": "end_token"})
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        entry = ModelReward(model=ModelConfig(path=str(tmp_path / name)))
        reward = load_model_reward(
            entry,
            tokenizer,
            lambda spec: TorchTrainEngine(load_scalar_model(spec.role.model), spec),
        )
        (scores[name],) = reward.score([item])
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "published").eval()
    text: Any = tokenizer.apply_chat_template(
        [*ASKED, {"role": "assistant", "content": ANSWER}], tokenize=False
    )
    for name, row in (("published", text), ("exported", text.rstrip("\n"))):
        ids = tokenizer(row, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = float(judge(input_ids=ids).logits[0, 0])
        assert scores[name] == pytest.approx(expected, abs=1e-5), name  # fp32, another order
    assert abs(scores["published"] - scores["exported"]) > 1e-3  # type: ignore[operator]


def test_training_further_forgets_where_a_classifier_was_scored() -> None:
    config = LlamaConfig()
    assert scores_last_token(config.to_dict())
    config.update({"scores_at": "end_token"})
    assert not scores_last_token(config.to_dict())
    reset_head(config, 1)
    assert scores_last_token(config.to_dict())
    own: Any = SimpleNamespace(architectures=["BurnishScoreModel"])
    assert not scores_last_token(vars(own))


@pytest.mark.parametrize(
    "field", ["reward_mean", "reward_std", "reward_weights", "process_reward", "step_separator"]
)
def test_exports_of_older_versions_are_read_as_before(field: str) -> None:
    config = LlamaConfig()
    config.update({field: None})
    assert scores_last_token(config.to_dict())
    config.update({field: 0})  # a mean may be 0
    assert not scores_last_token(config.to_dict())
    config.update({"scores_at": "last_token"})
    assert scores_last_token(config.to_dict())
