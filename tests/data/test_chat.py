"""Ids are exactly those of the parts, and the mask covers the assistant's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from burnish.data.chat import (
    check_tokenizer,
    encode_completion,
    encode_conversation,
    encode_prompt,
)
from burnish.data.messages import as_messages
from burnish.data.notices import collecting
from burnish.data.sources import DataError

Tok = PreTrainedTokenizerFast


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def plain(tokenizer: Tok, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def trained_text(tokenizer: Tok, ids: list[int], mask: list[bool]) -> list[str]:
    """Text of each run of trained tokens."""
    runs: list[list[int]] = []
    for i, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on and (i == 0 or not mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_the_response_is_tokenized_separately_if_bpe_would_merge_across_the_border(
    bpe: Tok,
) -> None:
    """``ab`` is one token of this tokenizer. The model that reads ``a`` writes ``b`` next, not half
    a token."""
    assert len(plain(bpe, "ab")) == 1
    _, prompt_ids = encode_prompt(bpe, "the cat a")
    ids, mask = encode_completion(bpe, prompt_ids, "b")
    assert ids == [*plain(bpe, "the cat a"), *plain(bpe, "b"), bpe.eos_token_id]
    assert ids[:-1] != plain(bpe, "the cat ab")
    assert mask == [False] * len(prompt_ids) + [True, True]


def test_an_assistant_turn_is_tokenized_separately_if_bpe_would_merge_across_the_border(
    bpe: Tok,
) -> None:
    """``:b`` merges in this tokenizer, so the template's ``A:`` and an answer ``b`` would share a
    token."""
    bpe.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}Q:{{ m['content'] }}\n"
        "{% else %}A:{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    messages = [user("x"), assistant("b")]
    ids, mask = encode_conversation(bpe, messages)
    pieces = [plain(bpe, text) for text in ("Q:x\nA:", "b<|end|>", "\n")]
    assert ids == pieces[0] + pieces[1] + pieces[2]
    assert ids != plain(bpe, "Q:x\nA:b<|end|>\n")
    assert mask == [False] * len(pieces[0]) + [True, True] + [False]
    assert ids[: len(pieces[0])] == encode_prompt(bpe, messages[:1])[1]


def test_every_assistant_turn_is_trained_exactly_up_to_its_end_token(chars: Tok) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        user("1+1"),
        assistant("2"),
        user("2+2"),
        assistant("4"),
    ]
    ids, mask = encode_conversation(chars, messages)
    text = chars.apply_chat_template(messages, tokenize=False)
    assert ids == plain(chars, text)
    assert trained_text(chars, ids, mask) == ["2<|im_end|>", "4<|im_end|>"]


def test_turns_before_the_first_trained_one_count_as_prompt(chars: Tok) -> None:
    messages = [user("1+1"), assistant("2"), user("2+2"), assistant("4")]
    ids, mask = encode_conversation(chars, messages, trained_from=3)
    assert trained_text(chars, ids, mask) == ["4<|im_end|>"]
    assert ids[: mask.index(True)] == encode_prompt(chars, messages[:3])[1]


def test_a_turn_is_trained_up_to_another_special_end_token(chars: Tok) -> None:
    chars.chat_template = chars.chat_template.replace("<|im_end|>", "<|eot|>")
    ids, mask = encode_conversation(chars, [user("1+1"), assistant("2")])
    assert trained_text(chars, ids, mask) == ["2<|eot|>"]
    assert not mask[-1] and chars.decode(ids[-1:]) == "\n"


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot|>"])  # the second one is not EOS
@pytest.mark.parametrize(
    ("answer", "trained", "counted"),
    [
        ("2{end}3", "2{end}", True),
        ("2{end} {end}3", "2{end}", True),
        ("2{end}", "2{end}", False),
        ("2{end} \n", "2{end}", False),
        ("2 3", "2 3{end}", False),
    ],
)
def test_text_behind_an_end_token_inside_an_answer_is_counted_and_not_trained(
    chars: Tok, end: str, answer: str, trained: str, counted: bool
) -> None:
    """Sampling stops at the token, so the text behind it is never part of a response."""
    chars.chat_template = chars.chat_template.replace("<|im_end|>", end)
    text = answer.format(end=end)
    with collecting() as notices:
        ids, mask = encode_conversation(chars, [user("1+1"), assistant(text)])
    assert trained_text(chars, ids, mask) == [trained.format(end=end)]
    assert ("text_after_end" in notices) == counted
    if end == chars.eos_token:
        with collecting() as notices:
            ids, mask = encode_completion(chars, plain(chars, "1+1="), text)
        assert trained_text(chars, ids, mask) == [trained.format(end=end)]
        assert ("text_after_end" in notices) == counted


def test_a_continuation_gets_no_leading_space(metaspace: Tok) -> None:
    r"""This tokenizer reads ``a`` as ``▁a``; behind ``x:\n`` the answer ``abc`` begins with a bare
    ``a``."""
    _, prompt_ids = encode_prompt(metaspace, "x:\n")
    ids, mask = encode_completion(metaspace, prompt_ids, "abc")
    tokens = metaspace.convert_ids_to_tokens(ids)
    assert tokens == ["\u2581x", ":", "\n", "a", "b", "c", "</s>"]
    assert mask == [False] * 3 + [True] * 4
    spaced, _ = encode_completion(metaspace, prompt_ids, " abc")
    assert metaspace.convert_ids_to_tokens(spaced)[3:] == ["\u2581a", "b", "c", "</s>"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% else %}</s>{% endif %}",
        "{% for m in messages %}{% if m['role'] == 'user' %}x: {{ m['content'] }} c:"
        "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}",
        "{% for m in messages %}[{{ m['role'] }}]\n"
        "{% if loop.last and m['role'] == 'assistant' %}a\n\n{% endif %}"
        "{{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}",
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    ],
    ids=["text behind the last turn", "nothing behind turns", "begin of the last turn", "no lines"],
)
def test_the_text_between_turns_has_the_tokens_of_the_prompt(metaspace: Tok, template: str) -> None:
    """Also for tokenizers that prepend a space to the text after each special token, and whatever
    the template writes after a turn. The first answer after a special token has that space."""
    metaspace.add_special_tokens({"additional_special_tokens": ["[user]", "[assistant]"]})
    metaspace.chat_template = template
    messages = [user("ab"), assistant("a"), user("b"), assistant("ac")]
    ids, mask = encode_conversation(metaspace, messages)
    _, prompt = encode_prompt(metaspace, messages[:3], apply_chat_template=True)
    assert ids[: len(prompt)] == prompt
    assert not any(mask[len(prompt) - 1 : len(prompt)]) and mask[len(prompt)]
    whole = metaspace.apply_chat_template(messages, tokenize=False)
    assert ids == plain(metaspace, whole)[: len(ids)]


def test_a_plain_prompt_has_special_tokens_only_at_its_start(chars: Tok) -> None:
    text, ids = encode_prompt(chars, "1+1=")
    assert (text, ids) == ("1+1=", [chars.bos_token_id, *plain(chars, "1+1=")])
    chars.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>",
        special_tokens=[("<s>", chars.bos_token_id), ("<|im_end|>", chars.eos_token_id)],
    )
    assert chars("1+1=")["input_ids"][-1] == chars.eos_token_id
    assert encode_prompt(chars, "1+1=")[1] == ids


def test_a_templated_prompt_ends_where_the_assistant_begins_and_has_no_second_bos(
    chars: Tok,
) -> None:
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    expected += "<|im_start|>assistant\n"
    for prompt in ("hi", [user("hi")]):
        text, ids = encode_prompt(chars, prompt, system_prompt="be brief", apply_chat_template=True)
        assert text == expected
        assert ids == plain(chars, expected) and chars.bos_token_id not in ids


def test_the_end_token_is_added_once_and_only_if_requested(chars: Tok) -> None:
    end = chars.eos_token_id
    assert encode_completion(chars, [7], "2<|im_end|>")[0] == [7, *plain(chars, "2"), end]
    assert encode_completion(chars, [7], "2")[0] == [7, *plain(chars, "2"), end]
    assert encode_completion(chars, [7], "2", add_eos=False)[0] == [7, *plain(chars, "2")]


def test_message_keys_without_a_value_are_dropped() -> None:
    """Parquet gives every message every key; ``content: None`` is no content, and messages are
    equal whether or not they list ``tool_calls: None``."""
    assert as_messages([{**user("hi"), "tool_calls": None}]) == [user("hi")]
    with pytest.raises(DataError, match="has no `content`"):
        as_messages([{"role": "user", "content": None}])


def test_a_pad_token_is_not_needed(bpe: Tok) -> None:
    assert bpe.pad_token is None
    check_tokenizer(bpe)


def test_a_tokenizer_without_end_token_is_refused_with_a_fix(chars: Tok) -> None:
    chars.eos_token = None
    for use in (check_tokenizer, lambda t: encode_completion(t, [7], "2")):
        with pytest.raises(DataError, match=r"no end-of-sequence token.*model\.tokenizer_path"):
            use(chars)


def test_a_missing_chat_template_is_refused_with_a_fix(bpe: Tok) -> None:
    with pytest.raises(DataError, match=r"no chat template.*model\.chat_template"):
        encode_prompt(bpe, [user("hi")])
    with pytest.raises(DataError, match=r"no chat template.*apply_chat_template: false"):
        encode_prompt(bpe, "hi", apply_chat_template=True)


def test_a_template_that_rewrites_earlier_turns_is_refused(chars: Tok) -> None:
    """Like templates that drop the reasoning of all but the last answer."""
    chars.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if loop.last %}think {% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match=r"the last trained answer differently.*only appends"):
        encode_conversation(chars, [user("1+1"), assistant("2")])


def test_a_template_that_refuses_a_conversation_is_quoted(chars: Tok) -> None:
    chars.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(DataError, match=r"rejects .*roles: user.*no system role here"):
        encode_prompt(chars, [user("hi")])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([user("hi")], r"\(roles: user\)"),
        ([assistant("hi")], "user message"),
        ([], "messages, got"),
        (["hi"], "'hi'"),
        ([{"content": "hi"}], r"a chat message must be an object"),
        ([{"role": "user"}], r"has no `content`"),
        (3, "expected"),
    ],
)
def test_an_unusable_conversation_is_refused_with_the_reason(
    chars: Tok, messages: Any, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        encode_conversation(chars, messages)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("hi", "apply_chat_template"),
        ([{"role": "system", "content": "x"}, user("hi")], r"already begins with a system"),
        ([user("hi"), assistant("ho")], "assistant"),
    ],
)
def test_a_prompt_without_room_for_a_system_prompt_is_refused_with_the_reason(
    chars: Tok, prompt: Any, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        encode_prompt(chars, prompt, system_prompt="be brief")


def test_a_system_prompt_that_the_messages_begin_with_is_rendered_once(chars: Tok) -> None:
    begun = encode_prompt(chars, [{"role": "system", "content": "x"}, user("hi")])
    for begin in ([], [{"role": "system", "content": [{"type": "text", "text": "x"}]}]):
        assert encode_prompt(chars, [*begin, user("hi")], system_prompt="x") == begun


@pytest.mark.parametrize("text", ["1+1=", "<s>1+1=", ""])
def test_special_tokens_after_a_prompt_are_dropped(chars: Tok, text: str) -> None:
    """The tokenizer appends ``<|eot|>``, which is not its ``eos_token``: a prompt that ended with
    it would be finished before the model answers."""
    ids = chars.convert_tokens_to_ids
    wanted = [ids("<s>"), *(ids(c) for c in text.removeprefix("<s>"))]
    chars.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|eot|>", special_tokens=[(t, ids(t)) for t in ("<s>", "<|eot|>")]
    )
    assert encode_prompt(chars, text)[1] == wanted
