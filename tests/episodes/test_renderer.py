"""The next prompt is the previous one, the sampled ids, and the ids of nothing but the new text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_families import (
    FAMILIES,
    TODAY,
    Ids,
    byte_bpe,
    chat_tokenizer,
    encoded,
    kept,
    rendered,
    renderer_of,
)
from chat_templates import named_tokenizer, published_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.chat import encode_conversation, encode_prompt
from burnish.data.sources import DataError
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.probing import (
    CONVERSATIONS,
    TOOLS,
    ProbeConversation,
    assistant,
    call,
    result,
    user,
)
from burnish.episodes.renderer import ChatRenderer, RendererError

APPEND_ONLY = ("chatml", "llama3", "xml")
REWRITING = ("chatml_drops", "harmony", "mistral")


def turn_ids(
    renderer: ChatRenderer, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: Ids
) -> Ids:
    """Ids with which a policy would write the last message: the rest of the rendering, up to its
    end token if it has one."""
    ids = list(encoded(renderer._tokenizer, rendered(renderer, messages, tools, answered=True)))
    assert ids[: len(prompt)] == list(prompt)
    turn = ids[len(prompt) :]
    ends = [i for i, token in enumerate(turn) if token in renderer.stop_token_ids]
    return tuple(turn[: ends[-1] + 1] if ends else turn)


def bridged(renderer: ChatRenderer, conversation: ProbeConversation) -> Ids:
    """Play the conversation turn by turn, as an episode does."""
    messages, tools = conversation.messages, conversation.tools
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = renderer.render(messages[: turns[0]], tools)
    for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        sampled = turn_ids(renderer, messages[: turn + 1], tools, prompt)
        before = prompt + sampled
        prompt = renderer.bridge(prompt, sampled, messages[turn + 1 : following], tools)
        assert prompt[: len(before)] == before and len(prompt) > len(before)
    return prompt


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridged_prompt_equals_a_complete_rendering_token_for_token(
    family: str, conversation: ProbeConversation
) -> None:
    renderer, tokenizer = renderer_of(family)
    if conversation.name in renderer.rejected:
        with pytest.raises((RendererError, DataError)):
            bridged(renderer, conversation)
        return
    if conversation.name in {found.conversation for found in renderer.differences}:
        assert family in REWRITING
        return
    text = rendered(renderer, conversation.messages, conversation.tools, answered=False)
    assert bridged(renderer, conversation) == encoded(tokenizer, text)


def test_templates_that_only_append_are_recognized() -> None:
    assert set(APPEND_ONLY) | set(REWRITING) == set(FAMILIES)
    for family in APPEND_ONLY:
        renderer = ChatRenderer(chat_tokenizer(family))
        assert renderer.append_only and renderer.history == "keep"
    llama, _ = renderer_of("llama3")
    assert list(llama.rejected) == ["several calls in one turn"]


def test_a_template_that_drops_reasoning_needs_a_choice_and_the_error_shows_the_difference() -> (
    None
):
    with pytest.raises(RendererError) as caught:
        ChatRenderer(chat_tokenizer("chatml_drops"))
    message = str(caught.value)
    assert "'reasoning and a second user message', at character 54" in message
    assert r"assistant\n<think>\nTwo and two.\n</think>" in message
    assert r"assistant\n4<|im_end|>" in message
    assert "history: keep" in message and "history: template" in message


@pytest.mark.parametrize(
    ("family", "conversation"),
    [
        ("chatml_drops", "reasoning and a second user message"),
        ("mistral", "tools and a second user message"),
        ("harmony", "several user turns"),
    ],
)
def test_the_first_difference_names_the_conversation(family: str, conversation: str) -> None:
    renderer, _ = renderer_of(family)
    assert not renderer.append_only
    assert renderer.differences[0].conversation == conversation


@pytest.mark.parametrize("ref", ["#", "#/nowhere", "http://localhost:1/x", "data:,{}"])
def test_a_reference_in_a_tool_that_cannot_be_resolved_is_an_error(ref: str) -> None:
    """``#`` refers to itself without end. No URL is read, not even one that needs no network."""
    renderer, _ = renderer_of("chatml")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"$ref": ref}}}
    with pytest.raises(RendererError, match="'look_up' are not a JSON schema"):
        renderer.render([user("Go.")], [tool])


def test_a_result_with_an_id_that_is_no_text_is_accepted() -> None:
    renderer, _ = renderer_of("chatml")
    prompt = renderer.render([user("Go.")])
    new = [{"role": "tool", "content": "1", "tool_call_id": {}}]
    assert len(renderer.bridge(prompt, (), new)) > len(prompt)


def test_an_unknown_history_is_an_error() -> None:
    with pytest.raises(RendererError, match="history is 'drop'; use keep"):
        ChatRenderer(chat_tokenizer("chatml"), history="drop")  # type: ignore[arg-type]


# ---- sampled tokens stay, and rendering again would change them ---------------------------------


def naive(
    renderer: ChatRenderer,
    messages: Sequence[Mapping[str, Any]],
    sampled: Ids,
    new: Sequence[Mapping[str, Any]],
    tools: Any = (),
) -> Ids:
    """The next prompt by parsing the response and rendering all messages again."""
    answer = renderer.parse(sampled, tools).message
    text = rendered(renderer, [*messages, answer, *new], tools, answered=False)
    return encoded(renderer._tokenizer, text)


def test_double_spaces_in_the_arguments_of_a_call_are_kept() -> None:
    renderer, tokenizer = renderer_of("chatml")
    messages = [user("How many?")]
    prompt = renderer.render(messages, TOOLS)
    text = '<tool_call>\n{"limit":  2,  "name": "look_up", "arguments": {"key":"a"}}\n</tool_call>'
    text = text.replace('"limit":  2,  ', "")
    sampled = encoded(tokenizer, text.replace('"key":', '"key":  ') + "<|im_end|>")
    new = [result("12", "look_up", "probe0000")]
    following = renderer.bridge(prompt, sampled, new, TOOLS)
    assert kept(prompt, sampled, following)
    assert not kept(prompt, sampled, naive(renderer, messages, sampled, new, TOOLS))
    tail = "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
    tail += "<|im_start|>assistant\n"
    assert following[len(prompt) + len(sampled) :] == encoded(tokenizer, tail)


def test_another_tokenization_of_the_same_text_is_kept() -> None:
    """One token per character decodes to the same text as the merged tokens."""
    renderer, tokenizer = renderer_of("chatml")
    messages = [user("Hi.")]
    prompt = renderer.render(messages)
    letters = tuple(i for letter in "Hello." for i in encoded(tokenizer, letter))
    end = encoded(tokenizer, "<|im_end|>")
    assert letters != encoded(tokenizer, "Hello.")
    assert tokenizer.decode(letters) == "Hello."
    following = renderer.bridge(prompt, letters + end, [user("And?")])
    assert kept(prompt, letters + end, following)
    again = naive(renderer, messages, letters + end, [user("And?")])
    assert not kept(prompt, letters + end, again)
    assert tokenizer.decode(again) == tokenizer.decode(following)


def test_reasoning_that_the_template_drops_is_kept() -> None:
    renderer, tokenizer = renderer_of("chatml_drops")
    messages = [user("2+2?")]
    prompt = renderer.render(messages)
    sampled = encoded(tokenizer, "<think>\nTwo and two.\n</think>\n\n4<|im_end|>")
    following = renderer.bridge(prompt, sampled, [user("3+3?")])
    assert kept(prompt, sampled, following)
    again = naive(renderer, messages, sampled, [user("3+3?")])
    assert not kept(prompt, sampled, again)
    assert "Two and two." not in tokenizer.decode(again)


def test_a_tools_block_in_the_last_user_message_is_written_again() -> None:
    """The template moves the tools to the last user message; kept history has them twice."""
    renderer, tokenizer = renderer_of("mistral")
    prompt = renderer.render([user("Hi.")], TOOLS)
    sampled = encoded(tokenizer, "Hello.</s>")
    following = renderer.bridge(prompt, sampled, [user("How many?")], TOOLS)
    assert kept(prompt, sampled, following)
    text = tokenizer.decode(following)
    assert text.count("[AVAILABLE_TOOLS]") == 2
    assert text.endswith("How many?[/INST]")


# ---- a response without an end token -------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "closing"),
    [
        ("chatml", "<|im_end|>\n<|im_start|>user"),
        ("llama3", "<|eot_id|><|start_header_id|>user"),
        ("mistral", "</s>[INST]"),
        ("harmony", "<|end|><|start|>user"),
    ],
)
def test_closing_tokens_follow_a_response_cut_by_the_length_limit(
    family: str, closing: str
) -> None:
    renderer, tokenizer = renderer_of(family)
    prompt = renderer.render([user("Tell me.")])
    sampled = encoded(tokenizer, "Once upon")
    following = renderer.bridge(prompt, sampled, [user("Go on.")])
    assert kept(prompt, sampled, following)
    assert tokenizer.decode(following[len(prompt) + len(sampled) :]).startswith(closing)


def test_closing_tokens_follow_a_tool_call_cut_by_the_length_limit() -> None:
    renderer, tokenizer = renderer_of("chatml")
    prompt = renderer.render([user("How many?")], TOOLS)
    sampled = encoded(tokenizer, '<tool_call>\n{"name": "look')
    following = renderer.bridge(prompt, sampled, [result("?", "look_up", "probe0000")], TOOLS)
    tail = tokenizer.decode(following[len(prompt) + len(sampled) :])
    assert tail.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n?")


def test_an_empty_response_is_closed() -> None:
    renderer, tokenizer = renderer_of("chatml")
    prompt = renderer.render([user("Hi.")])
    following = renderer.bridge(prompt, (), [user("Well?")])
    assert tokenizer.decode(following[len(prompt) :]).startswith("<|im_end|>\n<|im_start|>user")


def test_the_end_token_of_the_last_turn_counts_as_the_end_of_an_earlier_turn() -> None:
    """gpt-oss ends its last turn with <|return|> and earlier turns with <|end|>."""
    renderer, tokenizer = renderer_of("harmony")
    prompt = renderer.render([user("Hi.")])
    sampled = encoded(tokenizer, "<|channel|>final<|message|>Hello.<|return|>")
    following = renderer.bridge(prompt, sampled, [user("And?")])
    tail = tokenizer.decode(following[len(prompt) + len(sampled) :])
    assert tail == "<|start|>user<|message|>And?<|end|><|start|>assistant"
    stops = tokenizer.convert_ids_to_tokens(sorted(renderer.stop_token_ids))
    assert sorted(stops) == ["<|call|>", "<|return|>"]  # <|end|> also ends reasoning


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c.name)
def test_an_end_token_of_the_model_is_no_part_of_the_message(
    family: str, conversation: ProbeConversation
) -> None:
    """A generation config has further end tokens, such as Qwen's ``<|endoftext|>``."""
    _, tokenizer = renderer_of(family, history="keep")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|another|>"]})
    renderer = ChatRenderer(tokenizer, history="keep", today=TODAY)
    another = len(tokenizer) - 1
    if conversation.name in renderer.rejected:
        return
    messages, tools = conversation.messages, conversation.tools
    turn = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    prompt = renderer.render(messages[:turn], tools)
    sampled = turn_ids(renderer, messages[: turn + 1], tools, prompt)
    if tokenizer.convert_ids_to_tokens(sampled[-1]) == "<|call|>":
        return  # it is part of the call
    if sampled[-1] not in renderer.stop_token_ids:
        sampled += (0,)
    usual = renderer.parse(sampled, tools, prompt_ids=prompt, ended=True)
    other = (*sampled[:-1], another)
    parsed = renderer.parse(other, tools, prompt_ids=prompt, ended=True)
    assert without_ids(parsed) == without_ids(usual)
    parts = renderer.message_parts(prompt, other, ended=True)
    assert parts[-1].text == "" and len(parts) == len(other)
    cut = renderer.parse(other, tools, prompt_ids=prompt)
    assert "<|another|>" in str(cut.message) or cut.problem
    stopped = renderer.parse(other, tools, prompt_ids=prompt, ended=True, stops=["<|another|>"])
    assert stopped.stop == "<|another|>"


def without_ids(parsed: ParsedMessage) -> tuple[Any, str | None]:
    """The message without the ids of its calls, and the problem."""
    calls = [call["function"] for call in parsed.message.get("tool_calls", [])]
    return {**parsed.message, "tool_calls": calls}, parsed.problem


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
def test_an_end_that_depends_on_tools_ends_a_turn(tools: Any) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
    end = "<|eot|>" if tools else "<|im_end|>"
    tokenizer.chat_template = (
        "{% set end = '<|eot|>' if tools else '<|im_end|>' %}"
        + tokenizer.chat_template.replace("<|im_end|>", "{{ end }}")
    )
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render([user("Hi.")], tools)
    sampled = encoded(tokenizer, "Hello." + end)
    assert sampled[-1] in renderer.stop_token_ids
    assert renderer.parse(sampled, tools, prompt_ids=prompt).message == assistant("Hello.")
    following = renderer.bridge(prompt, sampled, [user("And?")], tools)
    complete = renderer.render([user("Hi."), assistant("Hello."), user("And?")], tools)
    assert following == complete


CONTENT = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from(" \n\t"))


@pytest.mark.parametrize("family", ["chatml", "xml"])
@given(contents=st.lists(CONTENT.filter(str.strip), min_size=3, max_size=5))
def test_any_conversation_has_the_text_of_a_complete_rendering(
    family: str, contents: list[str]
) -> None:
    renderer, tokenizer = KEPT if family == "chatml" else KEPT_XML
    odd = contents[: len(contents) - 1 + len(contents) % 2]  # the last message is the user's
    messages = [assistant(text) if i % 2 else user(text) for i, text in enumerate(odd)]
    prompt = renderer.render(messages[:1])
    for turn in range(1, len(messages), 2):
        sampled = encoded(tokenizer, messages[turn]["content"] + "<|im_end|>")
        prompt = renderer.bridge(prompt, sampled, messages[turn + 1 : turn + 2])
    assert tokenizer.decode(prompt) == rendered(renderer, messages, (), answered=False)


@given(seed=st.integers(0, 2**32), length=st.integers(0, 30))
def test_whatever_is_sampled_is_kept(seed: int, length: int) -> None:
    renderer, tokenizer = KEPT
    source = random.Random(seed)
    sampled = tuple(source.randrange(len(tokenizer)) for _ in range(length))
    prompt = renderer.render([user("Hi.")], TOOLS)
    for new in (
        [user("And?")],
        [result("12", "look_up", "probe0000")],
        [{"role": "tool", "content": "1"}],
    ):
        following = renderer.bridge(prompt, sampled, new, TOOLS)
        assert kept(prompt, sampled, following)
        assert renderer.parse(sampled, TOOLS, prompt_ids=prompt).message["role"] == "assistant"


KEPT = renderer_of("chatml")
KEPT_XML = renderer_of("xml")


# ---- published templates -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "qwen2_5", "qwen3", "gptoss", "glm4moe"])
def test_published_templates(name: str) -> None:
    """The conversations without a difference are equal token for token in published templates."""
    trl = pytest.importorskip("trl.chat_template_utils")
    special = {
        "llama": FAMILIES["llama3"][1],
        "qwen": FAMILIES["chatml"][1],
        "gptoss": FAMILIES["harmony"][1],
        "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    }
    tokens = next(value for key, value in special.items() if name.startswith(key))
    tokenizer = byte_bpe(tokens, eos=tokens[-1])
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    renderer = ChatRenderer(tokenizer, history="keep", today=TODAY)
    assert renderer.append_only == (name in ("llama3_1", "llama3_2", "qwen2_5"))
    different = {found.conversation for found in renderer.differences} | set(renderer.rejected)
    compared = [c for c in CONVERSATIONS if c.name not in different]
    assert compared
    for conversation in compared:
        text = rendered(renderer, conversation.messages, conversation.tools, answered=False)
        assert bridged(renderer, conversation) == encoded(tokenizer, text), conversation.name


def with_a_call(ending: str = "") -> list[dict[str, Any]]:
    """A question, a call with its result and, if given, an answer and another question."""
    asked = assistant("", tool_calls=[call("look_up", {"key": "a"}, "call00000")])
    answer = result("1", "look_up", "call00000")
    more = [assistant(ending), user("Sure?")] if ending else []
    return [user("Go."), asked, answer, *more]


@pytest.mark.parametrize("ending", ["", "It is 1."])
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_calls_select_the_template_with_that_name(tools: Any, ending: str) -> None:
    """The prompt is that of a row of data, with the calls, whether or not tools are shown."""
    tokenizer = named_tokenizer()
    messages = with_a_call(ending)
    ids = list(ChatRenderer(tokenizer).render(messages, tools))
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nTools:")
    assert ("look_up" in text.partition("<|im_end|>")[0]) == bool(tools)
    assert '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>' in text
    assert encode_prompt(tokenizer, messages, tools=tools or None) == (text, ids)
    row, mask = encode_conversation(
        tokenizer, [*messages, assistant("Yes.")], tools=tools or None, only_last=True
    )
    assert row[: mask.index(True)] == ids


def test_all_answers_of_a_row_with_a_call_have_one_template() -> None:
    """Also the one before the first call, whose prompt alone would have the other template."""
    tokenizer, messages = named_tokenizer(), [user("Hi."), assistant("Hello."), *with_a_call("1.")]
    row, mask = encode_conversation(tokenizer, messages[:-1])
    trained = tokenizer.decode([i for i, learn in zip(row, mask, strict=True) if learn])
    assert trained.startswith("Hello.<|im_end|><tool_call>") and trained.endswith("1.<|im_end|>")
    alone, _ = encode_prompt(tokenizer, messages[:1])
    assert alone == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", ["smollm2", "llama2"])
def test_a_prompt_whose_calls_are_left_out_is_refused(family: str) -> None:
    tokenizer = published_tokenizer("smollm2")
    if family == "llama2":
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content ~ eos_token }}"
            "{% else %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% endif %}{% endfor %}"
        )
    renderer = ChatRenderer(tokenizer, tool_format="hermes")
    with pytest.raises(RendererError, match="leaves out the tool calls"):
        renderer.render(with_a_call("It is 1."))
    told = [{**m, "tool_calls": []} for m in with_a_call("It is 1.")]
    assert renderer.render([m for m in told if m["role"] != "tool" and m["content"]])


def test_turns_that_are_rendered_again_need_a_template_that_writes_their_calls() -> None:
    tokenizer = published_tokenizer("smollm2")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}"
        "{% if loop.last %}{{ m.content }}"
        "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    with pytest.raises(
        RendererError, match=r"history: template renders .*leaves out the tool calls"
    ):
        ChatRenderer(tokenizer, history="template", tool_format="hermes")
    for options in ({"history": "template"}, {"history": "keep", "tool_format": "hermes"}):
        assert ChatRenderer(tokenizer, **options).history == options["history"]


def test_a_sampled_call_that_is_kept_as_tokens_needs_no_rendering() -> None:
    """A format that the system prompt describes, with a template that does not write calls."""
    renderer = ChatRenderer(published_tokenizer("smollm2"), tool_format="hermes")
    tokenizer = renderer._tokenizer
    prompt = renderer.render([user("Go.")], TOOLS)
    said = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'
    sampled = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert renderer.parse(sampled, TOOLS, prompt_ids=prompt).message["tool_calls"]
    following = renderer.bridge(prompt, sampled, [result("1", "look_up", "call00000")], TOOLS)
    assert said in tokenizer.decode(list(following))
