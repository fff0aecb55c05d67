"""How model families write reasoning and tool calls, as response templates of transformers.

A response template (``transformers.utils.chat_parsing``) is declarative: each field of the message
has a pattern that opens it and one that closes it. These are used for tokenizers that have none of
their own. JSON that cannot be parsed stays text, so that the caller can describe the mistake.
Patterns must not take quadratic time: untrained policies repeat markers and spaces to the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from burnish.config.episodes import FormatName as FormatName
from burnish.model_text import DOTALL, Pattern
from burnish.reasoning_tags import Tags

_LAX_JSON: dict[str, Any] = {"content": "json", "content_args": {"allow_non_json": True}}
_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
_PLAIN_TEXT = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
_SHOWN = 200  # characters of a malformed call that are shown to the policy
_XML_PARAMETER = Pattern(
    r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>",
    DOTALL,
)
_GLM_PARAMETER = Pattern(
    r"<arg_key>(?P<key>[^<]*)</arg_key>\s*"
    r"<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>",
    DOTALL,
)
_HARMONY_START = r"(?:<\|start\|>assistant)?"
_HARMONY_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"
_HARMONY_TO = r" ?to=functions\.(?P<name>[\w.\-]+)"


@dataclass(frozen=True)
class ToolFormat:
    """How one model family writes tool calls."""

    name: str
    example: str
    """A well-formed call, shown to the policy after a malformed one."""
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of the response template, next to those of reasoning and content."""
    opening: str = ""
    """Text that begins every call. If it is left in the content, a call is malformed."""
    closing: str = ""
    """Text that ends every call, without which it is incomplete. Empty: the end of its JSON value
    ends it."""
    has_channels: bool = False
    """Calls are told from content by their channel, so content may contain ``opening``."""
    parameters: Pattern | None = None
    """Pattern of one argument, if a call is a list of arguments with the groups ``key`` and
    ``value``. Other text in a call is a mistake."""

    def body_problem(self, body: str) -> str | None:
        """Return why the text of a call is malformed, as far as its JSON does not show it."""
        if self.parameters is None:
            return None
        rest = self.parameters.sub("", body).strip()
        return f"has text that belongs to no parameter: {rest[:_SHOWN]}" if rest else None


def _calls(**entries: Any) -> dict[str, Any]:
    return {"tool_calls": {"repeats": True, **entries}}


def _functions_in(name: str, tag: str, turn: str) -> ToolFormat:
    """Return the format of a function with XML parameters inside of a tag."""
    return ToolFormat(
        name,
        turn,
        _calls(
            open_pattern=rf"<{tag}>\s*<function=(?P<name>[^<>\n]+)>",
            close_pattern=rf"</function>\s*</{tag}>",
            content="xml-inline",
            content_args={"tag_pattern": _XML_PARAMETER.expression},
            transform=_NAMED,
        ),
        opening="<function=",
        closing="</function>",
        parameters=_XML_PARAMETER,
    )


def _listed(name: str, opening: str, closing: str) -> ToolFormat:
    """Return a format of one call or a JSON list of calls between two texts. Without ``closing``
    it ends with the response."""
    example = f'{opening}[{{"name": "NAME", "arguments": {{"KEY": VALUE}}}}]{closing}'
    ends = {"close": closing} if closing else {}
    fields = _calls(open=opening, **ends, **_LAX_JSON)
    return ToolFormat(name, example, fields, opening=opening, closing=closing)


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        "hermes",
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n</tool_call>',
        _calls(open="<tool_call>", close="</tool_call>", **_LAX_JSON),
        opening="<tool_call>",
        closing="</tool_call>",
    ),
    "xml": _functions_in(
        "xml",
        "tool_call",
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "seed": _functions_in(
        "seed",
        "seed:tool_call",
        "<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n"
        "</seed:tool_call>",
    ),
    "glm": ToolFormat(
        "glm",
        "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        _calls(
            open_pattern=r"<tool_call>\s*(?P<name>[^\s<]+)",
            close="</tool_call>",
            content="xml-inline",
            content_args={"tag_pattern": _GLM_PARAMETER.expression},
            transform=_NAMED,
        ),
        opening="<tool_call>",
        closing="</tool_call>",
        parameters=_GLM_PARAMETER,
    ),
    "llama3_json": ToolFormat(
        "llama3_json",
        '{"name": "NAME", "parameters": {"KEY": VALUE}}',
        _calls(
            open_pattern=r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type|parameters)")',
            **_LAX_JSON,
        ),
    ),
    "mistral": _listed("mistral", "[TOOL_CALLS]", ""),
    "mistral_args": ToolFormat(
        "mistral_args",
        '[TOOL_CALLS]NAME[ARGS]{"KEY": VALUE}',
        _calls(
            open_pattern=r"\[TOOL_CALLS\]\s*+(?P<name>[^\[\]{}\s]++)\s*+"
            r"(?:\[CALL_ID\]\s*+)?(?P<id>\w*+)\s*+\[ARGS\]",
            close_pattern=r"(?=\[TOOL_CALLS\])",
            **_LAX_JSON,
            transform={"id": "{id}", **_NAMED},
        ),
        opening="[TOOL_CALLS]",
    ),
    "nemotron": _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    "apriel": _listed("apriel", "<tool_calls>", "</tool_calls>"),
    "phi4": _listed("phi4", "<|tool_call|>", "<|/tool_call|>"),
    "granite": _listed("granite", "<|tool_call|>", ""),
    "harmony": ToolFormat(
        "harmony",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        '{"KEY": VALUE}<|call|>',
        {
            "reasoning_content": {
                "open_pattern": _HARMONY_START + r"<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>|(?=<\|start\|>)",
                "content": "text",
                "repeats": True,
                "join": "\n",
            },
            **_calls(
                open_pattern=_HARMONY_START
                + f"(?:{_HARMONY_TO}{_HARMONY_CHANNEL}|{_HARMONY_CHANNEL}{_HARMONY_TO})"
                + r"\s*+(?:<\|constrain\|>\s*+)?(?:json\s*+)?<\|message\|>",
                close_pattern=r"<\|call\|>|<\|end\|>|(?=<\|start\|>)",
                **_LAX_JSON,
                transform=_NAMED,
            ),
            "content": {
                "open_pattern": _HARMONY_START + r"<\|channel\|>(?:final|commentary)<\|message\|>",
                "close_pattern": r"<\|return\|>|<\|end\|>|(?=<\|start\|>)",
                "content": "text",
                "repeats": True,
                "join": "\n",
            },
            "outside": _PLAIN_TEXT,  # text in no channel
        },
        opening="to=functions.",
        closing="<|call|>",
        has_channels=True,
    ),
}
"""Format name -> format."""

_BY_MARKER = (
    ("<|channel|>commentary", "harmony"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<seed:tool_call>", "seed"),
    ("<function=", "xml"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("<TOOLCALL>", "nemotron"),
    ("<tool_calls>", "apriel"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
)


def format_of(turn: str) -> str | None:
    """Return the name of the format in which ``turn``, the text of a rendered tool call, is
    written."""
    for marker, name in _BY_MARKER:
        if marker in turn:
            return name
    bare = turn.strip().removeprefix("<|python_tag|>").lstrip()
    return "llama3_json" if bare.startswith(('{"name"', '{"type"')) else None


def response_template(tool_format: ToolFormat | None, *, reasoning: Tags | None) -> dict[str, Any]:
    """Return a response template. ``reasoning``: its tags, if any. A prefix of the response is
    text of the prompt from the beginning of the reasoning on."""
    fields: dict[str, Any] = {}
    if reasoning is not None:
        fields["reasoning_content"] = {
            "open": reasoning.begin,
            "close": reasoning.end,
            "content": "text",
            "repeats": True,
            "join": "\n",
        }
    fields["content"] = _PLAIN_TEXT
    fields |= tool_format.fields if tool_format else {}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\A",
        "fields": fields,
    }
