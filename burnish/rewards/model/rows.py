"""Encode a prompt and a response as the token row that ``burnish rm`` would train on.

The policy's own tokens are that row if both models have the same tokens and template and the
template writes the answer as it was sampled (:class:`SampledRows`). Otherwise the reward model's
tokenizer makes the row (:class:`RowEncoder`).
"""

from __future__ import annotations

import contextlib
import logging
import re  # house: ok it searches the chat template alone
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from burnish.chat_message import REASONING, with_cut_end, without_flags
from burnish.data.chat import encode_completion, encode_conversation, encode_prompt, end_texts
from burnish.data.decoding import response_text, tokens_within
from burnish.data.left_out import Field, renders_tools
from burnish.data.messages import as_messages, as_rendered
from burnish.data.pieces import encode_piece
from burnish.data.rendering import Tools, habits_of, render_text, tags_of, with_reasoning_once
from burnish.data.sources import DataError
from burnish.data.thoughts import without_channels
from burnish.models.scalar_model import SCORES_AT
from burnish.reasoning_tags import REASONING_TAGS, THINK, Tags
from burnish.rewards.base import RewardError, RewardInput
from burnish.rewards.texts import text_before
from burnish.special_tokens import special_tokens
from burnish.templates import of_conversation
from burnish.types import Prompt, Sample
from burnish.vocabulary import num_tokens

log = logging.getLogger("burnish")

Pair = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, response token ids)."""
Encode = Callable[[RewardInput], Pair]
"""Function that encodes an item."""
TextOf = Callable[[Sample], str]
"""Function that returns the text of the last response of a sample as it continues its prompt."""


class _Answer(NamedTuple):
    """The last response of a sample, and what it answers."""

    sampled: Pair
    """The policy's own token ids."""
    text: str
    continuation: str
    """The text as it continues that of the prompt, with its first space."""
    ended: bool
    """False if a token limit cut the response."""
    prompt: str | None
    """Text of a prompt. None: the response answers the conversation of an episode."""
    messages: Sequence[Mapping[str, Any]] | None
    """Messages that the policy read. None: the prompt is plain text."""
    tools: Tools
    message: Mapping[str, Any]
    """The response as a message; of an episode, as it was parsed."""


def _answer_of(item: RewardInput, text_of: TextOf | None = None) -> _Answer:
    """``text_of``: returns the continuation. None: it is the text of the sample."""
    prompt, sample, episode = item.prompt, item.sample, item.sample.episode
    pair = sample.last_response
    continuation = sample.text if text_of is None else text_of(sample)
    response = (pair, sample.text, continuation, not sample.is_cut)
    if episode is None:
        message = without_channels({"role": "assistant", "content": sample.text})
        conversation = (prompt.text, prompt.messages, prompt.tools, message)
        return _Answer(*response, *conversation)
    number = len(episode.turns) - 1
    text = episode.text_before(number)
    if text is not None:
        message = without_channels({"role": "assistant", "content": sample.text})
        if list(pair[0]) == list(prompt.token_ids):  # the prompt of the data, rendered
            conversation = (prompt.text, prompt.messages, prompt.tools, message)
        else:
            conversation = (text, None, None, message)
        return _Answer(*response, *conversation)
    messages, tools = episode.messages_before(number), episode.tools_of(number)
    message = dict(episode.turns[-1].message)
    if message.get("content", "").strip() == sample.text.strip():  # parsing strips white space
        message["content"] = sample.text
    return _Answer(*response, None, messages, tools or None, message)


_TEXT = "Ab c, 12 + \u00e9\n  xyzzy"
_ANSWER = "qzanswerzq"
_QUESTION = {"role": "user", "content": "Go."}
_MARKER = re.compile(r"<[^<>'\"\s{}%]+>|\[/?[A-Z_]+\]")
_MOST_FORMS = 1024  # cached forms of answers per reward
_WRITTEN_BY_THE_POLICY: frozenset[Field] = frozenset({"content", "tool calls"})
"""Parts that a template may not leave out. A policy may write no text, or text with tool calls."""


def prompt_problem(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | None:
    """Return why the template of a reward model cannot render a prompt of messages, or None."""
    assert prompt.messages is not None
    try:
        encode_prompt(
            tokenizer, prompt.messages, tools=prompt.tools, refused=_WRITTEN_BY_THE_POLICY
        )
    except DataError as error:
        return str(error)
    return None


def reward_encoder(
    reward_tokenizer: PreTrainedTokenizerBase,
    policy_tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    step_separator: str | None = None,
    to_last_token: bool = False,
    pad_id: int | None = None,
    max_len: int | None = None,
) -> Encode:
    """Return the encoder of a reward model for the responses of a policy. Raises RewardError if the
    reward model's template cannot write an answer. ``name``: as in
    :class:`RowEncoder`. ``step_separator``: that of a process reward model; responses keep it if it
    is a special token of the policy. ``to_last_token``: rows of conversations go to the last token
    of their rendering that is not ``pad_id``; otherwise they end with the end token of the answer.
    ``max_len``: tokens behind the end token that the model has no positions for are left out.
    """
    text_of = partial(_with_first_space, policy_tokenizer)
    if step_separator and tokens_within(policy_tokenizer, step_separator):
        text_of = partial(_with_separators, policy_tokenizer, step_separator)
    continues = step_separator is not None
    rows = RowEncoder(reward_tokenizer, name, continues=continues, text_of=text_of)
    rows.check()
    same = same_tokens(reward_tokenizer, policy_tokenizer)
    encode: Encode = SampledRows(rows) if same else rows
    if not to_last_token or continues:
        return encode
    return _to_last_token(encode, rows, pad_id, max_len)


def _to_last_token(
    encode: Encode, rows: RowEncoder, pad_id: int | None, max_len: int | None
) -> Encode:
    """Return an encoder of conversations as the template of ``rows`` renders them, up to the last
    token that is not ``pad_id``, as transformers' classifiers score it. ``encode`` encodes plain
    text, cut answers, and what the template cannot render; then the tokens that it writes behind
    the end token of an answer follow."""
    end, *behind = rows.end_of_answers()
    if behind:
        _notice_of_end(rows, behind)

    def fitting(ids: list[int]) -> list[int]:
        """Return the ids without those behind the end token that are beyond ``max_len``."""
        over = 0 if max_len is None else len(ids) - max_len
        written = ids[len(ids) - len(behind) :] == behind
        return ids[:-over] if written and 0 < over <= len(behind) else ids

    def encode_to_last_token(item: RewardInput) -> Pair:
        answer = _answer_of(item, rows.text_of)
        if (ids := rows.rendered(answer)) is not None:
            return _without_padding((), fitting(ids), pad_id)
        prompt, response = encode(item)
        if answer.messages is not None and list(response[-1:]) == [end]:
            row = fitting([*prompt, *response, *behind])
            response = row[len(prompt) :]
        return _without_padding(prompt, response, pad_id)

    return encode_to_last_token


def _without_padding(prompt: Sequence[int], response: Sequence[int], pad_id: int | None) -> Pair:
    """Return a row without the tokens ``pad_id`` at its end. At least one token remains."""
    row = [*prompt, *response]
    length = max((i + 1 for i, token in enumerate(row) if token != pad_id), default=1)
    return row[: min(len(prompt), length)], row[len(prompt) : length]


def _notice_of_end(rows: RowEncoder, behind: list[int]) -> None:
    log.warning(
        "reward %r: notice: conversations are scored at the last token of their rendering (%r "
        "behind the end token), because the config.json of its model does not say that it was "
        "trained at the end token. If it was (by OpenRLHF, or by an older version of Burnish), "
        'write "%s": "end_token" into it',
        *(rows.name, rows.tokenizer.decode(behind), SCORES_AT),
    )


def _with_opened_block(
    message: Mapping[str, Any], prompt: str, tags: Tags | None
) -> Mapping[str, Any]:
    """Return an answer whose text begins with the tag of the reasoning that ``prompt`` opens."""
    tags = tags or THINK
    head, state = tags.of_prompt(prompt)
    content = message.get("content") or ""
    if state != "opened" or tags.end not in content or content.lstrip().startswith(tags.begin):
        return message
    return {**message, "content": prompt[len(head) :] + content}


def _with_first_space(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """Return the text of a response with the first space that it loses if it is decoded alone. Its
    own text if both have the same tokens (WordPiece, which writes a space before every word)."""
    prompt, ids = sample.last_response
    text = response_text(tokenizer, prompt, ids)
    if text == sample.text or text.strip() != sample.text.strip():  # ids can be unknown
        return sample.text
    texts = (text, sample.text)
    try:
        behind, alone = (encode_piece(tokenizer, each, after=prompt[-1:]) for each in texts)
    except DataError:  # a token without an embedding
        return text
    return sample.text if behind == alone else text


def _with_separators(tokenizer: PreTrainedTokenizerBase, separator: str, sample: Sample) -> str:
    return response_text(tokenizer, *sample.last_response, shown=separator)


def same_tokens(
    reward_tokenizer: PreTrainedTokenizerBase, policy_tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Return whether both tokenizers make the same ids of a text and of a prompt: they have the
    same vocabulary and end token, add the same leading tokens to a text, and have the same chat
    template. A reward model without a template reads any markup of the policy."""
    template = reward_tokenizer.chat_template
    if template is not None and template != policy_tokenizer.chat_template:
        return False
    if reward_tokenizer.eos_token_id != policy_tokenizer.eos_token_id:
        return False
    if reward_tokenizer.get_vocab() != policy_tokenizer.get_vocab():
        return False
    ids, expected = (encode_prompt(t, _TEXT)[1] for t in (reward_tokenizer, policy_tokenizer))
    return ids == expected


def encode_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str = "", *, ended: bool = False
) -> tuple[list[int], list[int]]:
    """Return (prompt ids, response ids) of plain text, encoded like plain training rows.

    The prompt starts with the tokenizer's leading special tokens, once, and has no trailing ones.
    No token spans the boundary between prompt and response. The response ends with the EOS token if
    ``ended``, or with the first end token in its text, because sampling stops there.
    """
    text, head = encode_prompt(tokenizer, prompt)
    if len(head) > 1 and head[0] == head[1] == tokenizer.bos_token_id:
        head = head[1:]  # the chat template already added the BOS token
    return head, _trained(encode_completion(tokenizer, head, response, prompt=text, add_eos=ended))


def _trained(row: tuple[list[int], list[bool]]) -> list[int]:
    """Return the ids of the response in (ids, mask) of a row."""
    return [token for token, is_trained in zip(*row, strict=True) if is_trained]


class _Form(NamedTuple):
    """Rendering of an answer without marks and outer white space by a chat template."""

    verbatim: bool
    """It writes the text as it is, directly after the generation prompt."""
    end: int | None = None
    """Token that it writes after the text."""


class SampledRows:
    """An encoder for reward models with the policy's tokens and template (:func:`same_tokens`).

    The sampled ids are used if ``rows`` would make the same row of the text; otherwise the row of
    ``rows`` is. What the template does with an answer is found once for each role that it answers.
    The sampled ids are also used for an answer that the template cannot write.
    """

    def __init__(self, rows: RowEncoder) -> None:
        self._rows, self._tokenizer = rows, rows.tokenizer
        self._forms: dict[tuple[str, bool, str], _Form] = {}
        self._markers = frozenset(_MARKER.findall(str(self._tokenizer.chat_template or "")))
        self._ends = end_texts(self._tokenizer).keys()
        self._num_tokens = num_tokens(self._tokenizer)
        ids, plain = encode_prompt(self._tokenizer, _TEXT)[1], encode_piece(self._tokenizer, _TEXT)
        self._leading = ids[: len(ids) - len(plain)]

    def __call__(self, item: RewardInput) -> Pair:
        """Return (prompt ids, response ids)."""
        answer = _answer_of(item, self._rows.text_of)
        if self._is_as_sampled(answer):
            return answer.sampled
        if self._tokenizer.chat_template is None:
            answer = answer._replace(prompt=text_before(item, self._tokenizer))
        try:
            return self._rows.encoded(answer)
        except DataError:  # no row that the model was trained on has such an answer
            if not self._has_tokens(answer):
                raise
            return answer.sampled

    def _has_tokens(self, answer: _Answer) -> bool:
        """Return whether all sampled ids are tokens. The policy can have more embeddings than its
        tokenizer has tokens, and the reward model fewer than the policy."""
        return max(answer.sampled[1], default=-1) < self._num_tokens

    def _is_as_sampled(self, answer: _Answer) -> bool:
        if not self._has_tokens(answer):
            return False
        if not self._ends.isdisjoint(answer.sampled[1][:-1]):
            return False  # its text has an end token, behind which nothing is trained
        without_template = self._tokenizer.chat_template is None
        end = self._tokenizer.eos_token_id
        if answer.messages is None:  # special tokens of a text are tokens of its row as well
            return not answer.ended or _ends_with(self._tokenizer, answer, end)
        if without_template:
            begins = list(answer.sampled[0][: len(self._leading)]) == self._leading
            return begins and _ends_with(self._tokenizer, answer, end)
        if self._rows.continues:
            return _ends_with(self._tokenizer, answer, end)
        text = answer.text
        if text != text.strip() or not text or any(mark in text for mark in self._markers):
            return False
        form = self._form(answer.messages, answer.tools)
        as_written = form.verbatim and _ends_with(self._tokenizer, answer, form.end)
        return as_written and (answer.prompt is not None or self._is_rendered(answer))

    def _is_rendered(self, answer: _Answer) -> bool:
        """Return whether the template makes the tokens that the policy read before the response:
        earlier responses may have been sampled in another form."""
        assert answer.messages is not None
        try:
            _, head = encode_prompt(
                self._tokenizer,
                answer.messages,
                tools=answer.tools,
                refused=_WRITTEN_BY_THE_POLICY,
            )
        except DataError:
            return False
        return head == list(answer.sampled[0])

    def _form(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> _Form:
        written = of_conversation(self._tokenizer, messages, tools)
        key = (str(messages[-1]["role"]), tools is not None, str(written.chat_template))
        if key in self._forms:
            return self._forms[key]
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        form = _Form(verbatim=False)
        with contextlib.suppress(DataError):  # raised again, and handled, for each answer
            head, answer = self._rows.of_messages(messages, _ANSWER, tools=tools)
            text = encode_piece(self._tokenizer, _ANSWER, after=head[-1:])
            end = answer[len(text) :]
            if list(answer[: len(text)]) == text and len(end) <= 1:
                form = _Form(verbatim=True, end=end[0] if end else None)
        self._forms[key] = form
        return form


def _ends_with(tokenizer: PreTrainedTokenizerBase, answer: _Answer, end: int | None) -> bool:
    """Return whether ``end`` is the last token of an ended response and nowhere else, and a
    response that was cut has no special token at its end."""
    ids = list(answer.sampled[1])
    if answer.ended:
        return end in ids and ids.index(end) == len(ids) - 1
    return end not in ids and (not ids or ids[-1] not in special_tokens(tokenizer))


class RowEncoder:
    """An encoder of prompts and responses that uses the reward model's own tokenizer.

    Prompts made of messages are rendered with the reward model's chat template, because the
    policy's markup would be plain text to it. Without a template, the policy's rendered text is
    used, and a warning is logged once. Of an episode, the prompt is the conversation before the
    last response; its messages need the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        continues: bool = False,
        text_of: TextOf | None = None,
    ) -> None:
        """``name``: the reward's name, for the log. ``continues``: the model was trained on
        responses that follow the generation prompt as they are (process reward models).
        ``text_of``: returns the continuation of a prompt. None: it is the text of the sample."""
        self.tokenizer, self.name, self.continues = tokenizer, name, continues
        self.text_of = text_of
        self._warned = self._warned_of_answers = self._warned_of_reasoning = False
        self._warned_of_tools = self._warned_of_rendering = False

    def check(self) -> None:
        """Raise RewardError if the chat template cannot write a plain answer to a question."""
        if self.tokenizer.chat_template is None or self.continues:
            return
        try:
            self._encoded([_QUESTION, {"role": "assistant", "content": _ANSWER}], ended=True)
        except DataError as error:
            raise RewardError(
                f"reward {self.name!r}: its chat template cannot write an answer to a question, "
                "so no conversation can be scored as the model was trained. Set its "
                f"model.chat_template to the template that it was trained with. {error}"
            ) from error

    def end_of_answers(self) -> list[int]:
        """Return the last token of an answer in a row, and the tokens that the template writes
        behind it. There is no template: the end token."""
        if self.tokenizer.chat_template is None:
            return [int(self.tokenizer.eos_token_id)]
        messages = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
        end = self._encoded(messages, ended=True)[1][-1]
        if end not in special_tokens(self.tokenizer):  # it writes none, so its rows lack nothing
            return [end]
        text = render_text(self.tokenizer, messages, add_generation_prompt=False)
        ids = encode_piece(self.tokenizer, text.rpartition(_ANSWER)[2])
        return [end, *(ids[ids.index(end) + 1 :] if end in ids else ())]

    def rendered(self, answer: _Answer) -> list[int] | None:
        """Return the ids of a conversation with its answer as the template renders it. It may begin
        in another way than the prompt of the answer: the template opens reasoning in the prompt and
        leaves it out of the rendering, or writes earlier messages in another form.

        None: the answer was cut, has an end token in its text, or is none of a conversation; or the
        template cannot render it, which is logged once."""
        is_conversation = answer.messages is not None and self.tokenizer.chat_template is not None
        if not is_conversation or not answer.ended:
            return None
        if any(end in answer.text for end in end_texts(self.tokenizer).values()):
            return None  # nothing is read behind it
        assert answer.messages is not None
        tools = list(answer.tools) if answer.tools else None
        try:
            prompt = self._rendered(answer.messages, tools, add_generation_prompt=True)
        except DataError:  # raised again, or handled, where the prompt is encoded
            return None
        try:
            text = self._rendered([*answer.messages, answer.message], tools)
            if not text.startswith(prompt):
                message = _with_opened_block(answer.message, prompt, tags_of(self.tokenizer))
                text = self._rendered([*answer.messages, message], tools)
        except DataError as error:
            if not self._warned_of_rendering:
                self._warned_of_rendering = True
                log.warning(
                    "reward %r: notice: its chat template cannot render a conversation with its "
                    "answer, so the answer follows the prompt; further ones are not reported. %s",
                    *(self.name, error),
                )
            return None
        self._warn_of_tools(tools)
        self._warn_of_reasoning(answer.message, tools)
        return encode_piece(self.tokenizer, text)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        bare = [without_flags(message) for message in as_rendered(as_messages(messages))]
        bare = with_reasoning_once(self.tokenizer, bare, tools)
        return render_text(
            self.tokenizer, bare, add_generation_prompt=add_generation_prompt, tools=tools
        )

    def __call__(self, item: RewardInput) -> Pair:
        """Return (prompt ids, response ids). Raises RewardError if an episode needs the template
        that the tokenizer does not have, and DataError if its messages cannot be rendered."""
        return self.encoded(_answer_of(item, self.text_of))

    def encoded(self, answer: _Answer) -> Pair:
        """Return (prompt ids, response ids) of a response. Raises as ``__call__``."""
        ended = answer.ended
        text = answer.continuation if self.continues else answer.text
        if answer.messages is not None:
            if self.tokenizer.chat_template is not None:
                return self.of_messages(
                    answer.messages, text, tools=answer.tools, ended=ended, message=answer.message
                )
            if answer.prompt is None:
                raise RewardError(
                    f"reward {self.name!r}: its tokenizer has no chat template, which the "
                    "conversations of episodes need; set its model.chat_template to the template "
                    "that it was trained with"
                )
            if not self._warned:
                self._warned = True
                log.warning(
                    "reward %r: prompts are conversations but its tokenizer has no chat template, "
                    "so it reads the policy's chat markup as plain text; set its "
                    "model.chat_template to the template that it was trained with",
                    self.name,
                )
        return encode_text(self.tokenizer, str(answer.prompt), answer.continuation, ended=ended)

    def of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        *,
        tools: Tools = None,
        ended: bool = True,
        message: Mapping[str, Any] | None = None,
    ) -> Pair:
        """Return (ids of a prompt of messages, ids of the response ``text``). ``message``: the same
        response as a message. None: its content is the text.

        An answer that no row can have follows the generation prompt as the template writes it
        behind a question, or else as it is: a policy may write any text. Reasoning behind a prompt
        that closes it is one; others are logged once. Raises DataError if the prompt cannot be
        rendered."""
        problem: DataError | None = None
        answer: Mapping[str, Any] | None = None
        has_tags = False
        self._warn_of_tools(tools)
        if not self.continues:
            answer = message or {"role": "assistant", "content": text}
            self._warn_of_reasoning(answer, tools)
            try:
                return self._encoded([*messages, answer], tools=tools, ended=ended)
            except DataError as error:
                problem = error
            has_tags = any(tag in text for tags in REASONING_TAGS for tag in (tags.begin, tags.end))
        rendered, head = encode_prompt(
            self.tokenizer, messages, tools=tools, refused=_WRITTEN_BY_THE_POLICY
        )
        if (alone := self._rendered_alone(answer, tools, ended, prompt=rendered)) is not None:
            return head, alone
        row = encode_completion(self.tokenizer, head, text, prompt=rendered, add_eos=ended)
        if problem is not None and not has_tags and not self._warned_of_answers:
            self._warned_of_answers = True
            log.warning(
                "reward %r: no row of its training has such an answer, so its text follows the "
                "prompt as it is; further answers are not reported. %s",
                *(self.name, problem),
            )
        return head, _trained(row)

    def _rendered_alone(
        self, answer: Mapping[str, Any] | None, tools: Tools, ended: bool, *, prompt: str
    ) -> Sequence[int] | None:
        """Return the ids of an answer as the template writes it behind a question; None if it
        writes none, or if ``prompt`` leaves a block of reasoning in another state.

        A template that renders the history in another form once the answer follows (gpt-oss) is no
        reason to leave out its form of an answer."""
        if answer is None:
            return None
        tags = tags_of(self.tokenizer) or THINK
        try:
            asked = encode_prompt(self.tokenizer, [_QUESTION], tools=tools)[0]
            if tags.of_prompt(asked)[1] != tags.of_prompt(prompt)[1]:
                return None
            return self._encoded([_QUESTION, answer], tools=tools, ended=ended)[1]
        except DataError:
            return None

    def _warn_of_tools(self, tools: Tools) -> None:
        if tools and not self._warned_of_tools and not renders_tools(self.tokenizer, tools):
            self._warned_of_tools = True
            log.warning(
                "reward %r: its chat template does not render tools, so it scores answers without "
                "those that the policy was offered; set its model.chat_template to the template "
                "that it was trained with, if that one does",
                self.name,
            )

    def _warn_of_reasoning(self, answer: Mapping[str, Any], tools: Tools) -> None:
        if self._warned_of_reasoning or REASONING[0] not in answer:
            return
        if habits_of(self.tokenizer, tools).ignores_reasoning_of(answer):
            self._warned_of_reasoning = True
            log.warning(
                "reward %r: its chat template renders no reasoning, so it does not read that of "
                "messages (of episodes, and of channels); in the text of a single response, a "
                "block such as <think>...</think> is text, which it reads",
                self.name,
            )

    def _encoded(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        ended: bool,
        tools: Tools = None,
    ) -> Pair:
        """Return (ids before the last message, ids of that message, which is the assistant's)."""
        ids, mask = encode_conversation(
            self.tokenizer,
            messages if ended else with_cut_end(messages),
            trained_from=len(messages) - 1,
            tools=list(tools) if tools else None,
            refused=_WRITTEN_BY_THE_POLICY,
        )
        if not any(mask):  # it was cut before its first token
            return ids, []
        begin = mask.index(True)
        end = len(mask) - mask[::-1].index(True)
        return ids[:begin], ids[begin:end]
