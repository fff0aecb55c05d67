"""The reward server: scores, batches, limits, tokens, and how it starts and ends."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from burnish.config.model import ModelConfig
from burnish.models.load import load_tokenizer
from burnish.models.value_head import load_scalar_model
from burnish.rewards.base import RewardInput
from burnish.rewards.model.config import ModelReward
from burnish.rewards.model.reward import load_model_reward
from burnish.rewards.remote.config import RemoteReward
from burnish.rewards.remote.reward import RemoteScorer
from burnish.serve.base import ServeError, ServeOptions
from burnish.serve.guard import listener as listen
from burnish.serve.scorer import TextScorer, load_text_scorer
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Prompt, Sample

Serving = Callable[..., Any]
TEXTS = ["1+1=2", "3+4=", "9", "0+0=0000", "5+5=10"]
# fp32 sums of a 32-wide model in another order; scores differ by tenths.
TOLERANCE = {"rel": 1e-4, "abs": 1e-5}


def until(condition: Callable[[], bool]) -> None:
    """Wait for an action of another thread."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen in 30 seconds")


def in_background(call: Callable[..., Any], *arguments: Any) -> Any:
    """A future of ``call(*arguments)``."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *arguments)
    pool.shutdown(wait=False)
    return future


@contextmanager
def asking(server: Any, query: list[str]) -> Iterator[None]:
    """A request is sent; at the end of the block its client hangs up, answered or not."""
    body = json.dumps({"query": query}).encode()
    head = (
        "POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + body)
        yield


def reward_items(tokenizer: PreTrainedTokenizerBase, responses: list[str]) -> list[RewardInput]:
    """Responses to ``1+2=``; every other one ended."""
    prompt = Prompt("p", tuple(tokenizer("1+2=")["input_ids"]), "1+2=")
    items = []
    for i, text in enumerate(responses):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [tokenizer.eos_token_id] * (i % 2)
        flat: dict[str, Any] = {
            "sampler_logprobs": (0.0,) * len(ids),
            "action_mask": (True,) * len(ids),
            "versions": (0,) * len(ids),
            "finish_reason": "stop" if i % 2 else "length",
        }
        sample = Sample(f"p/{i}", "p", 0, prompt.token_ids, tuple(ids), text=text, **flat)
        items.append(RewardInput(prompt, sample))
    return items


# ---- scores --------------------------------------------------------------------------------------


def test_the_reply_has_the_form_of_openrlhfs_servers(server: Any) -> None:
    """With the tokenizer's begin token, 1+1=2 is 6 tokens."""
    reply = server.post(["1+1=2", "3"], prompts=["1+1=", "3"], labels=["2", None]).json()
    assert list(reply) == ["rewards", "scores", "extra_logs"]
    assert reply["rewards"] == reply["scores"] and len(reply["rewards"]) == 2
    begin = len(server.app._scorer.encode("3", None).ids) - 1
    assert reply["extra_logs"] == {"num_tokens": [5 + begin, 1 + begin], "truncated": [0, 0]}


def test_a_remote_reward_scores_as_the_model_in_this_process(
    server: Any, reward_model: Any, scratch: ModelConfig
) -> None:
    """With and without the policy's vocabulary in common, ended responses and cut off ones."""
    tokenizer = load_tokenizer(scratch)
    items = reward_items(tokenizer, ["3", "3", "12=", "12=", "", "0+9"])
    entry = ModelReward(model=ModelConfig(path=str(reward_model)))

    def make_engine(spec: EngineSpec) -> TorchTrainEngine:
        return TorchTrainEngine(load_scalar_model(spec.role.model), spec)

    here = load_model_reward(entry, tokenizer, make_engine).score(items)
    config = RemoteReward(urls=(f"{server.url}/get_reward",), batch_size=4)
    remote = RemoteScorer(config, tokenizer=tokenizer)
    try:
        there = remote.score(items)
        assert remote.take_means()["num_tokens"][1] == 6
    finally:
        remote.close()
    assert there == pytest.approx(here, **TOLERANCE)
    assert len({round(score, 3) for score in here}) == 6, "all six differ, end tokens included"


def test_a_score_does_not_depend_on_other_texts_in_the_batch(server: Any) -> None:
    together = server.rewards(TEXTS)
    alone = [server.rewards([text])[0] for text in TEXTS]
    assert together == pytest.approx(alone, **TOLERANCE)
    assert server.rewards(TEXTS[::-1]) == pytest.approx(alone[::-1], **TOLERANCE)


def test_append_eos_ends_every_text_with_one_end_token(
    serving: Serving, scratch: ModelConfig
) -> None:
    eos = str(load_tokenizer(scratch).eos_token)
    with serving() as plain, serving(append_eos=True) as ending:
        without, with_eos = plain.rewards(["1+1", "1+1" + eos])
        assert without != pytest.approx(with_eos, **TOLERANCE)
        assert ending.rewards(["1+1", "1+1" + eos]) == pytest.approx([with_eos] * 2, **TOLERANCE)


def test_truncate_left_keeps_the_end_and_counts_it(serving: Serving) -> None:
    """Of 12 characters the last 10 tokens are left: the last 10 characters."""
    with serving(max_len=10, overlong="truncate_left") as server:
        reply = server.post(["123456789012", "1"]).json()
        assert reply["extra_logs"]["truncated"] == [1, 0]
        assert reply["extra_logs"]["num_tokens"][0] == 10
        (row,) = (r for p in server.gate.passes for r in p if r.truncated)
        assert server.app._scorer.tokenizer.decode(list(row.ids)) == "3456789012"


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        (None, ["ab", "cd"]),
        ("", ["ab", "cd"]),
        ("a", ["a", "b", "cd"]),
        ("x", ["ab", "cd"]),
        ("abcde", ["ab", "cd"]),
    ],
)
def test_no_token_reaches_across_the_end_of_the_prompt(
    prompt: str | None, pieces: list[str]
) -> None:
    """``ab`` and ``cd`` merge, unless the query begins with a prompt that ends inside."""
    vocab = {token: i for i, token in enumerate(["</s>", "a", "b", "c", "d", "ab", "cd"])}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("c", "d")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    scorer = TextScorer(None, tokenizer, ServeOptions(), max_len=9)  # type: ignore[arg-type]
    assert tokenizer.convert_ids_to_tokens(list(scorer.encode("abcd", prompt).ids)) == pieces


def test_a_non_finite_score_is_null_and_does_not_affect_others(serving: Serving) -> None:
    with serving() as server:
        server.gate.instead = lambda rows: [math.nan, 1.0, math.inf]
        assert server.rewards(["1", "2", "3"]) == [None, 1.0, None]


def test_unknown_characters_and_half_surrogates_are_harmless(server: Any) -> None:
    body = json.dumps({"query": ["日本\x00é", "\ud800"]}).encode()  # as \\u escapes
    headers = {"Content-Type": "application/json"}
    response = server.client.post(f"{server.url}/get_reward", content=body, headers=headers)
    assert all(math.isfinite(score) for score in response.json()["rewards"])


# ---- batches -------------------------------------------------------------------------------------


def test_simultaneous_requests_are_one_pass(serving: Serving) -> None:
    """The first request holds the model; the eight that come meanwhile share the second pass."""
    with serving() as server, ThreadPoolExecutor(8) as pool:
        server.gate.open.clear()
        first = in_background(server.rewards, ["1"])
        assert server.gate.entered.acquire(timeout=30)
        rest = [pool.submit(server.rewards, [str(i)]) for i in range(8)]
        until(lambda: server.health()["queue_length"] == 8)
        server.gate.open.set()
        found = [future.result()[0] for future in rest]
        first.result()
        assert server.app.batcher.num_passes == 2
        alone = [server.rewards([str(i)])[0] for i in range(8)]
        assert found == pytest.approx(alone, **TOLERANCE)


def test_requests_within_max_wait_are_one_pass(serving: Serving) -> None:
    """The wait is far longer than the test: it ends because the pass is full, with 3 times 5
    characters (and the tokenizer's prefix)."""
    with serving(max_wait_ms=10_000, max_batch_tokens=15, max_len=15) as server:
        size = len(server.app._scorer.encode("1+1=2", None).ids)
        texts = ["1+1=2"[: 5 - (size - 5)]] * 3
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda text: server.rewards([text]), texts))
        assert [len(rows) for rows in server.gate.passes] == [3]


def test_a_pass_has_no_more_tokens_than_its_limit_and_the_order_is_kept(server: Any) -> None:
    """20 texts of up to 40 tokens, and 100 in a pass: never all at once."""
    before = len(server.gate.passes)
    texts = ["1" * (1 + 7 * i % 39) for i in range(20)]
    scores = server.rewards(texts)
    passes = server.gate.passes[before:]
    assert len(passes) > 3
    assert all(sum(len(row.ids) for row in rows) <= 100 for rows in passes)
    assert scores == pytest.approx([server.rewards([t])[0] for t in texts], **TOLERANCE)


def test_the_server_answers_while_the_model_computes(serving: Serving) -> None:
    with serving() as server:
        server.gate.open.clear()
        future = in_background(server.rewards, ["1"])
        assert server.gate.entered.acquire(timeout=30)
        assert server.health() == {
            "ready": True,
            "model": "tiny",
            "version": "1.2.3",
            "queue_length": 0,
        }
        assert server.post([]).status_code == 422
        server.gate.open.set()
        assert len(future.result()) == 1


def test_a_pass_that_fails_is_an_error_and_the_next_one_works(serving: Serving) -> None:
    with serving() as server:

        def fail(rows: Any) -> list[float]:
            raise MemoryError("no such memory")

        server.gate.instead = fail
        response = server.post(["1", "2"])
        assert response.status_code == 500
        assert response.json() == {"error": "the model failed (MemoryError)"}
        server.gate.instead = lambda rows: [1.0]  # one score for two texts
        assert server.post(["1", "2"]).status_code == 500
        server.gate.instead = None
        assert len(server.rewards(["1", "2"])) == 2


def test_rows_of_a_client_that_left_are_not_computed(serving: Serving) -> None:
    """It hangs up while its rows wait behind a pass under way; they leave the queue at once, so
    that others fit (max_queue), and no pass has them."""
    with serving(max_queue=3, max_items=3) as server:
        server.gate.open.clear()
        first = in_background(server.rewards, ["1"])
        assert server.gate.entered.acquire(timeout=30)
        with asking(server, ["22", "22"]):
            until(lambda: server.health()["queue_length"] == 2)
        until(lambda: server.health()["queue_length"] == 0)
        stays = in_background(server.rewards, ["333", "4", "5"])
        until(lambda: server.health()["queue_length"] == 3)
        server.gate.open.set()
        assert [len(first.result()), len(stays.result())] == [1, 3]
        assert sum(len(rows) for rows in server.gate.passes) == 4


def test_a_client_that_disconnects_during_a_pass_is_harmless(serving: Serving) -> None:
    with serving() as server:
        server.gate.open.clear()
        with asking(server, ["1"]):
            assert server.gate.entered.acquire(timeout=30)
        server.gate.open.set()
        assert len(server.rewards(["2"])) == 1


# ---- limits --------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, int, str]] = {
    "no json": (b"query=1", 400, "the request is not JSON"),
    "no utf-8": (b'{"query": ["\xff"]}', 400, "the request is not JSON"),
    "deep": (b"[" * 3000, 400, "the request is not JSON"),
    "a list": ([1], 422, "'query' must be a list of one or more texts"),
    "no query": ({"queries": ["1"]}, 422, "'query' must be"),
    "a text": ({"query": "1"}, 422, "'query' must be"),
    "nothing": ({"query": []}, 422, "'query' must be"),
    "numbers": ({"query": [1]}, 422, "'query' must be"),
    "null": ({"query": ["1", None]}, 422, "'query' must be"),
    "prompts": ({"query": ["1"], "prompts": [1]}, 422, "'prompts' must be"),
    "fewer prompts": ({"query": ["1", "2"], "prompts": ["1"]}, 422, "'prompts' has 1 entries"),
    "items": ({"query": ["1"] * 21}, 413, "21 texts in one request, but the limit is 20"),
    "tokens": ({"query": ["1", "2" * 50]}, 422, "query[1] has 5"),
    "bytes": ({"query": ["1"], "labels": "x" * 4000}, 413, "larger than 4000 bytes"),
    "many bytes": (b"x" * 5_000_000, 413, "larger than 4000 bytes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_request_gets_the_reason(kind: str, server: Any) -> None:
    body, status, words = REFUSED[kind]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    passes = len(server.gate.passes)
    headers = {"Content-Type": "application/json; charset=utf-8"}
    response = server.client.post(f"{server.url}/get_reward", content=data, headers=headers)
    assert response.status_code == status and words in response.json()["error"]
    assert len(server.gate.passes) == passes and server.app.guard.held_bytes == 0


def test_other_requests_are_refused(server: Any) -> None:
    client, url = server.client, server.url
    assert client.post(f"{url}/get_reward", content=b"{}").status_code == 415
    form = {"Content-Type": "text/plain"}
    assert client.post(f"{url}/get_reward", content=b"{}", headers=form).status_code == 415
    assert client.get(f"{url}/get_reward").status_code == 405
    assert client.post(f"{url}/health").status_code == 405
    assert client.get(f"{url}/docs").status_code == 404


def test_a_full_queue_replies_with_retry_after(serving: Serving) -> None:
    with serving(max_queue=4, max_items=4) as server:
        server.gate.open.clear()
        first = in_background(server.rewards, ["1"])
        assert server.gate.entered.acquire(timeout=30)
        waits = in_background(server.rewards, ["1", "2", "3"])
        until(lambda: server.health()["queue_length"] == 3)
        refused = server.post(["4", "5"])
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert "3 texts are waiting, and the limit is 4" in refused.json()["error"]
        fits = in_background(server.rewards, ["4"])
        until(lambda: server.health()["queue_length"] == 4)
        server.gate.open.set()
        assert [len(f.result()) for f in (first, waits, fits)] == [1, 3, 1]


def test_large_requests_that_arrive_at_once_are_bounded_together(serving: Serving) -> None:
    """16 requests of the largest size may be on their way."""
    with serving(max_request_bytes=1000) as server:
        server.app.guard.held_bytes = 16_000
        assert server.post(["1"]).status_code == 429
        server.app.guard.held_bytes = 15_900
        assert server.post(["1"]).status_code == 200
        assert server.app.guard.held_bytes == 15_900


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_len": 20_000}, "max_len=20000"),
        ({"max_items": 5000}, "max_items=5000"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0"),
        ({"port": 70_000}, "port=70000"),
        ({"max_chars": 0}, "max_chars=0"),
        ({"max_wait_ms": math.inf}, "max_wait_ms=inf"),
        ({"max_wait_ms": math.nan}, "max_wait_ms=nan"),
    ],
)
def test_invalid_options_are_refused_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ServeError) as caught:
        ServeOptions(**options).check()
    assert words in str(caught.value)


def test_max_len_is_bounded_by_positions_and_by_a_pass(reward_model: Any) -> None:
    config = ModelConfig(path=str(reward_model))
    assert load_text_scorer(config, ServeOptions()).max_len == 64
    assert load_text_scorer(config, ServeOptions(max_batch_tokens=50)).max_len == 50
    assert load_text_scorer(config, ServeOptions(max_len=30)).max_len == 30
    with pytest.raises(ServeError, match="more than the model's 64 positions"):
        load_text_scorer(config, ServeOptions(max_len=65))


# ---- who may ask ---------------------------------------------------------------------------------


def test_a_server_with_a_token_answers_only_to_it(serving: Serving) -> None:
    with serving(token="s3cret-token") as server:
        wrong: list[Any] = ["", "s3cret-token", "Bearer", "Bearer wrong", "Bearer s3cret-token2"]
        wrong += ["Basic s3cret-token", "Bearer é".encode("latin-1"), None]
        for header in wrong:
            headers = {} if header is None else {"Authorization": header}
            url = f"{server.url}/get_reward"
            refused = server.client.post(url, json={"query": ["1"]}, headers=headers)
            assert refused.status_code == 401 and "error" in refused.json()
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert "s3cret" not in refused.text
        assert server.gate.passes == []
        server.client.headers["Authorization"] = "Bearer s3cret-token"
        assert server.post(["1"]).status_code == 200
        del server.client.headers["Authorization"]
        assert server.health()["ready"] is True


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ServeError, match="there is no token, so anyone could use the server"):
        listen(host, 0, token=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_loopback_needs_none(host: str) -> None:
    with listen(host, 0, token=None) as listener:
        assert listener.getsockname()[0].startswith("127.")


def test_with_a_token_any_address_is_fine() -> None:
    with listen("0.0.0.0", 0, token="s3cret") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_an_address_that_is_in_use_or_unknown_is_reported(server: Any) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{port}"):
        listen("127.0.0.1", port, token=None)
    with pytest.raises(ServeError, match="address"):
        listen("no such host", 5000, token=None)
    with pytest.raises(ServeError, match="address"):
        listen("", 5000, token=None)


def test_a_port_is_reserved_while_the_model_of_its_server_loads() -> None:
    """Two servers that are both loading: the second ends at once, in words."""
    with listen("127.0.0.1", 0, token=None) as first:
        port = first.getsockname()[1]
        with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
            listen("127.0.0.1", port, token=None)
        socket.create_connection(("127.0.0.1", port)).close()


# ---- the end -------------------------------------------------------------------------------------


def test_a_request_in_progress_is_finished_before_shutdown(serving: Serving) -> None:
    before = set(threading.enumerate())
    with serving() as server:
        server.gate.open.clear()
        under_way = in_background(server.rewards, ["1"])
        assert server.gate.entered.acquire(timeout=30)
        waits = in_background(server.rewards, ["2"])
        until(lambda: server.health()["queue_length"] == 1)
        server.server.should_exit = True
        until(lambda: not _listens(server.url))
        server.gate.open.set()
        assert len(under_way.result()) == len(waits.result()) == 1
    assert server.app.batcher.running is False
    left = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}
    assert left.isdisjoint({"model", "reader"})


def _listens(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", trust_env=False)
    except httpx.TransportError:
        return False
    return True
