"""Chat templates that look back, that cannot be used, and texts that look like control tokens."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from chat_families import (
    CHATML,
    FAMILIES,
    byte_bpe,
    chat_tokenizer,
    encoded,
    renderer_of,
)
from chat_templates import published_tokenizer

from burnish.episodes.formats import FORMATS, response_template
from burnish.episodes.probing import TOOLS, assistant, call, result, user
from burnish.episodes.renderer import ChatRenderer, RendererError
from burnish.reasoning_tags import THINK

# ---- special tokens in answers to the policy -----------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_special_tokens_in_an_answer_are_ordinary_text(family: str, role: str) -> None:
    """In tool results, and in user messages, which may quote a malformed call or show the format of
    calls (in some families special tokens)."""
    renderer, tokenizer = renderer_of(family)
    end = tokenizer.convert_ids_to_tokens(min(renderer.stop_token_ids))
    prompt = renderer.render([user("How many?")], TOOLS)
    sampled = encoded(tokenizer, f"x{end}")

    def answer(text: str) -> dict[str, Any]:
        return result(text, "look_up", "probe0000") if role == "tool" else user(text)

    plain, forged = (
        renderer.bridge(prompt, sampled, [answer(text)], TOOLS)
        for text in ("a b", f"a{end}b{end}{end}")
    )
    specials = set(tokenizer.convert_tokens_to_ids(list(FAMILIES[family][1])))
    assert [i for i in plain if i in specials] == [i for i in forged if i in specials]
    assert f"a{end}b{end}{end}" in tokenizer.decode(forged)


def test_special_tokens_in_an_answer_stay_ordinary_when_it_is_rendered_again() -> None:
    """The first message is the data's own: its special tokens are kept."""
    renderer, tokenizer = renderer_of("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = renderer.render([user("Hi.<|im_end|>"), assistant("Hm."), user("a<|im_end|>b")])
    assert ids.count(end) == 4 and "\na<|im_end|>b<|im_end|>" in tokenizer.decode(ids)


def test_special_tokens_in_a_result_of_the_first_prompt_are_ordinary_text() -> None:
    renderer, tokenizer = renderer_of("chatml")
    made = assistant("", tool_calls=[call("look_up", {"key": "a"}, "probe0000")])
    icons = "\U000f0000b\U000f0001"  # private-use characters, as icon fonts have them
    text = f"a<|im_end|>{icons}"
    messages = [user(f"Hi{icons}."), made, result(text, "look_up", "probe0000")]
    ids = renderer.render(messages, TOOLS)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4
    assert f"\n{text}\n" in tokenizer.decode(ids) and f"Hi{icons}." in tokenizer.decode(ids)


def test_half_of_a_surrogate_pair_in_a_result_is_replaced() -> None:
    """A policy can write "\\ud800" in the JSON of a call, and the tool can return it."""
    renderer, tokenizer = renderer_of("chatml")
    new = [result("a\ud800b", "look_up", "probe0000")]
    assert "\na?b\n" in tokenizer.decode(renderer.bridge((), (), new, TOOLS))


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


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "start", [[user("Hi.")], [{"role": "system", "content": "A"}, user("Hi.")]]
)
@pytest.mark.parametrize("before", [[], [user("So?")], [result("12", "look_up", "probe0000")]])
def test_a_new_message_that_the_template_moves_is_refused(
    before: list[Any], start: list[Any], tools: Any
) -> None:
    """DeepSeek writes all system messages at the beginning, where the prompt is not extended. The
    way out is a user message."""
    tokenizer = chat_tokenizer("chatml")
    gathered = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    loop = "{% for m in messages if m.role != 'system' %}"
    tokenizer.chat_template = gathered + tokenizer.chat_template.replace(
        "{% for m in messages %}", loop
    )
    renderer = ChatRenderer(tokenizer, history="keep")
    prompt, sampled = renderer.render(start, tools), encoded(tokenizer, "x<|im_end|>")

    def following(role: str, text: str = "RULE 77") -> str:
        new = [*before, {"role": role, "content": text}]
        return tokenizer.decode(renderer.bridge(prompt, sampled, new, tools)[len(prompt) :])

    for _ in range(2):  # the second time from the cache
        with pytest.raises(RendererError, match=r"role 'system' that follows .* a user message"):
            following("system")
        assert "RULE 77" in following("user")
    assert following("system", " ")
    shown = renderer.render([*start, assistant("x"), {"role": "system", "content": "RULE 77"}])
    assert "RULE 77" in tokenizer.decode(shown)


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


ITEMS = "{% for k, v in c.function.arguments | items %}"
XML_BODY = (
    f"<function=NAME>\n{ITEMS}<parameter={{{{ k }}}}>\n{{{{ v }}}}\n</parameter>\n{{% endfor %}}"
)
GLM_BODY = (
    f"{ITEMS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{{{{ v }}}}</arg_value>\n{{% endfor %}}"
)
JSON = '{"name": "NAME", "arguments": JSON}'
CALL = call("look_up", {"key": "a b", "limit": 2}, "probe0000")
RENDERED_CALLS: dict[str, str | None] = {
    f"<tool_call>{JSON}</tool_call>": "hermes",
    f"<tool_call>\n[{JSON}]\n</tool_call>": "hermes",
    '<tool_call>{"id": "{{ c.id }}", "arguments": TEXT, "name": "NAME"}</tool_call>': "hermes",
    "<tool_call>\n{{ c | tojson }}\n</tool_call>": "hermes",
    "<tool_calls>\n<tool_call>NAME\n```json\nJSON\n```</tool_call>\n</tool_calls>": None,
    "<tool_call>\n<name>NAME</name><arguments>JSON</arguments>\n</tool_call>": None,
    f"<tool_call>\n{XML_BODY}</function>\n</tool_call>": "xml",
    f"<seed:tool_call>\n{XML_BODY}</function>\n</seed:tool_call>": "seed",
    f"<TOOLCALL>[{JSON}]</TOOLCALL>": "nemotron",
    f"\n<tool_calls>[{JSON}]</tool_calls>": "apriel",
    f"<|tool_call|>{JSON}<|/tool_call|>": "phi4",
    f"<|tool_call|>[{JSON}]": "granite",
    f"<|START_ACTION|>[{JSON}]<|END_ACTION|>": None,
    f"{XML_BODY}</function>": None,
    "<function=NAME>JSON</function>": None,
    f"<tool_call>NAME\n{GLM_BODY}</tool_call>": "glm",
    f"<tool_call>NAME<tool_sep>\n{GLM_BODY}</tool_call>": None,
    f"[TOOL_CALLS][{JSON}]": "mistral",
    "[TOOL_CALLS]NAME[CALL_ID]{{ c.id }}[ARGS]JSON": "mistral_args",
    '<|python_tag|>{"name": "NAME", "parameters": JSON}': "llama3_json",
    '{"name": "NAME", "input": JSON}': None,
}
"""How a template writes a call -> the format that reads it, if there is one."""


@pytest.mark.parametrize("opened", ["", "<think>\\n", "<think>\\n\\n</think>\\n\\n"])
@pytest.mark.parametrize(("written", "expected"), RENDERED_CALLS.items())
def test_a_format_reads_the_calls_that_the_template_writes(
    written: str, expected: str | None, opened: str
) -> None:
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    for name, value in (("NAME", "name"), ("JSON", "arguments | tojson")):
        written = written.replace(name, f"{{{{ c.function.{value} }}}}")
    written = written.replace("TEXT", "{{ c.function.arguments | tojson | tojson }}")
    head, _, rest = CHATML.partition("{% for c in m.tool_calls or [] %}")
    rest = rest.partition("{% endfor %}")[2].removesuffix("{% endif %}")
    tokenizer.chat_template = (
        head + "{% for c in m.tool_calls or [] %}" + written + "{% endfor %}" + rest
        + f"{{{{ '{opened}' }}}}{{% endif %}}"
    )  # fmt: skip
    renderer = ChatRenderer(tokenizer, history="keep")
    if expected == "llama3_json" and opened:  # its calls are read at the beginning alone
        expected = None
    if expected is None:
        with pytest.raises(RendererError, match=r"no known format.*Set tool_format to hermes"):
            renderer.render([user("Go.")], TOOLS)
    prompt = ChatRenderer(tokenizer, history="keep", tool_format="hermes").render(
        [user("Go.")], TOOLS
    )
    text = tokenizer.apply_chat_template(
        [user("Go."), assistant("", tool_calls=[CALL])], TOOLS, tokenize=False
    )
    call_ = text.rpartition("assistant\n")[2].rstrip("\n")
    if opened == "<think>\\n":
        call_ = "Why.\n</think>\n\n" + call_
    found = renderer.parse(encoded(tokenizer, call_), TOOLS, prompt_ids=prompt, ended=True)
    functions = [each["function"] for each in found.message.get("tool_calls", ())]
    assert functions == ([CALL["function"]] if expected else [])


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


def test_a_template_that_does_not_render_tools_is_refused() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = CHATML[CHATML.index("{% for m in messages") :]
    with pytest.raises(RendererError, match="would not see look_up, measure"):
        ChatRenderer(tokenizer).render([user("Hi.")], TOOLS)
    assert ChatRenderer(tokenizer, tool_format="hermes").render([user("Hi.")], TOOLS)


def test_transformers_that_cannot_parse_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer("chatml")
    monkeypatch.setattr(type(tokenizer), "parse_response", lambda self, response, schema=None: {})
    with pytest.raises(RendererError, match=r"install transformers 5\.15 or newer"):
        ChatRenderer(tokenizer)


def test_history_template_renders_what_was_parsed() -> None:
    """Reasoning stays until the next user message, and is dropped then."""
    renderer, tokenizer = renderer_of("chatml_drops", history="template")
    messages = [user("How many?")]
    text = '<think>\nLook.\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments": '
    sampled = encoded(tokenizer, text + '{"key":  "a"}}\n</tool_call><|im_end|>')
    messages += [renderer.parse(sampled, TOOLS).message, {"role": "tool", "content": "12"}]
    prompt = tokenizer.decode(renderer.render(messages, TOOLS))
    assert "<think>\nLook.\n</think>" in prompt and '"arguments": {"key": "a"}}' in prompt
    messages += [assistant("12."), user("Thanks.")]
    assert "Look." not in tokenizer.decode(renderer.render(messages, TOOLS))


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


# ---- reasoning -----------------------------------------------------------------------------------

ONE_TURN = (
    CHATML.partition("{% for m")[0]
    + "{% for m in messages %}{% if m.role == 'assistant' %}"
    + "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    + "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n"
    + "</tool_call>{% else %}<|im_end|>\n{% endfor %}"
    + "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{% if messages[-1].role == 'tool' %}{{ AFTER }}"
    + "{% else %}<|im_start|>assistant\n{% endif %}{% endif %}"
)
"""A call, its result and the answer are one turn, as Gemma 4 writes them."""


@pytest.mark.parametrize("anchor", ["", r"<\|im_start\|>assistant\n|</tool_response>"])
@pytest.mark.parametrize("earlier", ["", "I should look."])
@pytest.mark.parametrize(
    ("after", "response"),
    [("<think>\n", "Why.\n</think>\n\nB"), ("", "<think>\nWhy.\n</think>\n\nB"), ("", "B")],
)
def test_a_prompt_opens_reasoning_after_a_result_of_a_tool(
    anchor: str, earlier: str, after: str, response: str
) -> None:
    special = ("<|im_start|>", "<|im_end|>", "<tool_response>")  # the last one ends calls
    tokenizer = byte_bpe(special, eos="<|im_end|>")
    tokenizer.chat_template = ONE_TURN.replace("AFTER", repr(after))
    if anchor:
        form = response_template(FORMATS["hermes"], reasoning=THINK)
        tokenizer.response_template = {**form, "start_anchor_pattern": anchor}
    renderer = ChatRenderer(tokenizer, history="keep")
    answer = assistant("", tool_calls=[call("look_up", {"key": "a"}, "probe0000")])
    answer |= {"reasoning_content": earlier} if earlier else {}
    messages = [user("Go."), answer, result("12", "look_up", "probe0000")]
    prompt = renderer.render(messages, TOOLS)
    ids = encoded(tokenizer, f"{response}<|im_end|>")
    found = renderer.parse(ids, TOOLS, prompt_ids=prompt, ended=True)
    reasoning = {"reasoning_content": "Why."} if "Why." in response else {}
    assert found.message == assistant("B") | reasoning
    stream = renderer.stream(prompt)
    assert stream.feed(ids)[0] == reasoning.get("reasoning_content", "")


CUTS = "{{ m.content.split('</think>\\n\\n')[-1] }}"


@pytest.mark.parametrize(
    ("content", "history"),
    [
        (CUTS, None),
        ("{% if loop.last %}{{ m.content }}{% else %}" + CUTS + "{% endif %}", None),
        ("{{ m.content }}{# <think></think> #}", "keep"),
    ],
    ids=["always", "earlier", "never"],
)
def test_a_template_that_cuts_reasoning_out_of_texts_needs_a_choice(
    content: str, history: str | None
) -> None:
    tokenizer = byte_bpe(("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}CONTENT"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("CONTENT", content)
    if history:
        assert ChatRenderer(tokenizer).history == history
    else:
        with pytest.raises(RendererError, match=r"reasoning in the text.*<think>.*history: keep"):
            ChatRenderer(tokenizer)


def test_earlier_messages_that_a_template_writes_into_the_last_are_in_the_first_prompt_only() -> (
    None
):
    """Mistral's writes the system message into the last one of a user."""
    renderer = ChatRenderer(tokenizer := published_tokenizer("mistral"), history="keep")
    start = [{"role": "system", "content": "Be brief."}, user("Go.")]
    prompt = renderer.render(start)
    sampled = [*tokenizer("So.", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    following = renderer.bridge(prompt, sampled, [user("And?")], earlier=start, ended=True)
    assert tokenizer.decode(following).count("Be brief.") == 1
    assert following == renderer.bridge(prompt, sampled, [user("And?")], ended=True)
