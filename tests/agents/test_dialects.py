"""The dialects against the official clients: they parse what the dialects write, and what they send
next is read as the same messages.

The clients run in this process with a transport that calls the dialect.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from burnish.agents.anthropic_messages import Messages
from burnish.agents.calls import (
    CallError,
    Choice,
    ModelCall,
    ModelReply,
    check_supported,
)
from burnish.agents.openai_chat import ChatCompletions, Completions
from burnish.agents.openai_responses import Responses
from burnish.agents.prompts import message_key

DIALECTS = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = DIALECTS.values()

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
}
ASSISTANT = {
    "role": "assistant",
    "content": "Ich schaue nach … 🌦\u2028",
    "reasoning_content": "Zwei Städte:\n\x85 両方",
    "tool_calls": [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city, "days": [1, 2.5, None]}},
        }
        for number, city in enumerate(["Zürich", "Łódź"])
    ],
}
ARGUMENTS_TEXT = tuple(
    json.dumps(made["function"]["arguments"], indent=1)
    for made in ASSISTANT["tool_calls"]  # type: ignore[attr-defined]
)
RESULTS = [
    {"role": "tool", "content": text, "tool_call_id": f"call_{number}", "name": "weather"}
    for number, text in enumerate(["12 °C", ""])
]
START = [
    {"role": "system", "content": "Sei kurz."},
    {"role": "user", "content": "Wetter in Zürich und Łódź?"},
]
WANTED = [*START, ASSISTANT, *RESULTS]


def reply(*choices: Choice) -> ModelReply:
    counts = {"prompt_tokens": 20, "cached_tokens": 5, "completion_tokens": 7}
    return ModelReply("r1", created=1_700_000_000, model="m", choices=choices, **counts)


def text_choice(text: str = "Hello", **fields: Any) -> Choice:
    return Choice({"role": "assistant", "content": text}, fields.pop("finish", "stop"), **fields)


TOOLS_REPLY = reply(Choice(ASSISTANT, "tool_calls", ARGUMENTS_TEXT))
SAMPLED = {
    "token_ids": (7, 8, 9),
    "token_texts": ("He", "\ufffd", "llo"),
    "logprobs": (-0.5, -float("inf"), -1.5),
}


class Server:
    """A transport that answers with replies in order, and the calls that it read."""

    def __init__(self, *replies: ModelReply | CallError, in_stream: CallError | None = None):
        self.replies = list(replies)
        self.in_stream = in_stream
        self.calls: list[ModelCall] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        dialect = DIALECTS[request.url.path]
        try:
            call = dialect.read(json.loads(request.content), max_messages=100)
            check_supported(call)
            self.calls.append(call)
            answer = self.replies.pop(0)
            if isinstance(answer, CallError):
                raise answer
        except CallError as error:
            return httpx2.Response(error.status, json=dialect.error(error))
        if not call.stream:
            return httpx2.Response(200, json=dialect.write(call, answer))
        events = list(dialect.writer(call, answer.start).finish(answer))
        if self.in_stream is not None:
            events = [*events[:2], dialect.error_event(self.in_stream)]
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, text="".join(events), headers=headers)

    @property
    def openai(self) -> openai.OpenAI:
        client = httpx2.Client(transport=httpx2.MockTransport(self))
        return openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=client, max_retries=0)

    @property
    def openai_async(self) -> openai.AsyncOpenAI:
        client = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return openai.AsyncOpenAI(
            api_key="k", base_url="http://x/v1", http_client=client, max_retries=0
        )

    @property
    def anthropic(self) -> anthropic.Anthropic:
        client = httpx2.Client(transport=httpx2.MockTransport(self))
        return anthropic.Anthropic(
            api_key="k", base_url="http://x", http_client=client, max_retries=0
        )


# ---- round trips through the clients -----------------------------------------------------------


def chat_turn(server: Server, messages: list[Any], *, stream: bool) -> Any:
    arguments: dict[str, Any] = {"model": "m", "messages": messages, "tools": [TOOL]}
    if not stream:
        return server.openai.chat.completions.create(**arguments)
    options = {"include_usage": True}
    with server.openai.chat.completions.stream(**arguments, stream_options=options) as events:
        return events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_returns_a_chat_message_unchanged(stream: bool) -> None:
    server = Server(TOOLS_REPLY, reply(text_choice()))
    start: list[Any] = [{"role": "developer", "content": "Sei kurz."}, START[1]]
    first = chat_turn(server, start, stream=stream)
    message = first.choices[0].message.model_dump()
    results = [{k: v for k, v in result.items() if k != "name"} for result in RESULTS]
    last = chat_turn(server, [*start, message, *results], stream=stream)

    assert list(server.calls[1].messages) == WANTED
    assert server.calls[1].tools == (TOOL,)
    assert [made["function"]["arguments"] for made in message["tool_calls"]] == [*ARGUMENTS_TEXT]
    assert first.choices[0].finish_reason == "tool_calls"
    assert last.choices[0].message.content == "Hello"
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (20, 27)
    assert last.usage.prompt_tokens_details.cached_tokens == 5


def responses_turn(server: Server, given: list[Any], *, stream: bool) -> Any:
    tool = {"type": "function", **TOOL["function"], "strict": True}
    arguments: dict[str, Any] = {"model": "m", "input": given, "instructions": "Sei kurz."}
    arguments["tools"] = [tool]
    if not stream:
        return server.openai.responses.create(**arguments)
    with server.openai.responses.stream(**arguments) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_returns_items_of_responses_unchanged(stream: bool) -> None:
    server = Server(TOOLS_REPLY, reply(text_choice()))
    first = responses_turn(server, START[1:], stream=stream)
    results = [
        {"type": "function_call_output", "call_id": r["tool_call_id"], "output": r["content"]}
        for r in RESULTS
    ]
    items = [item.model_dump(exclude_unset=True) for item in first.output]
    last = responses_turn(server, [*START[1:], *items, *results], stream=stream)

    assert list(server.calls[1].messages) == WANTED
    assert server.calls[1].tools == (TOOL,)
    assert server.calls[1].ignored == ("strict",)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in first.output] == kinds
    assert [item.arguments for item in first.output[2:]] == [*ARGUMENTS_TEXT]
    assert len({item.id for item in first.output}) == 4
    assert (last.output_text, last.status, last.usage.total_tokens) == ("Hello", "completed", 27)


def messages_turn(server: Server, messages: list[Any], *, stream: bool, **options: Any) -> Any:
    tool = {"name": "weather", "description": "Weather.", "input_schema": PARAMETERS}
    cached = {"cache_control": {"type": "ephemeral"}}
    arguments: dict[str, Any] = {
        "model": "m",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "Sei kurz.", **cached}],
        "messages": messages,
        "tools": [{**tool, **cached}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        **options,
    }
    if not stream:
        return server.anthropic.messages.create(**arguments)
    with server.anthropic.messages.stream(**arguments) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_the_anthropic_client_returns_blocks_unchanged(stream: bool) -> None:
    server = Server(TOOLS_REPLY, reply(text_choice(stop_sequence="END")))
    first = messages_turn(server, START[1:], stream=stream)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": result["tool_call_id"],
            "content": [{"type": "text", "text": result["content"]}],
        }
        for result in RESULTS
    ]
    history = [
        *START[1:],
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Und?"}]},
    ]
    last = messages_turn(server, history, stream=stream, stop_sequences=["END"])

    assert list(server.calls[1].messages) == [*WANTED, {"role": "user", "content": "Und?"}]
    assert server.calls[1].tools == (TOOL,)
    assert (server.calls[1].max_tokens, server.calls[1].stop) == (100, ("END",))
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.content[0].signature and first.stop_reason == "tool_use"
    assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", "END")
    assert last.content[0].text == "Hello"
    usage = last.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (15, 5, 7)


def test_thinking_is_not_sent_to_a_program_that_did_not_ask_for_it() -> None:
    server = Server(reply(Choice({**ASSISTANT, "tool_calls": []}, "length")))
    message = messages_turn(server, START[1:], stream=False, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


async def agents_result(api: str, server: Server, *, stream: bool) -> str:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather."""
        return f"{city}: 12 °C"

    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    model = kind(model="m", openai_client=server.openai_async)
    agent = agents.Agent(name="a", instructions="Sei kurz.", tools=[weather], model=model)
    if not stream:
        return str((await agents.Runner.run(agent, "Wetter?")).final_output)
    running = agents.Runner.run_streamed(agent, "Wetter?")
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_runs_a_tool_and_returns_the_turn(api: str, stream: bool) -> None:
    """It sends no reasoning back over chat completions."""
    message = copy.deepcopy(ASSISTANT)
    for made in message["tool_calls"]:  # type: ignore[attr-defined]
        del made["function"]["arguments"]["days"]
    server = Server(reply(Choice(message, "tool_calls")), reply(text_choice("12 °C")))
    assert asyncio.run(agents_result(api, server, stream=stream)) == "12 °C"
    sent = [dict(each) for each in server.calls[1].messages]
    for each in (message, sent[2]):
        each.pop("reasoning_content", None) if api == "chat" else None
    assert sent[2] == message
    assert [each["content"] for each in sent[3:]] == ["Zürich: 12 °C", "Łódź: 12 °C"]
    assert [each["tool_call_id"] for each in sent[3:]] == ["call_0", "call_1"]


ODD = {"\ud800": float("nan"), "s": "\udfff", "big": 10**30, "deep": {"f": [-float("inf")]}}
"""Arguments that a model can write: Python reads NaN, -Infinity and escaped lone surrogates."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", [chat_turn, responses_turn, messages_turn])
def test_a_message_that_is_not_well_formed_is_recognized_when_it_returns(
    turn: Any, stream: bool
) -> None:
    made = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ODD}}
    sampled = {"role": "assistant", "content": "a\ud800", "tool_calls": [made]}
    server = Server(reply(Choice(sampled, "tool_calls", (json.dumps(ODD),))), reply(text_choice()))
    first = turn(server, START[1:], stream=stream)
    if turn is chat_turn:
        sent = [first.choices[0].message.model_dump()]
    elif turn is responses_turn:
        sent = [item.model_dump(exclude_unset=True) for item in first.output]
    else:
        sent = [{"role": "assistant", "content": [block.model_dump() for block in first.content]}]
    turn(server, [*START[1:], *sent, {"role": "user", "content": "u"}], stream=False)
    assert message_key(server.calls[1].messages[-2]) == message_key(sampled)


# ---- log-probs, usage, several choices ---------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_chat_have_token_bytes_and_logprob(stream: bool) -> None:
    """JSON has no infinity: -9999 is sent. A part of a character has no bytes."""
    server = Server(reply(text_choice(**SAMPLED), text_choice("Hi", **SAMPLED)))
    arguments: dict[str, Any] = {"model": "m", "messages": START, "logprobs": True, "n": 2}
    found: list[Any] = []
    if stream:
        for chunk in server.openai.chat.completions.create(**arguments, stream=True):
            found += [c for c in chunk.choices if c.logprobs is not None]
    else:
        found = server.openai.chat.completions.create(**arguments).choices
    assert [choice.index for choice in found] == [0, 1]
    for choice in found:
        entries = choice.logprobs.content
        assert [entry.token for entry in entries] == ["He", "\ufffd", "llo"]
        assert [entry.bytes for entry in entries] == [[72, 101], [], [108, 108, 111]]
        assert [entry.logprob for entry in entries] == [-0.5, -9999.0, -1.5]
        assert all(entry.top_logprobs == [] for entry in entries)
    assert server.calls[0].n == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once", [5, 6], ["Once"], [[5, 6]]])
def test_completions_take_text_or_ids_and_return_text(prompt: Any, stream: bool) -> None:
    """text_offset: 0, 0 + len("He"), 2 + 1."""
    server = Server(reply(text_choice(**SAMPLED, finish="length")))
    arguments: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 3, "logprobs": 0}
    if stream:
        options = {"include_usage": True}
        chunks = server.openai.completions.create(**arguments, stream=True, stream_options=options)
        first, last = chunks
        choice = first.choices[0]
        assert last.choices == [] and last.usage.total_tokens == 27
    else:
        completion = server.openai.completions.create(**arguments)
        choice = completion.choices[0]
        assert completion.usage.total_tokens == 27
    assert (choice.text, choice.finish_reason) == ("Hello", "length")
    assert choice.logprobs.tokens == ["He", "\ufffd", "llo"]
    assert choice.logprobs.token_logprobs == [-0.5, -9999.0, -1.5]
    assert choice.logprobs.text_offset == [0, 2, 3]
    assert server.calls[0].prompt == ("Once" if "Once" in prompt else (5, 6))
    assert server.calls[0].messages == ()


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_cut_by_the_limit_is_incomplete(stream: bool) -> None:
    server = Server(reply(text_choice(**SAMPLED, finish="length")))
    arguments: dict[str, Any] = {"model": "m", "input": "Hi", "max_output_tokens": 3}
    arguments["include"] = ["message.output_text.logprobs"]
    if stream:
        *events, last = server.openai.responses.create(**arguments, stream=True)
        response = last.response
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert last.type == "response.incomplete"
    else:
        response = server.openai.responses.create(**arguments)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    part = response.output[0].content[0]
    assert [entry.logprob for entry in part.logprobs] == [-0.5, -9999.0, -1.5]
    assert server.calls[0].max_tokens == 3


# ---- errors ------------------------------------------------------------------------------------

ERRORS = [
    (400, "invalid_request_error", "BadRequestError", "invalid_request_error"),
    (400, "context_length_exceeded", "BadRequestError", "invalid_request_error"),
    (401, "authentication_error", "AuthenticationError", "authentication_error"),
    (404, "not_found_error", "NotFoundError", "not_found_error"),
    (410, "episode_closed", "APIStatusError", "invalid_request_error"),
    (413, "invalid_request_error", "APIStatusError", "request_too_large"),
    (429, "rate_limit_error", "RateLimitError", "rate_limit_error"),
    (500, "api_error", "InternalServerError", "api_error"),
]


def test_the_anthropic_tool_runner_goes_on_without_a_thread() -> None:
    """Its second call of a thread would have the new messages alone."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: Name of a city.
        """
        return f"12 °C in {city}"

    server = Server(TOOLS_REPLY, reply(text_choice("Cold.")))
    runner = server.anthropic.beta.messages.tool_runner(
        model="m",
        max_tokens=99,
        tools=[weather],
        messages=[{"role": "user", "content": "Wetter?"}],
    )
    assert runner.until_done().content[0].text == "Cold."
    assert [len(call.messages) for call in server.calls] == [1, 1 + 1 + len(RESULTS)]


@pytest.mark.parametrize(("status", "kind", "name", "anthropic_type"), ERRORS)
def test_the_clients_raise_their_exception_for_each_error(
    status: int, kind: Any, name: str, anthropic_type: str
) -> None:
    def server() -> Server:
        return Server(CallError("No: \ud800.", status=status, kind=kind, param="seed"))

    with pytest.raises(openai.APIStatusError) as chat:
        server().openai.chat.completions.create(model="m", messages=START)  # type: ignore[arg-type]
    with pytest.raises(openai.APIStatusError) as responses:
        server().openai.responses.create(model="m", input="Hi")
    for found in (chat.value, responses.value):
        assert isinstance(found, vars(openai)[name]) and found.status_code == status
        assert found.param == "seed" and found.body["message"] == "No: \ufffd."
    with pytest.raises(anthropic.APIStatusError) as message:
        messages_turn(server(), START[1:], stream=False)
    body = message.value.body
    assert message.value.status_code == status and isinstance(body, dict)
    assert body["type"] == "error" and body["error"]["type"] == anthropic_type


def test_the_clients_raise_an_error_within_a_stream() -> None:
    error = CallError("The engine failed.", status=500, kind="api_error")
    with pytest.raises(openai.APIError, match="The engine failed"):
        chat_turn(Server(TOOLS_REPLY, in_stream=error), START, stream=True)
    with pytest.raises(openai.APIError, match="The engine failed"):
        responses_turn(Server(TOOLS_REPLY, in_stream=error), START[1:], stream=True)
    with pytest.raises(anthropic.APIStatusError, match="The engine failed"):
        messages_turn(Server(TOOLS_REPLY, in_stream=error), START[1:], stream=True)
