"""Reward models with another tokenizer than the policy's: rows as ``burnish rm`` trains on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_families import byte_bpe
from chat_templates import published_tokenizer, trl_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from burnish.config.model import ModelConfig
from burnish.data.batches import load_batch
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.rated.config import ScoresDataConfig
from burnish.episodes.probing import TOOLS, call
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.model.config import ModelReward
from burnish.rewards.model.reward import ModelScorer, load_model_reward, step_ends
from burnish.rewards.model.rows import RowEncoder, SampledRows, encode_text, reward_encoder
from burnish.serve.base import ServeOptions
from burnish.serve.scorer import TextScorer
from burnish.special_tokens import set_configured_ends
from burnish.transcript import Episode, Turn
from burnish.types import Group

MakeGroup = Callable[..., Group]
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?:.<|>/\n"


@pytest.fixture
def own() -> PreTrainedTokenizerFast:
    """SentencePiece-style: a space before any text, ``<s>`` in front and ``</s>`` behind. ``_a``
    and ``ab`` merge."""
    vocab = ["<unk>", "<s>", "</s>", "\u2581", *LETTERS, "\u2581a", "ab"]
    ids = {token: i for i, token in enumerate(vocab)}
    merges = [("\u2581", "a"), ("a", "b")]
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _training_row(
    folder: Path, tokenizer: PreTrainedTokenizerFast, prompt: Any, response: str
) -> tuple[list[int], list[int]]:
    """(prompt, response) of the row that ``burnish rm`` trains on."""
    path = folder / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "chosen": response, "rejected": "no"}))
    config = PreferenceDataConfig(sources=(str(path),))  # type: ignore[arg-type]
    batch = load_batch(config, tokenizer)
    ids = batch.tokens[: int(batch.offsets[1])].tolist()
    begin = int(batch.prompt_lens[0])
    return ids[:begin], ids[begin:]


def _item(make_group: MakeGroup, prompt: Any, text: str, finish: str = "stop") -> RewardInput:
    """The policy's markup is ``[user]...`` if the prompt consists of messages."""
    group = make_group(0, [text], finish=finish)
    chat = not isinstance(prompt, str)
    policy_text = "".join(f"[{m['role']}]{m['content']}" for m in prompt) if chat else prompt
    own_prompt = replace(group.prompt, text=policy_text, messages=tuple(prompt) if chat else None)
    return RewardInput(own_prompt, group.samples[0])


@pytest.mark.parametrize(
    "prompt",
    ["what is a?", [{"role": "system", "content": "be b"}, {"role": "user", "content": "a?"}]],
    ids=["text", "messages"],
)
def test_a_row_is_scored_as_it_was_trained_on(
    prompt: Any, own: PreTrainedTokenizerFast, make_group: MakeGroup, tmp_path: Path
) -> None:
    encode = RowEncoder(own, "rm")
    expected = _training_row(tmp_path, own, prompt, "about ab")
    found = encode(_item(make_group, prompt, "about ab"))
    assert (list(found[0]), list(found[1])) == expected
    assert own.eos_token_id not in expected[0][-1:] and expected[1][-1] == own.eos_token_id
    cut_off = encode(_item(make_group, prompt, "about ab", finish="length"))
    assert (list(cut_off[0]), list(cut_off[1])) == (expected[0], expected[1][:-1])


@pytest.mark.parametrize("prompt", ["what is a?", [{"role": "user", "content": "a?"}]])
@pytest.mark.parametrize("text", ["about<end>ab", "about<end>", "about</s>ab", "<end>"])
def test_what_follows_an_end_token_of_the_model_is_not_scored(
    prompt: Any, text: str, own: PreTrainedTokenizerFast, make_group: MakeGroup, tmp_path: Path
) -> None:
    """As it is not trained. ``<end>`` is named in the model's generation config alone."""
    own.add_special_tokens({"additional_special_tokens": ["<end>"]})
    set_configured_ends(own, [2, own.convert_tokens_to_ids("<end>")])
    expected = _training_row(tmp_path, own, prompt, text)
    item = _item(make_group, prompt, text)
    head = own(item.prompt.text, add_special_tokens=False)["input_ids"]
    ids = [*own(text, add_special_tokens=False)["input_ids"], own.eos_token_id]
    sample = replace(
        item.sample,
        prompt_ids=tuple(head),
        response_ids=tuple(ids),
        sampler_logprobs=(0.0,) * len(ids),
        action_mask=(True,) * len(ids),
        versions=(0,) * len(ids),
    )
    for encode in (RowEncoder(own, "rm"), SampledRows(RowEncoder(own, "rm"))):
        row = encode(replace(item, sample=sample))
        assert (list(row[0]), list(row[1])) == expected
        end = "</s>" if "</s>" in text else "<end>"
        assert own.convert_ids_to_tokens(row[1][-1]) == end


def test_a_conversation_without_a_template_is_the_policys_text_and_this_is_logged_once(
    own: PreTrainedTokenizerFast, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    own.chat_template = None
    encode = RowEncoder(own, "rm")
    item = _item(make_group, [{"role": "user", "content": "a?"}], "b")
    assert encode(item) == encode(item) == encode_text(own, "[user]a?", "b", ended=True)
    assert [r.getMessage()[:43] for r in caplog.records] == [
        "reward 'rm': prompts are conversations but "
    ]


def test_an_episode_is_rendered_up_to_its_last_response(
    own: PreTrainedTokenizerFast, make_group: MakeGroup, tmp_path: Path
) -> None:
    """The environment's own first message, not the data row, and no answer after the last turn."""
    talk = [
        {"role": r, "content": c} for r, c in [("user", "a?"), ("assistant", "b"), ("tool", "c")]
    ]
    turns = (
        Turn(talk[1], (talk[2],)),
        Turn({"role": "assistant", "content": "about ab"}, (talk[2],)),
    )
    item = _item(make_group, "17", "about ab")
    sample = replace(item.sample, episode=Episode("max_turns", tuple(talk[:1]), turns=turns))
    found = RowEncoder(own, "rm")(replace(item, sample=sample))
    expected = _training_row(tmp_path, own, talk, "about ab")
    assert (list(found[0]), list(found[1])) == expected
    own.chat_template = None
    with pytest.raises(RewardError, match="has no chat template, which the conversations"):
        RowEncoder(own, "rm")(replace(item, sample=sample))


def test_a_turn_without_a_chat_template_is_read_as_a_single_response_or_as_plain_text(
    own: PreTrainedTokenizerFast, make_group: MakeGroup
) -> None:
    """A call whose text is the prompt of the data, and one whose text the agent wrote."""
    encode = RowEncoder(own, "rm")
    item = _item(make_group, [{"role": "user", "content": "a?"}], "b")
    for start, prompt_ids in ((item.prompt.text, item.prompt.token_ids), ("what", (1, 2, 3))):
        turn = Turn({"role": "assistant", "content": "b"}, (), is_text=True)
        record = Episode("done", ({"role": "user", "content": start},), turns=(turn,))
        sample = replace(item.sample, prompt_ids=prompt_ids, episode=record)
        plain = encode_text(own, start, "b", ended=True)
        expected = plain if start == "what" else encode(item)
        assert encode(replace(item, sample=sample)) == expected


REJECTS = (
    "{% for m in messages %}{% if 'STOP' in m.content %}{{ raise_exception('no ' + m.content) }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_an_answer_that_the_template_rejects_follows_the_prompt(
    own: PreTrainedTokenizerFast, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy may write any text, and one response must not end a run. A conversation that is
    rejected before its answer is a failure of that sample, by the failure policy."""
    own.chat_template = REJECTS
    encode = RowEncoder(own, "rm")
    encode.check()
    question = [{"role": "user", "content": "a?"}]
    head, response = encode(_item(make_group, question, "STOP b"))
    plain = encode_text(own, "[user]a?</s>[assistant]", "STOP b", ended=True)
    assert (head, response) == (plain[0][1:], plain[1])  # the template writes no begin token
    encode(_item(make_group, question, "b STOP"))
    assert len(caplog.records) == 1 and "no STOP b" in caplog.records[0].getMessage()
    scorer = ModelScorer("rm", None, encode)  # type: ignore[arg-type]
    items = [_item(make_group, [{"role": "user", "content": "STOP"}], "b")]
    items += [_item(make_group, question, "b")]
    failed, score = scorer.score_pairs(items, lambda pairs: [2.0] * len(pairs))
    assert isinstance(failed, SampleError) and "no STOP" in str(failed) and score == 2.0


def test_a_template_that_writes_no_answer_is_found_when_the_reward_is_built(
    own: PreTrainedTokenizerFast,
) -> None:
    own.chat_template = (
        "{% for m in messages if m.role == 'user' %}[user]{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RewardError, match="its chat template cannot write an answer"):
        reward_encoder(own, own, "rm")


def test_a_server_encodes_a_query_as_its_model_was_trained(
    own: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The response's end token is text in the query; a begin token that a template wrote is kept
    once."""
    scorer = TextScorer(None, own, ServeOptions(), max_len=99)  # type: ignore[arg-type]
    prompt, response = _training_row(tmp_path, own, "what is a?", "about ab")
    row = scorer.encode("what is a?about ab</s>", "what is a?")
    assert list(row.ids) == [*prompt, *response]
    templated = scorer.encode("<s>what is a?about ab", "<s>what is a?").ids
    assert templated.count(own.bos_token_id) == 1 and own.eos_token_id not in templated


def test_no_reader_of_a_response_reads_text_behind_its_end_token(
    own: PreTrainedTokenizerFast, make_group: MakeGroup
) -> None:
    """Not a server, and no reward of a plain text, of a conversation, or of steps."""
    scorer = TextScorer(None, own, ServeOptions(), max_len=99)  # type: ignore[arg-type]
    ends, longer = "ab</s>", "ab</s> and what is a?</s>"
    rows = [scorer.encode(f"a?{text}", "a?").ids for text in (ends, longer)]
    assert rows[0] == rows[1] and rows[0][-1] == own.eos_token_id
    for prompt in ("a?", [{"role": "user", "content": "a?"}]):
        for continues in (False, True):
            encode = RowEncoder(own, "rm", continues=continues)
            pairs = [encode(_item(make_group, prompt, text)) for text in (ends, longer)]
            assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    ("changes", "read_as_sampled"),
    [
        ({}, True),
        ({"chat_template": CHATML.replace("</s>", "<s>")}, False),
        ({"eos_token": "<s>"}, False),
        ({"add_bos": False}, False),
        ({"chat_template": None}, False),
    ],
)
def test_token_ids_of_a_policy_are_scored_only_if_the_models_rows_have_its_form(
    changes: dict[str, Any], read_as_sampled: bool, own: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    own.save_pretrained(tmp_path)
    config = LlamaConfig(vocab_size=64, hidden_size=8, num_attention_heads=1)
    config.update({"scores_at": "end_token"})
    config.save_pretrained(tmp_path)
    if not changes.get("add_bos", True):
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    for name, value in changes.items():
        setattr(own, name, value)
    entry = ModelReward(model=ModelConfig(path=str(tmp_path)))
    reward = load_model_reward(entry, own, lambda spec: SimpleNamespace(spec=spec))  # type: ignore[arg-type, return-value]
    assert isinstance(reward.encode, SampledRows) == read_as_sampled


@pytest.mark.parametrize("same", [True, False])
def test_a_response_keeps_the_special_token_that_separates_its_steps(
    own: PreTrainedTokenizerFast, make_group: MakeGroup, same: bool
) -> None:
    """The text of the sample lacks it. ``same``: the policy has the tokens of the reward model."""
    token = AddedToken("<step>", special=True, normalized=False)
    policy = deepcopy(own)
    policy.chat_template = own.chat_template if same else CHATML.replace("</s>", "\n")
    policy.add_tokens([token]), own.add_tokens([token])
    item = _item(make_group, [{"role": "user", "content": "a?"}], "abc")
    ids = policy("a<step>bc", add_special_tokens=False)["input_ids"] + [own.eos_token_id]
    n = len(ids)
    sampled = replace(
        item.sample,
        response_ids=tuple(ids),
        action_mask=(True,) * n,
        versions=(0,) * n,
        sampler_logprobs=(0.0,) * n,
        turns=(0,) * n,
    )
    item = replace(item, sample=sampled)
    _, response = reward_encoder(own, policy, "rm", step_separator="<step>")(item)
    assert own.decode(response).replace(" ", "") == "a<step>bc</s>"
    assert len(step_ends(own, response, "<step>")) == 2


def test_sampled_ids_without_an_embedding_are_not_read(
    own: PreTrainedTokenizerFast, make_group: MakeGroup
) -> None:
    """Padded vocabularies differ in size between models of one family."""
    item = _item(make_group, "a?", "abc")
    n, beyond = len(item.sample.response_ids), len(own) + 5
    sampled = replace(item.sample, response_ids=(beyond,) * (n - 1) + (own.eos_token_id,))
    head, response = reward_encoder(own, own, "rm")(replace(item, sample=sampled))
    assert max(*head, *response) < len(own)
    assert own.decode(response, skip_special_tokens=True) == "abc"


def test_a_reward_model_is_trained_on_what_a_reward_reads_of_generated_rows(
    tmp_path: Path,
) -> None:
    """Qwen3 answers without reasoning get an empty block; an episode is read to its last answer."""
    tokenizer = published_tokenizer("qwen3")
    tool_loop = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "second"},
    ]
    ids = [*tokenizer("hello", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    asked = [{"role": "user", "content": "seed 7"}]
    rows = [
        {"prompt": asked, "response": "hello", "response_tokens": ids, "finish_reason": "stop"},
        {"prompt": asked, "messages": tool_loop, "status": "done", "turns": 2},
    ]
    for row, messages in zip(rows, ([*asked, {"content": "hello"}], tool_loop), strict=True):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row | {"score": 1.0}))
        config = ScoresDataConfig(kind="scores", sources=(str(path),), score_keys=("score",))  # type: ignore[arg-type]
        text = tokenizer.decode(load_batch(config, tokenizer).tokens)
        rendered = tokenizer.apply_chat_template(
            [*messages[:-1], {"role": "assistant", "content": messages[-1]["content"]}],
            tokenize=False,
        )
        assert text == rendered.rstrip("\n")
        assert "<think>\n\n</think>" in text


def test_a_response_keeps_the_space_behind_a_prompt_of_text(
    own: PreTrainedTokenizerFast, make_group: MakeGroup
) -> None:
    """Decoded alone, ``▁a b`` is ``a b``; behind ``is`` it is `` a b``. A reward model with other
    tokens reads ``is a b``, not ``isa b``."""
    other = byte_bpe((), eos="</s>")
    item = _item(make_group, "what is", "a b")
    head, ids = own("what is")["input_ids"][:-1], own(" a b")["input_ids"][1:]
    sample = replace(
        item.sample,
        prompt_ids=tuple(head),
        response_ids=tuple(ids),
        sampler_logprobs=(0.0,) * len(ids),
        action_mask=(True,) * len(ids),
        versions=(0,) * len(ids),
    )
    assert own.decode(ids, skip_special_tokens=True) == sample.text
    for tokenizer in (other, own):
        prompt, response = reward_encoder(tokenizer, own, "rm")(replace(item, sample=sample))
        text = tokenizer.decode([*prompt, *response], skip_special_tokens=True)
        assert text == "what is a b"


MESSAGE = {"role": "assistant", "content": "b", "reasoning_content": "c"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("<think>c</think>b", {"message": MESSAGE}, "renders no reasoning"),
        ("b", {"tools": [TOOL]}, "does not render tools"),
    ],
)
def test_parts_that_the_template_of_a_reward_model_leaves_out_are_logged_once(
    text: str,
    options: dict[str, Any],
    said: str,
    own: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reasoning is that of a message; in a text, it is read."""
    encode = RowEncoder(own, "rm")
    question = [{"role": "user", "content": "a?"}]
    plain = encode.of_messages(question, "b")
    assert not caplog.records
    for _ in range(2):
        assert encode.of_messages(question, text, **options) == plain
    assert [r.getMessage().split(",")[0] for r in caplog.records] == [
        f"reward 'rm': its chat template {said}"
    ]


def test_an_answer_has_its_form_if_the_history_is_rendered_in_another() -> None:
    """gpt-oss leaves out the reasoning of a call once the final answer follows, so that no row has
    both. The prompt is the one of generation, and the answer has its channels."""
    pytest.importorskip("trl")
    tokenizer = trl_tokenizer("gptoss")
    called = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    history = [
        {"role": "user", "content": "2+2?"},
        called | {"tool_calls": [call("look_up", {"key": "a"}, "probe0000")]},
        {"role": "tool", "content": "4", "tool_call_id": "probe0000"},
    ]
    message = {"role": "assistant", "content": "It is 4.", "reasoning_content": "so"}
    encode = RowEncoder(tokenizer, "rm")
    head, response = encode.of_messages(history, "so It is 4.", tools=TOOLS, message=message)
    assert tokenizer.decode(head).endswith("<|end|><|start|>assistant")
    thought = "<|channel|>analysis<|message|>so<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
    assert tokenizer.decode(response) == thought + final
