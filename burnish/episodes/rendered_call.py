"""The round trip of a tool call: what a chat template writes for it, read back as a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from burnish.data.chat import encode_conversation
from burnish.data.left_out import REFUSED_IN_EPISODES
from burnish.data.sources import DataError
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.probing import TOOLS, assistant, call, user

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reads_rendered_call(
    tokenizer: PreTrainedTokenizerBase, parse: Callable[..., ParsedMessage]
) -> bool:
    """Return whether ``parse``, that of a renderer, reads the call that the chat template writes.

    The response is that of a training row. A template of which no row can be made is not tested.
    """
    rendered = call("look_up", {"key": "two words", "limit": 2}, "probe0000")
    messages = [user("Go."), assistant("", tool_calls=[rendered])]
    try:
        ids, mask = encode_conversation(
            tokenizer, messages, tools=TOOLS, refused=REFUSED_IN_EPISODES
        )
    except DataError:
        return True
    turn = [place for place, trained in enumerate(mask) if trained]
    prompt, sampled = ids[: turn[0]] if turn else ids, [ids[place] for place in turn]
    parsed = parse(sampled, TOOLS, prompt_ids=prompt, ended=True)
    functions = [each["function"] for each in parsed.message.get("tool_calls", ())]
    return functions == [rendered["function"]]
