"""Rewards over HTTP: requests, effects of failures, the token, the recipe."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from chat_templates import PUBLISHED, published_tokenizer
from pydantic import ValidationError

from burnish.config import ConfigError, load_config
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.data.chat import encode_completion, encode_prompt
from burnish.models.load import load_tokenizer
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.build import build_rewards
from burnish.rewards.remote.config import RemoteReward
from burnish.rewards.remote.reward import RemoteScorer
from burnish.rewards.reward_set import RewardSet
from burnish.rewards.texts import prompt_and_query
from burnish.serve.base import ServeOptions
from burnish.serve.scorer import TextScorer
from burnish.transcript import Episode
from burnish.types import Group, Sample

MakeGroup = Callable[..., Group]
Serve = Callable[..., Any]
MakeRemote = Callable[..., RemoteScorer]
Items = Callable[..., list[RewardInput]]
FAIL, DROP = FailurePolicy(then="fail"), FailurePolicy(then="drop_group")
PATH = "/get_reward"


def test_a_request_has_the_texts_the_prompts_and_the_labels(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """'question 0' has 10 characters, so the rewards are 11 and 12."""
    server = serve()
    assert remote(server.url).score(items("a", "bb", label="L")) == [11.0, 12.0]
    (request,) = server.requests
    assert request == {
        "query": ["question 0a", "question 0bb"],
        "prompts": ["question 0"] * 2,
        "labels": ["L"] * 2,
    }
    assert server.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(("label", "sent"), [(None, ""), (3, 3), ({"a": [1]}, {"a": [1]})])
def test_labels_are_sent_unchanged_and_none_as_empty_text(
    label: Any, sent: Any, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve()
    remote(server.url).score(items("a", label=label))
    assert server.requests[0]["labels"] == [sent]


@pytest.mark.parametrize("label", [float("nan"), b"bytes", {1, 2}])
def test_a_label_that_json_cannot_represent_is_refused_before_any_request(
    label: Any, serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve()
    with pytest.raises(SampleError, match="cannot encode the label as JSON"):
        remote(server.url).score(items("a", label=label))
    assert server.requests == []


def test_text_of_any_script_is_sent_and_half_a_surrogate_pair_is_harmless(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    server = serve()
    remote(server.url).score(items('né\n"日本"\x00', "\ud800"))
    assert [q.removeprefix("question 0") for q in server.requests[0]["query"]] == [
        'né\n"日本"\x00',
        "?",
    ]


def test_the_query_has_the_end_token_of_a_response_that_ended(
    make_group: MakeGroup, tiny_config: Any
) -> None:
    tokenizer = load_tokenizer(tiny_config)
    group = make_group(0, ["3", "3"])
    prompt, three = tokenizer("1+2=")["input_ids"], tokenizer.encode("3", add_special_tokens=False)
    texts = []
    for sample, end in zip(group.samples, ([tokenizer.eos_token_id], []), strict=True):
        ids = {"prompt_ids": tuple(prompt), "response_ids": (*three, *end)}
        item = RewardInput(group.prompt, type(sample)(**{**vars(sample), **ids}))
        texts.append(prompt_and_query(item, tokenizer)[1])
        plain = ("question 0", "question 03")
        assert prompt_and_query(item, tokenizer, special_tokens=False) == plain
        assert prompt_and_query(item, None) == plain
    assert texts == [f"question 03{tokenizer.eos_token}", "question 03"]


def test_the_query_of_an_episode_is_its_conversation(
    make_group: MakeGroup, tiny_config: Any
) -> None:
    """Also without special tokens the prompt keeps its markup; the response loses its own."""
    tokenizer = load_tokenizer(tiny_config)
    end = str(tokenizer.eos_token)
    group = make_group(0, ["3"])
    prompt, rest = tokenizer(f"1+2={end}")["input_ids"], tokenizer(f"3{end}45{end}")["input_ids"]
    turns = (0, 0, -1, 1, 1)
    sampled = {"action_mask": tuple(turn >= 0 for turn in turns), "turns": turns}
    record = Episode("done", ({"role": "user", "content": "1+2="},))
    ids = {"prompt_ids": tuple(prompt), "response_ids": tuple(rest), "episode": record}
    item = RewardInput(group.prompt, replace(group.samples[0], **ids, **sampled))
    for special, response in ((True, f"5{end}"), (False, "5")):
        query = prompt_and_query(item, tokenizer, special_tokens=special)
        assert query == (f"1+2={end}3{end}4", f"1+2={end}3{end}4{response}")


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("is_episode", [False, True])
def test_a_server_with_the_tokenizer_of_the_policy_reads_the_sampled_tokens(
    family: str, is_episode: bool, make_group: MakeGroup
) -> None:
    """Also behind special tokens and between them, where tokenizers of the SentencePiece form
    (mistral, gemma) add a space that is not in the text. The tokens are those that the tokenizer
    makes of the responses."""
    tokenizer, group = published_tokenizer(family), make_group(0, ["3"])
    encode = TextScorer(cast(Any, None), tokenizer, ServeOptions(), max_len=4096).encode
    end, inner = str(tokenizer.eos_token), PUBLISHED[family][0][0]
    responses = ["hello", " hello", "  hello", "a b", f"a {end}", f"a{inner} b", "ends ", "<b>x"]
    chat: list[Any] = [{"role": "user", "content": "Hi 2+2"}]
    turns = [*chat, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c "}]
    for messages in (chat, turns, "Q: 2+2?\nA:", "Q: ", "\nhello", f"{end}Q"):
        text, head = encode_prompt(tokenizer, messages)
        for response, ended in itertools.product(responses, (True, False)):
            ids, _ = encode_completion(tokenizer, head, response, prompt=text, add_eos=ended)
            sample, prompt = _sampled(group.samples[0], head, ids[len(head) :]), group.prompt
            if is_episode:  # whose prompt is no prefix of the row, so that it is decoded
                sample = replace(sample, episode=Episode("done", tuple(chat)))
            else:
                prompt = replace(prompt, token_ids=tuple(head), text=text)
            before, query = prompt_and_query(RewardInput(prompt, sample), tokenizer)
            assert list(encode(query, before).ids) == ids, (messages, response, query)


def _sampled(sample: Sample, prompt_ids: list[int], response_ids: list[int]) -> Sample:
    mask = (True,) * len(response_ids)
    ids = {"prompt_ids": tuple(prompt_ids), "response_ids": tuple(response_ids)}
    return replace(sample, **ids, action_mask=mask, turns=())


def test_items_are_sent_in_batches_and_the_order_is_kept(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """23 items in requests of 4: five of 4 and one of 3; replies come in any order."""

    def behave(handler: Any, request: dict[str, Any], number: int) -> None:
        threading.Event().wait(0.02 if number % 2 else 0.0)
        handler.reply({"rewards": [float(q.removeprefix("question 0")) for q in request["query"]]})

    server = serve(behave)
    scores = remote(server.url, batch_size=4).score(items(*(str(i) for i in range(23))))
    assert scores == [float(i) for i in range(23)]
    assert sorted(len(r["query"]) for r in server.requests) == [3, 4, 4, 4, 4, 4]


def test_at_most_max_concurrency_requests_are_in_flight(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    """Each of the first three waits for two others, which a bound of 3 allows and one of 2 does
    not; the rest come as they can."""
    together = threading.Barrier(3)

    def behave(handler: Any, request: dict[str, Any], number: int) -> None:
        if number < 3:
            together.wait(20)
        handler.lengths(request)

    server = serve(behave)
    reward = remote(server.url, batch_size=1, max_concurrency=3)
    assert reward.score(items(*"abcdefghijkl")) == [11.0] * 12
    assert server.most == 3 and len(server.requests) == 12


def test_connections_are_reused(serve: Serve, remote: MakeRemote, items: Items) -> None:
    ports: set[int] = set()

    def behave(handler: Any, request: dict[str, Any], number: int) -> None:
        ports.add(handler.client_address[1])
        handler.lengths(request)

    reward = remote(serve(behave).url, batch_size=1, max_concurrency=1)
    reward.score(items("a", "b", "c"))
    reward.score(items("d"))
    assert len(ports) == 1


# ---- in a reward set ----


def reward_set(reward: RemoteScorer, policy: FailurePolicy) -> RewardSet:
    return RewardSet(
        [(reward, 1.0)], on_failure=policy, shaping=ShapingConfig(), generate_max_len=4
    )


def test_extra_logs_become_means_over_all_items(
    serve: Serve, remote: MakeRemote, make_group: MakeGroup
) -> None:
    """Three items in requests of two: acc = (1 + 0 + 1) / 3; size = (2 + 2 + 1) / 3."""

    def behave(handler: Any, request: dict[str, Any], number: int) -> None:
        n = len(request["query"])
        right = [float("good" in q) for q in request["query"]]
        handler.reply({"rewards": right, "extra_logs": {"acc": right, "size": n}})

    rewards = reward_set(remote(serve(behave).url, batch_size=2), FAIL)
    groups = [make_group(0, ["good", "bad"]), make_group(1, ["good"])]
    metrics = rewards.score(groups).stats.floats()
    assert metrics["reward/rm/acc"] == pytest.approx(2 / 3)
    assert metrics["reward/rm/size"] == pytest.approx(5 / 3)
    assert (metrics["reward/rm/requests"], metrics["reward/rm/retries"]) == (2, 0)
    assert rewards.score([make_group(0, ["good"])]).stats.floats()["reward/rm/acc"] == 1.0


def spoils(handler: Any, request: dict[str, Any], number: int) -> None:
    """400 for a request with the response 'bad' in it."""
    bad = any("bad" in q for q in request["query"])
    handler.reply({"rewards": [1.0] * len(request["query"])}, status=400 if bad else 200)


def test_a_failed_request_stops_the_run_with_the_url(
    serve: Serve, remote: MakeRemote, make_group: MakeGroup
) -> None:
    server = serve(spoils)
    with pytest.raises(RewardError) as caught:
        reward_set(remote(server.url), FAIL).score([make_group(0, ["bad"])])
    for part in (server.url, "status 400", "'q:0/0'", "check the server's log", "drop_group"):
        assert part in str(caught.value)


def test_a_failed_request_drops_only_its_own_groups(
    serve: Serve, remote: MakeRemote, make_group: MakeGroup
) -> None:
    """Requests of two: the third holds the end of group 1 and the beginning of group 2. Every
    request is sent once: no group is asked about again."""
    server = serve(spoils)
    groups = [make_group(0, ["a", "b"]), make_group(1, ["c", "d", "bad"]), make_group(2, ["e"])]
    scored = reward_set(remote(server.url, batch_size=2), DROP).score([*groups, make_group(3, "f")])
    assert [g.group_id for g in scored.groups] == [0, 3] and scored.dropped == ("q:1", "q:2")
    assert len(server.requests) == 4


def test_the_failure_policy_retries_after_any_failure(
    serve: Serve, remote: MakeRemote, make_group: MakeGroup
) -> None:
    def behave(handler: Any, request: dict[str, Any], number: int) -> None:
        handler.reply(b"<html>") if number == 0 else handler.lengths(request)

    server = serve(behave)
    policy = FailurePolicy(retries=1)
    scored = reward_set(remote(server.url), policy).score([make_group(0, ["a"])])
    assert scored.groups[0].samples[0].reward == 11.0


def test_close_ends_the_thread_and_later_calls_start_a_new_one(
    serve: Serve, remote: MakeRemote, items: Items
) -> None:
    reward = remote(serve().url)
    reward.close()
    for _ in range(2):
        assert reward.score(items("a")) == [11.0]
        assert any(t.name == "reward-rm" for t in threading.enumerate())
        reward.close()
        assert not any(t.name == "reward-rm" for t in threading.enumerate())


# ---- the token ----


TOKEN = "s3cret-Token.of~the/day=="


def test_the_token_is_sent_and_never_logged(
    serve: Serve,
    remote: MakeRemote,
    items: Items,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server repeats the token in every part of its reply."""
    monkeypatch.setenv("REWARD_TOKEN", f" {TOKEN}\n")
    for name in ("burnish", "httpx"):
        caplog.set_level(logging.DEBUG, logger=name)

    def echoes(handler: Any, request: dict[str, Any], number: int) -> None:
        said = handler.headers["Authorization"]
        long = b"x" * (65536 - 7 - 4) + said.encode() + b"x" * 9
        replies: list[tuple[Any, int]] = [
            (said.encode(), 200),
            (said.encode(), 500),
            ({"rewards": [said]}, 200),
            ({"rewards": ["x" * 95 + said]}, 200),
            ({"rewards": [1], "extra_logs": {said: 1, f"a{said}": "x"}}, 200),
            (long, 400),
        ]
        body, status = replies[number]
        handler.reply(body, status=status, headers={"Content-Type": said})

    server = serve(echoes)
    reward = remote(server.url, token_env="REWARD_TOKEN", retries=0)
    said = [str(reward.score(items("a"))) for _ in range(6)]
    said += [str(dict(reward.take_means())), caplog.text, repr(vars(reward)["_config"])]
    assert {h["Authorization"] for h in server.headers} == {f"Bearer {TOKEN}"}
    assert any("[token]" in text for text in said)
    leaks = [text for text in said if TOKEN[:8] in text]
    assert leaks == []


@pytest.mark.parametrize("value", [None, "  ", "two words", "line\nbreak", "söcret"])
def test_an_invalid_token_is_refused_without_repeating_it(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("REWARD_TOKEN", value)
    config = RemoteReward(urls=("http://localhost",), token_env="REWARD_TOKEN")
    with pytest.raises(RewardError, match="REWARD_TOKEN") as caught:
        RemoteScorer(config)
    assert not value or not value.strip() or value not in str(caught.value)


def test_no_proxy_is_used_by_default(
    serve: Serve, remote: MakeRemote, items: Items, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    proxy = serve(lambda handler, request, number: handler.reply({"rewards": [-1.0]}))
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy.url.removesuffix(PATH))
    assert remote(server.url).score(items("a")) == [11.0]
    assert remote(server.url, use_proxy=True).score(items("a")) == [-1.0]


# ---- the recipe ----


RECIPE: dict[str, Any] = {
    "job": "rl",
    "max_steps": 1,
    "model": {"scratch": {}},
    "data": {"sources": ["x"]},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
    "train": {"train_batch_size": 16},
}


def loaded(**remote: Any) -> Any:
    return load_config(RECIPE | {"rewards": [{"kind": "remote", **remote}]})


@pytest.mark.parametrize(
    ("urls", "problem"),
    [
        (["ftp://host/x"], "http:// nor https://"),
        (["host:5000"], "http:// nor https://"),
        (["http:///x"], "server URL"),
        (["http://ho st/x"], "server URL"),
        (["http://host/x#y"], "server URL"),
        (["http://host:0/x"], "server URL"),
        (["http://host:99999/x"], "an invalid"),
        (["http://[::1/x"], "an invalid"),
        (["http://user:hunter2@host/x"], "contains"),
        (["http://user:hunter2@host:99999/x"], "invalid host or port"),
        (["http://a", "http://a"], "the same URL twice"),
        ([], "more items"),
    ],
)
def test_an_unusable_url_is_refused_at_load(urls: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(urls=urls)
    assert problem in str(caught.value) and "rewards[0]" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_token_in_place_of_its_variable_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="must be the name of an environment variable") as caught:
        loaded(urls=["http://a"], token_env="sk-hunter2")
    assert "hunter2" not in str(caught.value)


def test_contradictory_timeouts_are_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="max_backoff_s=1 is below backoff_s=2"):
        loaded(urls=["http://a"], backoff_s=2, max_backoff_s=1)
    with pytest.raises(ValidationError):
        RemoteReward(urls=("http://a",), batch_size=0)


def test_an_unencrypted_token_is_a_warning() -> None:
    """Not on this machine, and not through https."""
    warned = loaded(urls=["http://far.example/x"], token_env="T").warnings()
    assert any("far.example unencrypted" in text for text in warned)
    for url in ("https://far.example/x", "http://localhost:5000/x", "http://[::1]/x"):
        assert loaded(urls=[url], token_env="T").warnings() == []


def test_an_entry_of_a_recipe_becomes_a_reward_with_its_name() -> None:
    ((reward, weight),) = build_rewards(
        [RemoteReward(urls=("http://a/x?key=1", "http://b"), weight=0.5)]
    )
    assert isinstance(reward, RemoteScorer) and (reward.name, weight) == ("remote", 0.5)
    assert reward.location == "http://a/x, http://b"
