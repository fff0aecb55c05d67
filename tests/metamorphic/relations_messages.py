"""Relations of chat messages: forms of one message, files of one row, fields that a template drops,
and the prompt before a trained turn."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from chat_templates import (
    PUBLISHED,
    REASONING_FORMS,
    published_tokenizer,
    reasoning_tokenizer,
    trl_templates,
    trl_tokenizer,
)
from metamorphic.base import Broken, Draw, Refused, equal, relation
from metamorphic.draw_text import text_of, write_rows
from metamorphic.relations_data import rows_of

from burnish.chat_message import is_blank
from burnish.data.batches import load_batch
from burnish.data.chat import encode_conversation, encode_prompt
from burnish.data.decoding import response_text
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.notices import collecting
from burnish.data.pieces import plain_ids
from burnish.data.sources import DataError
from burnish.environments.pool import check_start
from burnish.episodes.probing import TOOLS as CALLED
from burnish.episodes.probing import call as call_of
from burnish.episodes.renderer import ChatRenderer
from burnish.reasoning_tags import REASONING_TAGS, THINK, after_reasoning
from burnish.special_tokens import set_configured_ends
from burnish.templates import variables, with_defaults

Messages = list[dict[str, Any]]
Row = dict[str, Any]
_tokenizer = cache(published_tokenizer)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]


def _family(draw: Draw) -> Any:
    return _tokenizer(draw.one(family=list(PUBLISHED)))


def _text(draw: Draw) -> str:
    return "a" + text_of(draw).replace("<", "") + "z"


def _conversation(draw: Draw, *, calls: bool) -> Messages:
    """One to three questions with answers, some with reasoning, a tool call or a flag."""
    messages: Messages = []
    for turn in range(draw.rng.randint(1, 3)):
        messages.append({"role": "user", "content": _text(draw)})
        if calls and draw.rng.random() < 0.6:
            number = draw.rng.randint(0, 9)
            arguments = draw.rng.choice([{}, {"a": number}, {"a": {"b": [number, "c"]}}])
            call_id = f"call{turn:05d}"
            function = {"name": "f", "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            result = {"role": "tool", "content": _text(draw), "tool_call_id": call_id, "name": "f"}
            messages.append(result)
        answer: dict[str, Any] = {"role": "assistant", "content": _text(draw)}
        if draw.rng.random() < 0.3:
            answer["reasoning_content"] = _text(draw)
        if draw.rng.random() < 0.2:
            answer["train"] = False
        messages.append(answer)
    draw.note(messages=messages)
    return messages


def _outcome(draw: Draw, row: Row, tokenizer: Any, name: str = "rows.jsonl", **options: Any) -> Any:
    """Ids and mask of the row of a file, or the reason without the file's name."""
    if name.endswith(".parquet"):
        path = str(draw.folder / name)
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path = write_rows(draw, [row], name)
    try:
        return rows_of(load_batch(SFTDataConfig(sources=(path,), **options), tokenizer))
    except DataError as error:
        return re.sub(r"\S*rows\S*( row 0)?: ", "", str(error).replace(path, "rows"))


@relation
def content_forms(draw: Draw) -> None:
    """Content as a string, as a list of text parts, and null beside tool calls give equal rows, or
    the same refusal. Exact."""
    tokenizer = _family(draw)
    messages = _conversation(draw, calls=True)
    other = copy.deepcopy(messages)
    for message in other:
        content = message["content"]
        cut = draw.rng.randint(0, len(content))
        parts = [{"type": "text", "text": part} for part in (content[:cut], content[cut:])]
        if message.get("tool_calls"):
            message["content"] = draw.rng.choice([None, "", []])
        else:
            message["content"] = draw.rng.choice([parts, [content], parts])
        if "reasoning_content" in message:
            key = draw.rng.choice(["reasoning", "thinking", "reasoning_content"])
            message[key] = message.pop("reasoning_content")
    row: Row = {"messages": messages, "tools": TOOLS}
    expected = _outcome(draw, row, tokenizer)
    equal(_outcome(draw, {**row, "messages": other}, tokenizer), expected, "the row of parts")


@relation
def argument_forms(draw: Draw) -> None:
    """Arguments of tool calls as an object and as JSON text give equal rows. Exact."""
    tokenizer = _tokenizer(draw.one(family=["qwen3", "mistral"]))
    messages = _conversation(draw, calls=True)
    other = copy.deepcopy(messages)
    for message in other:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = function["arguments"]
            text = json.dumps(arguments, indent=draw.rng.choice([None, 1]))
            function["arguments"] = text if arguments else draw.rng.choice(["", "{}", None])
    row: Row = {"messages": messages, "tools": TOOLS}
    expected = _outcome(draw, row, tokenizer, train_on_turns="last")
    found = _outcome(draw, {**row, "messages": other}, tokenizer, train_on_turns="last")
    equal(found, expected, "the row with arguments as text")


@relation
def tool_forms(draw: Draw) -> None:
    """Tools with OpenAI's wrapper and without it, in the forms of Anthropic and MCP, as objects and
    as JSON text, in a column tools or functions, give equal rows, and objects are shown alike by
    environments. Exact."""
    tokenizer = _tokenizer(draw.one(family=["qwen3", "mistral", "llama3"]))
    names = draw.rng.sample(["f", "g", "h"], draw.rng.randint(1, 3))
    tools = [{"name": name, "parameters": {"type": "object"}} for name in names]
    draw.note(tools=tools)
    wrapped = [{"type": "function", "function": tool} for tool in tools]
    forms: list[Any] = [
        draw.rng.choice(
            [
                tool,
                {"function": tool},
                {"type": "function", **tool, "strict": True},
                json.dumps(tool),
            ]
            + [
                {"name": tool["name"], key: tool["parameters"]}
                for key in ("input_schema", "inputSchema")
            ]
        )
        for tool in tools
    ]
    other: Any = forms if draw.rng.random() < 0.5 else json.dumps(forms)
    row: Row = {"messages": _conversation(draw, calls=False)}
    expected = _outcome(draw, {**row, "tools": wrapped}, tokenizer)
    column = draw.one(column=["tools", "functions"])
    equal(_outcome(draw, {**row, column: other}, tokenizer), expected, "the row of other tools")
    objects = [json.loads(form) if isinstance(form, str) else form for form in forms]
    start = check_start({"messages": [{"role": "user", "content": "?"}], "tools": objects})
    equal(json.dumps(start.tools), json.dumps(wrapped), "tools of an environment")


@relation
def text_behind_end(draw: Draw) -> None:
    """An end token and text after the last answer leave the trained tokens as they are, and are
    counted. A second end token of the model takes the place of the first. Exact."""
    family = draw.one(family=[f for f in PUBLISHED if f not in ("deepseek_r1", "qwq")])
    tokenizer = published_tokenizer(family)
    end = last = "<end_of_turn>" if family == "gemma" else PUBLISHED[family][1]
    if draw.one(second=[False, True]):
        last = draw.one(last=[token for token in PUBLISHED[family][0] if token != end])
        set_configured_ends(tokenizer, [int(tokenizer.convert_tokens_to_ids(last))])
    messages = _conversation(draw, calls=False)[-2:]
    answer = {"role": "assistant", "content": messages[-1]["content"]}
    longer = {**answer, "content": f"{answer['content']}{last}{_text(draw)}"}
    trained = []
    for content in (answer, longer):
        with collecting() as notices:
            ids, mask = encode_conversation(tokenizer, [messages[0], content])
        trained.append([i for i, is_trained in zip(ids, mask, strict=True) if is_trained])
        equal("text_after_end" in notices, content is longer, "the notice")
    ends = [int(tokenizer.convert_tokens_to_ids(token)) for token in (end, last)]
    equal(trained[0][-1], ends[0], "the last trained token")
    equal(trained[1], [*trained[0][:-1], ends[1]], "the trained tokens")


@relation
def message_files(draw: Draw) -> None:
    """A row of JSON lines and the same row of Parquet, also with the messages as JSON text, are
    equal, although Parquet fills every message with the keys of the others. Exact."""
    tokenizer = _tokenizer(draw.one(family=["qwen3", "mistral", "chatml"]))
    messages = _conversation(draw, calls=draw.rng.random() < 0.8)
    for message in messages:
        for call in message.get("tool_calls", ()):  # a column of Parquet has one type
            call["function"]["arguments"] = {draw.rng.choice("ab"): draw.rng.randint(0, 9)}
    row: Row = {"messages": messages}
    expected = _outcome(draw, row, tokenizer)
    text = {"messages": json.dumps(messages)}
    for found in (
        _outcome(draw, row, tokenizer, "rows.parquet"),
        _outcome(draw, text, tokenizer, "text_rows.parquet"),
    ):
        equal(found, expected, "the row of Parquet")


@relation
def dropped_fields(draw: Draw) -> None:
    """A mark in any field of a conversation is in the ids of its row, or the row is refused, or the
    field is counted in a notice. Exact."""
    tokenizer = _family(draw)
    calls = draw.facts["family"] in ("qwen3", "mistral") or draw.rng.random() < 0.1
    messages = _conversation(draw, calls=calls)
    if draw.rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": _text(draw)})
    position = draw.rng.randrange(len(messages))
    message = messages[position]
    field = draw.rng.choice(
        [key for key in message if key not in ("role", "train", "tool_call_id")] + ["name"]
    )
    mark = "qzmarkzq"
    if field == "tool_calls":
        message["tool_calls"][0]["function"]["arguments"] = {"a": mark}
    elif field == "content" and message.get("tool_calls"):
        message["content"] = mark
    else:
        message[field] = mark
    draw.note(marked=(position, field))
    with collecting() as notices:
        try:
            ids, _ = encode_conversation(tokenizer, messages, only_last=True, tools=TOOLS)
        except DataError as error:
            raise Refused(str(error)) from error
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train", 1))
    text = "".join(tokenizer.decode(ids).split())
    if mark in text or position > last:
        return
    earlier = field == "reasoning_content" and position < last  # dropped on purpose, not trained
    kinds = {"name": {"name_ignored"}, "reasoning_content": {"reasoning_ignored"}}
    if not earlier and not kinds.get(field, set()) & set(notices):
        raise Broken(f"{field} of message {position} is neither in the row nor reported: {text}")


_trl_tokenizer = cache(trl_tokenizer)
MARKED = ("<think>", "</think>", "<think>", "</think>", "Use the ", " tag", "\n", "```\n", "a", "b")


@cache
def _reader(family: str) -> ChatRenderer:
    """What reads the responses of the policy."""
    tokenizer = _tokenizer(family) if family in PUBLISHED else _trl_tokenizer(family)
    return ChatRenderer(tokenizer, history="template")


def _squeezed(*texts: str) -> tuple[str, ...]:
    return tuple("".join(text.split()) for text in texts)


@relation
def every_part_of_an_answer_is_trained_once(draw: Draw) -> None:
    """The words of the reasoning, the text and the calls of each trained answer are in its trained
    tokens, once, and nowhere else in the row, or the row is refused, or a notice says that the
    reasoning is not rendered. Behind the prompt alone, the last answer is read as the message, and
    a reward reads its text. For all published templates. Exact, without white space."""
    family = draw.one(family=[*PUBLISHED, *trl_templates(thinking=False)])
    if family == "muse_glimmer":
        raise Refused("reasoning and answer are not read, with a warning")
    tokenizer = _tokenizer(family) if family in PUBLISHED else _trl_tokenizer(family)
    reader = _reader(family)
    messages: Messages = []
    words: list[tuple[str, str]] = []
    reasons, calls = draw.one(reasons=[0, 0.5, 1]), draw.one(calls=[0, 0.4])
    only_last = draw.one(only_last=[False, True])
    calls *= reader.reads_tool_calls
    for turn in range(draw.rng.randint(1, 3)):
        messages.append({"role": "user", "content": f"Go {turn}."})
        for step in range(1 + (draw.rng.random() < calls)):
            answer: dict[str, Any] = {"role": "assistant", "content": ""}
            if not step or draw.rng.random() < 0.8:
                answer["content"] = f"ans{turn}{step}e"
            if draw.rng.random() < reasons:
                answer["reasoning_content"] = f"why{turn}{step}e"
            if step == 0 and draw.rng.random() < calls:
                answer["content"] *= draw.rng.randint(0, 1)
                answer["tool_calls"] = [call_of("look_up", {"key": f"k{turn}e"}, f"probe000{turn}")]
                result = {"role": "tool", "name": "look_up", "content": f"res{turn}e"}
                messages += [answer, {**result, "tool_call_id": f"probe000{turn}"}]
            elif not step or messages[-1]["role"] == "tool":
                messages.append({**answer, "content": answer["content"] or f"ans{turn}{step}e"})
        if messages[-1]["role"] == "tool":
            messages.append({"role": "assistant", "content": f"end{turn}e"})
    draw.note(messages=messages)
    for message in messages[-1:] if only_last else messages:
        if message["role"] == "assistant":
            words.append((message.get("reasoning_content", ""), message["content"]))
            words += [
                ("", call["function"]["arguments"]["key"]) for call in message.get("tool_calls", ())
            ]
    tools = CALLED if calls else None
    with collecting() as notices:
        ids, mask = encode_conversation(tokenizer, messages, tools=tools, only_last=only_last)
    trained, whole = (
        str(tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on or every]))
        for every in (False, True)
    )
    dropped = {"reasoning_ignored", "reasoning_dropped"} & notices.keys()
    for reasoning, text in words:
        for word, may_lack in ((reasoning, bool(dropped)), (text, False)):
            times = trained.count(word), whole.count(word)
            if word and times != (1, 1) and not (may_lack and times == (0, 0)):
                raise Broken(
                    f"{word!r} is trained {times[0]} times, and {times[1]} in all: {whole!r}"
                )
    end = len(mask) - mask[::-1].index(True)
    begin = end - next((i for i, on in enumerate(reversed(mask[:end])) if not on), end)
    message = reader.parse(ids[begin:end], tools or (), prompt_ids=ids[:begin]).message
    reasoning = "" if "reasoning_ignored" in notices else messages[-1].get("reasoning_content", "")
    read = _squeezed(str(message.get("reasoning_content", "")), str(message["content"]))
    equal(read, _squeezed(reasoning, messages[-1]["content"]), f"what is read of {whole[-200:]!r}")
    response = response_text(tokenizer, ids[:begin], ids[begin:end])
    scored = after_reasoning(response, str(tokenizer.decode(ids[:begin])))
    equal(_squeezed(scored), _squeezed(messages[-1]["content"]), f"what is scored of {response!r}")


@relation
def answers_with_marks_are_trained_once(draw: Draw) -> None:
    """An answer that mentions marks of reasoning is trained as what a policy would have to sample:
    read as a response, the trained tokens are the reasoning and the text of the answer. Or the row
    is refused, or a notice says what is lost or what counts as reasoning. Exact, without white
    space."""
    family = draw.one(family=[*PUBLISHED, *trl_templates()])
    tokenizer = _tokenizer(family) if family in PUBLISHED else _trl_tokenizer(family)
    reasoning, text = (
        "q" + "".join(draw.rng.choices(MARKED, k=draw.rng.randint(0, 5))) + "z" for _ in range(2)
    )
    reasoning = reasoning.replace("</think>", "").replace("<think>", "")
    form = draw.one(form=["key", "text", "lines", "unopened", "none", "none"])
    heads = {
        "text": "<think>{}</think>",
        "lines": "<think>\n{}\n</think>\n\n",
        "unopened": "{}</think>",
    }
    answer = {"role": "assistant", "content": heads.get(form, "").format(reasoning) + text}
    if form == "key":
        answer["reasoning_content"] = reasoning
    draw.note(answer=answer)
    with collecting() as notices:
        ids, mask = encode_conversation(tokenizer, [{"role": "user", "content": "Go."}, answer])
    response = [i for i, is_trained in zip(ids, mask, strict=True) if is_trained]
    message = _reader(family).parse(response, ()).message
    read = _squeezed(str(message.get("reasoning_content", "")), str(message["content"]))
    reasoning = "" if form == "none" or "reasoning_ignored" in notices else reasoning
    allowed = [_squeezed(reasoning, text)]
    if "reasoning_unopened" in notices:
        head, _, rest = answer["content"].partition("</think>")
        allowed += [_squeezed(head, rest), _squeezed("", answer["content"])]
    elif form != "key":
        allowed.append(_squeezed("", answer["content"]))  # the template knows no reasoning
    if read not in allowed:
        raise Broken(f"it is read as {read}, not {allowed}; notices: {sorted(notices)}")


@cache
def _thinking(family: str, options: str) -> tuple[Any, ChatRenderer]:
    """A tokenizer whose template has ``options`` as defaults, and what reads its responses."""
    values = json.loads(options)
    if family in REASONING_FORMS:
        tokenizer = reasoning_tokenizer(family, **values)
    else:
        tokenizer = published_tokenizer(family) if family in PUBLISHED else trl_tokenizer(family)
        tokenizer.chat_template = with_defaults(tokenizer.chat_template, values)
    return tokenizer, ChatRenderer(tokenizer, history="template")


@cache
def _options_of(family: str) -> list[dict[str, bool]]:
    """Values of the variables about reasoning that a template reads, one at a time."""
    if family in REASONING_FORMS:
        return [{"thinking": True}, {"thinking": False}]
    tokenizer = _tokenizer(family) if family in PUBLISHED else _trl_tokenizer(family)
    names = sorted(name for name in variables(tokenizer.chat_template) if "thinking" in name)
    return [{}, *({name: value} for name in names for value in (True, False))]


_BLOCKS = ("{}", "<think>{}</think>", "<think>\n{}\n</think>\n\n")
"""Reasoning under its key, and in the text."""


@relation
def answers_continue_the_block_of_their_prompt(draw: Draw) -> None:
    """A trained answer closes the block of reasoning that its prompt opens, once, and opens none if
    the prompt closes it. Read as a response to this prompt, it is the message, whose words are
    trained once. Or the row is refused, or a notice says that the reasoning is not rendered. For
    each option of a template about reasoning, with a conversation before. Exact, without white
    space."""
    templates = ["qwen3", "qwq", "deepseek_r1", *trl_templates()]
    family = draw.rng.choice([draw.rng.choice(templates), draw.rng.choice(REASONING_FORMS)])
    options = draw.rng.choice(_options_of(family))
    draw.note(family=family, options=options)
    tokenizer, reader = _thinking(family, json.dumps(options))
    reasoning, text, earlier = ("".join(draw.rng.choices("abq \n", k=6)) + "z" for _ in range(3))
    reasoning = f"why{reasoning}" * draw.rng.randint(0, 1)
    text = f"ans{text}"
    form = draw.one(form=["none", *_BLOCKS, *_BLOCKS[1:]])
    reasoning = "" if form == "none" else reasoning
    answer = {"role": "assistant", "content": text}
    if form in _BLOCKS[1:]:
        answer["content"] = form.format(reasoning) + text
    if form == "{}" or (reasoning and draw.one(both=[False, False, True])):
        answer["reasoning_content"] = reasoning
    start = [{"role": "user", "content": "Go."}]
    if draw.rng.random() < 0.4:
        start += [{"role": "assistant", "content": earlier}, {"role": "user", "content": "On."}]
    draw.note(answer=answer, start=start)
    with collecting() as notices:
        ids, mask = encode_conversation(tokenizer, [*start, answer], only_last=True)
    begin, end = mask.index(True), len(mask) - mask[::-1].index(True)
    prompt, trained = (str(tokenizer.decode(part)) for part in (ids[:begin], ids[begin:end]))
    reasoning = "" if "reasoning_ignored" in notices else reasoning
    message = reader.parse(ids[begin:end], (), prompt_ids=ids[:begin]).message
    read = _squeezed(str(message.get("reasoning_content", "")), str(message["content"]))
    equal(read, _squeezed(reasoning, text), f"the message read from {trained!r}")
    for word, times in (("ans", 1), ("why", int(bool(reasoning)))):
        equal(trained.count(word), times, f"times that {word!r} is in {trained!r}")
    marks = tuple(trained.count(mark) for mark in ("<think>", "</think>"))
    if prompt.rstrip().endswith("<think>"):
        equal(marks, (0, 1), f"the marks in {trained!r}")
    elif prompt.rstrip().endswith("</think>"):
        equal(marks, (0, 0), f"the marks in {trained!r}")


@cache
def _tagged(form: str, number: int) -> tuple[Any, ChatRenderer]:
    """As :func:`_thinking`, with the tags of another family."""
    tokenizer, tags = reasoning_tokenizer(form, thinking=True), REASONING_TAGS[number]
    template = str(tokenizer.chat_template).replace("<think>", tags.begin)
    tokenizer.chat_template = template.replace("</think>", tags.end)
    return tokenizer, ChatRenderer(tokenizer, history="template")


@relation
def cut_answers_are_trained_as_written(draw: Draw) -> None:
    """The beginning of a trained answer, read as a response that a limit cut, is trained as these
    characters, without an end, also behind and inside of tool calls. Or it is refused, or has no
    message that says where it was cut. Exact, without white space."""
    if draw.one(other=[False, True]):
        number = draw.one(tags=range(len(REASONING_TAGS)))
        tokenizer, reader = _tagged(draw.one(form=REASONING_FORMS), number)
        tags = REASONING_TAGS[number]
    else:
        family = draw.one(family=["qwen3", "qwq", "deepseek_r1", *trl_templates()])
        options = draw.rng.choice(_options_of(family))
        tokenizer, reader = _thinking(family, json.dumps(options))
        tags = THINK
    reasoning, text = ("".join(draw.rng.choices("abq \n", k=6)) + "z" for _ in range(2))
    answer = {"role": "assistant", "content": f"ans{text}"}
    if draw.one(reasons=[True, True, False]):
        answer["reasoning_content"] = f"why{reasoning}"
    question = {"role": "user", "content": "Go."}
    count = draw.one(calls=[0, 0, 1, 2, 3]) if reader.reads_tool_calls else 0
    if count:
        answer["tool_calls"] = [
            call_of("look_up", {"key": f"k{i}z"}, f"probe000{i}") for i in range(count)
        ]
    tools = CALLED if count else ()
    ids, mask = encode_conversation(tokenizer, [question, answer], tools=tools or None)
    begin, end = mask.index(True), len(mask) - mask[::-1].index(True)
    prompt, written = (str(tokenizer.decode(part)) for part in (ids[:begin], ids[begin:end]))
    last = f"k{count - 1}z" if count else f"ans{text}".strip()
    written = written[: written.index(last) + len(last)]
    written = written[: draw.one(length=range(1, len(written) + 1))]
    sampled = plain_ids(tokenizer, written)
    message = reader.parse(sampled, tools, prompt_ids=ids[:begin]).message
    draw.note(answer=answer, prompt=prompt, written=written, message=message)
    is_closed = tags.end in written and not (message["content"] and "reasoning_content" in message)
    is_closed &= prompt.rstrip().endswith(tags.begin) or not message["content"]
    if is_closed or is_blank(message) or tags.begin.startswith(written.strip()):
        raise Refused("the message does not say where it was cut")
    row = [question, {**message, "finish_reason": "length"}]
    ids, mask = encode_conversation(tokenizer, row, tools=tools or None)
    trained = str(tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]))
    equal(_squeezed(trained), _squeezed(written), "the trained text")


@relation
def text_behind_calls_is_trained_as_written(draw: Draw) -> None:
    """A response with text behind its calls, or with calls of which some are malformed, is trained
    as these characters, also if results of its complete calls follow, and a prompt has them. Or it
    is refused. Exact, without white space; complete responses whose calls the template writes in
    another form are not compared."""
    family = draw.one(family=["qwen3", *trl_templates()])
    tokenizer, reader = _thinking(family, json.dumps(draw.rng.choice(_options_of(family))))
    if not reader.reads_tool_calls:
        raise Refused("no format of calls")
    count = draw.one(calls=[1, 2, 3])
    calls = [call_of("look_up", {"key": f"k{i}z"}, f"probe000{i}") for i in range(count)]
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    if draw.one(reasons=[False, True]):
        answer["reasoning_content"] = "whyz"
    if draw.one(speaks=[False, True]):
        answer["content"] = "ans"
    question = {"role": "user", "content": "Go."}
    ids, mask = encode_conversation(tokenizer, [question, answer], tools=CALLED)
    begin, end = mask.index(True), len(mask) - mask[::-1].index(True)
    written = str(tokenizer.decode(ids[begin : end - 1]))
    place = draw.one(behind=range(count))
    head = written[: written.index(f"k{place}z")]
    rest = written[len(head) :].replace(f"k{place}z", draw.one(key=["q", '"', "]{", "\n"]), 1)
    written = head + rest + draw.one(tail=["", " bye", "\n<tool_call>", "\n\n{", "</tool_call>"])
    sampled = [*plain_ids(tokenizer, written), ids[end - 1]]
    message = reader.parse(sampled, CALLED, prompt_ids=ids[:begin], ended=True).message
    draw.note(answer=answer, written=written, message=message)
    row = [question, message]
    results = [
        {"role": "tool", "content": "4", "tool_call_id": made["id"], "name": "look_up"}
        for made in message.get("tool_calls", ())
    ]
    if results and draw.one(goes_on=[False, True]):
        row += [*results, {"role": "assistant", "content": "Done.", "train": False}]
    ids, mask = encode_conversation(tokenizer, row, tools=CALLED)
    trained = str(tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]))
    equal(_squeezed(trained), _squeezed(str(tokenizer.decode(sampled))), "the trained text")


@relation
def trained_prompt(draw: Draw) -> None:
    """The ids before the first trained turn of a conversation are those of the RL prompt of the
    same history, and the text before each other one is its text. Exact; texts are compared without
    white space, which SentencePiece tokenizers do not keep."""
    tokenizer = _family(draw)
    messages = _conversation(draw, calls=draw.facts["family"] in ("qwen3", "mistral"))
    last = draw.one(only_last=[False, True])
    ids, mask = encode_conversation(tokenizer, messages, only_last=last)
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"][-1 if last else 0 :]
    turns = [i for i in turns if messages[i].get("train", True)]
    equal(len(starts), len(turns), "the number of trained turns")
    for start, turn in zip(starts, turns, strict=True):
        _, prompt = encode_prompt(tokenizer, messages[:turn])
        if turn == turns[0]:
            equal(ids[:start], prompt, f"the prompt before message {turn}")
        texts = ["".join(tokenizer.decode(part).split()) for part in (ids[:start], prompt)]
        equal(texts[0], texts[1], f"the text before message {turn}")
