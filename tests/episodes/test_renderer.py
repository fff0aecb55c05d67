"""The next prompt is the previous one, the sampled ids, and the ids of nothing but the new text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML, FAMILIES, byte_bpe, chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from burnish.data.sources import DataError
from burnish.episodes.probing import (
    CONVERSATIONS,
    TOOLS,
    Conversation,
    assistant,
    call,
    result,
    user,
)
from burnish.episodes.renderer import ChatRenderer, RendererError

Ids = tuple[int, ...]
APPEND_ONLY = ("chatml", "llama3", "xml")
REWRITING = ("chatml_drops", "harmony", "mistral")
TODAY = datetime(2026, 3, 1)


def renderer_of(family: str, **options: Any) -> tuple[ChatRenderer, PreTrainedTokenizerBase]:
    tokenizer = chat_tokenizer(family)
    options = {"history": "keep", "today": TODAY, **options}
    return ChatRenderer(tokenizer, **options), tokenizer


def rendered(
    renderer: ChatRenderer, messages: Sequence[Mapping[str, Any]], tools: Any, *, answered: bool
) -> str:
    """Text of the complete rendering, with a generation prompt unless the last turn is the
    assistant's."""
    return renderer._template.text(messages, tools, generate=not answered)


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


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


def bridged(renderer: ChatRenderer, conversation: Conversation) -> Ids:
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
    family: str, conversation: Conversation
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


def kept(prompt: Ids, sampled: Ids, following: Ids) -> bool:
    return following[: len(prompt) + len(sampled)] == prompt + sampled


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


# ---- templates that look back, and templates that cannot be used ---------------------------------


def test_a_result_without_id_and_name_gets_those_of_the_call() -> None:
    renderer, tokenizer = renderer_of("harmony")
    prompt = renderer.render([user("How long?")], TOOLS)
    text = "<|channel|>commentary to=functions.measure <|constrain|>json<|message|>"
    sampled = encoded(tokenizer, text + '{"key": "a"}<|call|>')
    following = renderer.bridge(prompt, sampled, [{"role": "tool", "content": "3 m"}], TOOLS)
    tail = tokenizer.decode(following[len(prompt) + len(sampled) :])
    assert tail.startswith("<|start|>functions.measure to=assistant<|channel|>commentary")


def test_the_id_of_a_call_is_in_its_result() -> None:
    renderer, tokenizer = renderer_of("mistral")
    prompt = renderer.render([user("How long?")], TOOLS)
    text = '[TOOL_CALLS][{"name": "measure", "arguments": {"key": "a"}, "id": "abcdefghi"}]</s>'
    sampled = encoded(tokenizer, text)
    following = renderer.bridge(prompt, sampled, [{"role": "tool", "content": "3 m"}], TOOLS)
    assert '"call_id": "abcdefghi"' in tokenizer.decode(following[len(prompt) + len(sampled) :])


def test_results_of_calls_that_the_template_leaves_out_are_refused() -> None:
    renderer, tokenizer = renderer_of("harmony")
    new = [result("1", "look_up", "probe0000"), result("2", "measure", "probe0001")]
    with pytest.raises(RendererError, match="renders 1 of the 2 tool calls"):
        renderer.bridge((), encoded(tokenizer, "x<|call|>"), new, TOOLS)


def test_the_date_is_fixed_at_creation() -> None:
    renderer, tokenizer = renderer_of("llama3")
    assert "Today Date: 01 Mar 2026" in tokenizer.decode(renderer.render([user("Hi.")]))
    assert datetime.now().strftime("%Y") != "2000"
    other, _ = renderer_of("llama3", today=datetime(2000, 1, 31))
    assert "Today Date: 31 Jan 2000" in tokenizer.decode(other.render([user("Hi.")]))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>"
            "{% endfor %}",
            "leaves out messages of the role 'assistant'",
        ),
        (
            "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
            "{{ messages[0].content }}",
            "one turn only",
        ),
    ],
)
def test_a_template_that_cannot_be_extended_is_refused(template: str, reason: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template
    with pytest.raises(RendererError, match="cannot extend any conversation") as caught:
        ChatRenderer(tokenizer, history="keep")
    assert reason in str(caught.value)


def test_a_template_without_an_end_token_is_not_append_only() -> None:
    """The policy ends its turns with a token that a complete rendering lacks."""
    tokenizer = byte_bpe((), eos="<eos>")
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(RendererError, match=r"Hello\.<eos>"):
        ChatRenderer(tokenizer)
    renderer = ChatRenderer(tokenizer, history="keep")
    prompt = renderer.render([user("Hi.")])
    sampled = encoded(tokenizer, "Hello.<eos>")
    following = renderer.bridge(prompt, sampled, [user("And?")])
    assert (
        tokenizer.decode(following) == "user: Hi.\nassistant: Hello.<eos>\nuser: And?\nassistant: "
    )


def test_history_template_renders_and_does_not_extend() -> None:
    renderer, _ = renderer_of("chatml_drops", history="template")
    assert renderer.history == "template"
    with pytest.raises(RendererError, match="history: template"):
        renderer.bridge((1,), (2,), [user("And?")])
    appending, _ = renderer_of("chatml", history="template")
    assert appending.history == "keep"


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ([], "no new messages"),
        ([assistant("I answer.")], "only the policy writes those"),
        ([{"role": "tool", "content": None}], "no `content`"),
    ],
)
def test_new_messages_that_cannot_be_rendered(new: list[Any], reason: str) -> None:
    renderer, tokenizer = renderer_of("chatml")
    with pytest.raises(RendererError, match=reason):
        renderer.bridge((1,), encoded(tokenizer, "x<|im_end|>"), new)


def test_a_conversation_that_ends_with_an_answer_is_refused() -> None:
    renderer, _ = renderer_of("chatml")
    with pytest.raises(RendererError, match="ends with an assistant message"):
        renderer.render([user("Hi."), assistant("Hello.")])


def test_tools_need_a_format_in_which_calls_can_be_parsed() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.render([user("Hi.")])
    with pytest.raises(RendererError, match=r"no known format.*Set tool_format to hermes"):
        renderer.render([user("Hi.")], TOOLS)
    assert ChatRenderer(tokenizer, tool_format="hermes").render([user("Hi.")], TOOLS)


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"function": {"description": "nameless"}}, "a tool has no name"),
        ({"function": {"name": "f", "parameters": {"type": "text"}}}, "'f' are not a JSON schema"),
    ],
)
def test_tools_that_cannot_be_offered(tool: dict[str, Any], reason: str) -> None:
    renderer, _ = renderer_of("chatml")
    with pytest.raises(RendererError, match=reason):
        renderer.render([user("Hi.")], [tool])


def test_arguments_are_json_text_for_templates_that_require_it() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace(
        "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.append_only and not renderer.rejected
    made = assistant("", tool_calls=[call("look_up", {"key": "ä"}, "probe0000")])
    new = result("12", "look_up", "probe0000")
    text = tokenizer.decode(renderer.render([user("Hi."), made, new], TOOLS))
    assert '"arguments": {"key": "ä"}' in text


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
