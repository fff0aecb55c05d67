"""Tool calls and reasoning of model families, each with the part of its chat template that writes
answers: what a row has is what a sampled response is read as. The rest of a template is shortened;
tools are always JSON at the beginning.

From published templates: Apriel 1.5, Granite 3, Nemotron Nano v2, Phi-4-mini (as llama.cpp corrects
it) and Seed-OSS. From memory: Granite 4, EXAONE 4, Hunyuan-A13B, and that Granite 3.3 writes its
answer in ``<response>``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from chat_families import byte_bpe

from burnish.data.chat import encode_conversation
from burnish.data.notices import collecting
from burnish.episodes.probing import TOOLS, assistant, call, result, user
from burnish.episodes.renderer import ChatRenderer, RendererError


class Family(NamedTuple):
    begin: str
    """Text before a message, with ROLE."""
    end: str
    end_token: str
    answer: str
    """What the template writes of an answer ``m``."""
    prompt: str = ""
    """What it writes at the end of a prompt behind ``begin``."""


_EACH = "{% for c in m.tool_calls or [] %}"
_FUNCTION = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_LAST = "{{ ', ' if not loop.last else '' }}"
_LIST = f"{_EACH}{_FUNCTION}{_LAST}{{% endfor %}}"
_HERMES = f"{_EACH}\n<tool_call>\n{_FUNCTION}\n</tool_call>{{% endfor %}}"
_CUT = "{% set text = m.content.split('</think>')[-1].strip() %}{{ text }}"
_GRANITE = ("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\n", "<|end_of_text|>")
FAMILIES = {
    "Apriel 1.5": Family(
        *("<|ROLE|>\n", "\n<|end|>\n", "<|end|>"),
        "{{ m.content }}{% if m.tool_calls %}\n<tool_calls>["
        + _LIST.replace("| tojson", "| string")
        + "]</tool_calls>{% endif %}",
    ),
    "Granite 3": Family(
        *_GRANITE,
        "{% if m.tool_calls %}<|tool_call|>"
        "{{ m.tool_calls | map(attribute='function') | list | tojson(indent=4) }}"
        "{% else %}{{ m.content }}{% endif %}",
    ),
    "Granite 4": Family(*_GRANITE, "{{ m.content }}" + _HERMES),
    "EXAONE 4": Family(
        *("[|ROLE|]", "[|endofturn|]\n", "[|endofturn|]"),
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}" + _HERMES,
    ),
    "Hunyuan-A13B": Family(
        *("<|hy_ROLE|>", "<|hy_end|>", "<|hy_end|>"),
        f"{_CUT}{{% if m.tool_calls %}}<tool_calls>[{_LIST}]</tool_calls>{{% endif %}}",
        "<think>\n",
    ),
    "Nemotron Nano v2": Family(
        *("<SPECIAL_11>ROLE\n", "\n<SPECIAL_12>\n\n", "<SPECIAL_12>"),
        f"{_CUT}{{% if m.tool_calls %}}<TOOLCALL>[{_LIST}]</TOOLCALL>{{% endif %}}",
        "<think>\n\n",
    ),
    "Phi-4-mini": Family(
        *("<|ROLE|>", "<|end|>", "<|end|>"),
        "{{ m.content }}"
        f"{_EACH}<|tool_call|>{{{{ c.function | tojson }}}}<|/tool_call|>{{% endfor %}}",
    ),
    "Seed-OSS": Family(
        *("<seed:bos>ROLE", "<seed:eos>", "<seed:eos>"),
        "{% if m.reasoning_content %}{{ '\\n' }}<seed:think>{{ m.reasoning_content }}</seed:think>"
        "{% endif %}{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
        f"{_EACH}{{{{ '\\n' }}}}<seed:tool_call>\n<function={{{{ c.function.name }}}}>\n"
        "{% for k, v in c.function.arguments | items %}"
        "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
        "{% endfor %}",
        "\n",
    ),
}
REASONS = ("EXAONE 4", "Hunyuan-A13B", "Nemotron Nano v2", "Seed-OSS")
CALLS = [
    call("look_up", {"key": "a b", "limit": 2}, "probe0000"),
    call("measure", {"key": "c"}, "probe0001"),
]


def tokenizer_of(family: Family) -> Any:
    begin = family.begin.replace("ROLE", "{{ m.role }}")
    tokenizer = byte_bpe((family.end_token,), eos=family.end_token)
    asks = family.begin.replace("ROLE", "assistant") + family.prompt
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        f"{begin}{{% if m.role == 'assistant' %}}{family.answer}{{% else %}}{{{{ m.content }}}}"
        f"{{% endif %}}{family.end}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{asks}{{% endif %}}"
    )
    return tokenizer


def sampled(tokenizer: Any, row: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """The prompt and the trained response of a row."""
    ids, mask = encode_conversation(tokenizer, row, tools=TOOLS)
    begin, end = mask.index(True), len(mask) - mask[::-1].index(True)
    return ids[:begin], ids[begin:end]


def functions(message: dict[str, Any]) -> list[Any]:
    return [made["function"] for made in message.get("tool_calls", ())]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [1, 2])
def test_calls_of_a_row_are_read_from_its_tokens(name: str, count: int) -> None:
    tokenizer = tokenizer_of(FAMILIES[name])
    reader = ChatRenderer(tokenizer, history="keep")
    for extra in ({}, {"reasoning_content": "why"}) if name in REASONS else ({},):
        row = [user("q"), assistant("", tool_calls=CALLS[:count], **extra)]
        prompt, response = sampled(tokenizer, row)
        found = reader.parse(response, TOOLS, prompt_ids=prompt, ended=True)
        assert found.problem is None and found.message["content"] == ""
        assert functions(dict(found.message)) == functions(row[1])
        assert found.message.get("reasoning_content", "") == extra.get("reasoning_content", "")
        results = [result("4", made["function"]["name"], made["id"]) for made in CALLS[:count]]
        assert reader.render([*row, *results], TOOLS)


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_of_a_row_is_read_from_its_tokens(name: str) -> None:
    """Or it is counted as reasoning that the template ignores."""
    tokenizer = tokenizer_of(FAMILIES[name])
    reader = ChatRenderer(tokenizer, history="keep")
    row = [user("q"), assistant("It is 4.", reasoning_content="why")]
    with collecting() as notices:
        prompt, response = sampled(tokenizer, row)
    assert ("reasoning_ignored" in notices) is (name not in REASONS)
    message = reader.parse(response, TOOLS, prompt_ids=prompt, ended=True).message
    expected = row[1] if name in REASONS else assistant("It is 4.")
    assert message == expected


def test_calls_in_an_unknown_form_are_refused() -> None:
    """Their text would be a final answer: Command A's list between ``<|START_ACTION|>``."""
    written = f"<|START_ACTION|>[{_LIST}]<|END_ACTION|>".replace('"name"', '"tool_name"')
    tokenizer = tokenizer_of(FAMILIES["Granite 4"]._replace(answer="{{ m.content }}" + written))
    with pytest.raises(RendererError, match="no known format"):
        ChatRenderer(tokenizer, history="keep").render([user("q")], TOOLS)
