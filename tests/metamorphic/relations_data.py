"""Relations of data: token ids, masks, order and resumption."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from metamorphic.base import Broken, Draw, equal, relation
from metamorphic.draw_text import (
    BOS,
    FAITHFUL,
    MARKS,
    Tok,
    conversation_of,
    text_of,
    tokenizer_of,
    tools_of,
    write_rows,
)

from burnish.config.generate import AllSamples, BestWorstPairs
from burnish.config.sources import FileSource
from burnish.data.batches import BatchStream, load_batch
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptStream, load_prompts
from burnish.data.prompts.generation import GenerationPrompts
from burnish.data.selection import select
from burnish.data_files.writing import json_line, write_parquet
from burnish.types import Batch, Group, Sample

Ids = list[int]


def rows_of(batch: Batch) -> list[tuple[Ids, list[bool]]]:
    """(ids, mask) of every row."""
    bounds = list(pairwise(batch.offsets.tolist()))
    return [(batch.tokens[a:b].tolist(), batch.action_mask[a:b].tolist()) for a, b in bounds]


def parts_of(batch: Batch) -> list[tuple[Ids, Ids]]:
    """(prompt ids, trained ids) of rows that are trained on from one place to their end."""
    found = []
    for ids, mask in rows_of(batch):
        first = mask.index(True)
        if not all(mask[first:]):
            raise Broken(f"a hole in the mask: {mask}")
        found.append((ids[:first], ids[first:]))
    return found


def plain_ids(tokenizer: Tok, text: str) -> Ids:
    """Ids of a prompt without markup by transformers' tokenizer: with the special tokens that it
    puts in front, without those that it puts behind."""
    ids = list(tokenizer(text)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begin = next(i for i in range(len(ids)) if ids[i : i + len(bare)] == bare)
    return ids[:begin] + bare


@relation
def rl_prompt_ids(draw: Draw) -> None:
    """The ids of an RL prompt are those of ``tokenizer.apply_chat_template``, or of the tokenizer
    itself for plain text. Exact: both are integers."""
    tokenizer = tokenizer_of(draw)
    chat = draw.one(chat=[True, False, "wrapped"])
    rows, wanted = [], []
    for _ in range(4):
        if chat is True:
            row = {"prompt": conversation_of(draw, answered=False), "tools": tools_of(draw)}
        else:
            row = {"prompt": text_of(draw) + "a"}
        rows.append(row)
    draw.note(rows=rows)
    config = PromptDataConfig(
        sources=(write_rows(draw, rows),), apply_chat_template=chat == "wrapped"
    )
    found = [list(prompt.token_ids) for prompt in load_prompts(config, tokenizer)]
    for row in rows:
        if chat is False:
            wanted.append(plain_ids(tokenizer, row["prompt"]))
            continue
        messages = row["prompt"]
        if chat == "wrapped":
            messages = [{"role": "user", "content": messages}]
        encoded = tokenizer.apply_chat_template(
            messages, tools=row.get("tools"), add_generation_prompt=True, return_dict=True
        )
        wanted.append(list(encoded["input_ids"]))
    equal(found, wanted, "prompt ids")


@relation
def sft_mask_and_text(draw: Draw) -> None:
    """An SFT row says what the template renders, begins as the RL prompt of the same conversation
    does, and is trained on exactly the assistant's messages with their end tokens: of an earlier
    message, on what the template leaves of it (a notice says so).

    Exact. Texts are compared without white space if the tokenizer does not keep it (characters
    outside of its vocabulary are not drawn for those)."""
    tokenizer = tokenizer_of(draw)
    faithful = draw.facts["tokenizer"] in FAITHFUL
    messages = conversation_of(draw, plain=not faithful)
    draw.note(messages=messages)
    path = write_rows(draw, [{"messages": messages}])
    ((ids, mask),) = rows_of(load_batch(SFTDataConfig(sources=(path,)), tokenizer))
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    equal(_said(tokenizer, ids), _said(tokenizer, whole), "the text of the row")
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    path = write_rows(draw, [{"prompt": messages[:first]}], "prompt.jsonl")
    (prompt,) = load_prompts(PromptDataConfig(sources=(path,)), tokenizer)
    equal(ids[: mask.index(True)], list(prompt.token_ids), "the prompt of the row")
    spans = [[i for i, _ in run] for trained, run in groupby(zip(ids, mask, strict=True), _trained)
             if trained]  # fmt: skip
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if draw.facts["template"] == "strips reasoning":
        answers[:-1] = [answer.split("</think>")[-1] for answer in answers[:-1]]
    found = [_said(tokenizer, span, skip_special_tokens=True).strip() for span in spans]
    wanted = [_said(tokenizer, plain, skip_special_tokens=True).strip() for plain in
              (tokenizer(a, add_special_tokens=False)["input_ids"] for a in answers)]  # fmt: skip
    equal(found, wanted, "what is trained on")
    ends = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(MARKS))}
    if draw.facts["template"] != "no end token" and not all(s[-1] in ends for s in spans):
        raise Broken(f"an answer is trained without its end token: {spans}")


@relation
def first_answer_continues_its_prompt(draw: Draw) -> None:
    """The first answer of a conversation, and a response to a plain text, have the tokens that
    they have in the entire text, if that has the tokens of the prompt; else the text is the same.
    Exact."""
    tokenizer = tokenizer_of(draw, FAITHFUL)
    prompt, answer = text_of(draw) + "a", text_of(draw) + "x"
    row: dict[str, Any] = {"prompt": prompt, "response": answer}
    chat = draw.one(chat=[True, False])
    draw.note(row=row)
    path = write_rows(draw, [row])
    config = SFTDataConfig(sources=(path,), apply_chat_template=chat)
    ((ids, mask),) = rows_of(load_batch(config, tokenizer))
    head = ids[: mask.index(True)]
    if chat:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        whole = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        whole = [*plain_ids(tokenizer, prompt + answer), tokenizer.eos_token_id]
    if whole[: len(head)] == head:
        equal(ids, whole[: len(ids)], "the row and the entire text")
    equal(_said(tokenizer, ids), _said(tokenizer, whole), "their texts")


def _trained(pair: tuple[int, bool]) -> bool:
    return pair[1]


def _said(tokenizer: Tok, ids: Ids, **options: Any) -> str:
    text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options))
    if "##" in tokenizer.get_vocab() or "##a" in tokenizer.get_vocab():
        return "".join(text.replace("##", "").split())
    return text


@relation
def pair_rows(draw: Draw) -> None:
    """Both rows of a preference pair begin with the ids of the RL prompt, and each is the SFT row
    of its response up to the last trained token. Exact."""
    tokenizer = tokenizer_of(draw)
    chat = draw.one(chat=["messages", "text and messages", "wrapped", "plain"])
    prompt: Any = text_of(draw) + "a"
    if chat in ("messages", "text and messages"):
        prompt = conversation_of(draw, answered=False)
    answers: Any = [text_of(draw) + end for end in ("x", "y")]
    if chat == "messages" and draw.rng.random() < 0.5:
        answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    row = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    draw.note(row=row)
    wrap = {"apply_chat_template": chat == "wrapped"}
    data = PreferenceDataConfig(sources=(write_rows(draw, [row]),), repeated_prompt="keep", **wrap)
    pairs = load_batch(data, tokenizer)
    path = write_rows(draw, [{"prompt": prompt}], "prompt.jsonl")
    (asked,) = load_prompts(PromptDataConfig(sources=(path,), **wrap), tokenizer)
    demos = [{"prompt": prompt, "response": answer} for answer in answers]
    path = write_rows(draw, demos, "demos.jsonl")
    sft = rows_of(load_batch(SFTDataConfig(sources=(path,), **wrap), tokenizer))
    for (ids, mask), (demo, trained) in zip(rows_of(pairs), sft, strict=True):
        first = mask.index(True)
        equal(ids[:first], list(asked.token_ids), "the prompt of a row of the pair")
        end = len(trained) - trained[::-1].index(True)
        equal(ids, demo[:end], "a row of the pair and its demonstration")
        equal(mask[first:], trained[first:end], "the mask of both")


@relation
def generated_rows(draw: Draw) -> None:
    """SFT and DPO on rows that the job generate wrote train exactly the sampled ids, whatever a
    tokenizer makes of their text. Exact."""
    tokenizer = tokenizer_of(draw)
    prompts = [{"prompt": text_of(draw) + "a"} for _ in range(3)]
    wrap = draw.one(wrap=[True, False])
    suffix = draw.one(suffix=[".jsonl", ".parquet"])
    draw.note(prompts=prompts)
    data = PromptDataConfig(sources=(write_rows(draw, prompts),), apply_chat_template=wrap)
    questions = GenerationPrompts(data, tokenizer)
    groups = _sampled(draw, tokenizer, questions)
    samples = [sample for group in groups for sample in group.samples]
    draw.note(sampled=[sample.response_ids for sample in samples])
    path = _written(draw, AllSamples(), (tokenizer, groups, questions), f"all{suffix}")
    found = parts_of(load_batch(SFTDataConfig(sources=(path,)), tokenizer))
    equal(found, [(list(s.prompt_ids), list(s.response_ids)) for s in samples], "SFT rows")
    mode = BestWorstPairs(kind="pairs", keep_truncated=True)
    if all(group.samples[0].text == group.samples[1].text for group in groups):
        return  # no pairs
    path = _written(draw, mode, (tokenizer, groups, questions), f"pairs{suffix}")
    found = parts_of(load_batch(PreferenceDataConfig(sources=(path,)), tokenizer))
    pairs = [group.samples for group in groups if group.samples[0].text != group.samples[1].text]
    flipped = [sample for pair in pairs for sample in reversed(pair)]
    equal(found, [(list(s.prompt_ids), list(s.response_ids)) for s in flipped], "DPO rows")


def _sampled(draw: Draw, tokenizer: Tok, questions: GenerationPrompts) -> list[Group]:
    """Two responses of random ids to each prompt, the second with the higher reward."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.convert_tokens_to_ids(list(MARKS)))
    usable = [i for i in range(len(tokenizer)) if i not in special]
    groups = []
    for number, question in enumerate(questions.take(0, len(questions))):
        prompt, samples = question.prompt, []
        for k in range(2):
            ended = draw.rng.random() < 0.7
            ids = [*draw.rng.choices(usable, k=draw.rng.randint(1, 8))]
            ids += [tokenizer.eos_token_id] * ended
            samples.append(
                Sample(
                    sample_id=f"{prompt.id}/{k}",
                    prompt_id=prompt.id,
                    group_id=number,
                    prompt_ids=prompt.token_ids,
                    response_ids=tuple(ids),
                    sampler_logprobs=(-1.0,) * len(ids),
                    action_mask=(True,) * len(ids),
                    versions=(0,) * len(ids),
                    text=str(tokenizer.decode(ids, skip_special_tokens=True)),
                    finish_reason="stop" if ended else "length",
                    reward=float(k),
                    reward_parts={"r": float(k)},
                )
            )
        groups.append(Group(number, prompt, tuple(samples)))
    return groups


def _written(draw: Draw, mode: Any, parts: Any, name: str) -> str:
    tokenizer, groups, questions = parts
    by_id = {q.prompt.id: q for q in questions.take(0, len(questions))}
    rows = select(mode, groups, by_id, with_tokens=True, tokenizer=tokenizer).rows
    path: Path = draw.folder / name
    if path.suffix == ".parquet":
        write_parquet([lambda: rows], path)
    else:
        path.write_bytes(b"".join(map(json_line, rows)))
    return str(path)


@relation
def ends_are_not_doubled(draw: Draw) -> None:
    """A row has no two BOS and no two EOS in a row, ends with one EOS, and begins with BOS as often
    as the tokenizer puts it there: also if the data brings them. Exact."""
    tokenizer = tokenizer_of(draw)
    kind = draw.one(row=["text", "response", "wrapped", "messages"])
    bos = draw.rng.choice(["", BOS]) if kind in ("text", "response") else ""
    eos = draw.rng.choice(["", tokenizer.eos_token])
    content, prompt = text_of(draw) + "x", bos + "a" + text_of(draw)
    row: dict[str, Any] = {"text": bos + content + eos}
    if kind == "messages":
        turns = [("user", prompt), ("assistant", content + eos)]
        row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    elif kind != "text":
        row = {"prompt": prompt, "response": content + eos}
    draw.note(data=row)
    config = SFTDataConfig(
        sources=(write_rows(draw, [row]),), apply_chat_template=kind == "wrapped"
    )
    ((ids, _),) = rows_of(load_batch(config, tokenizer))
    for name, token in (("BOS", tokenizer.bos_token_id), ("EOS", tokenizer.eos_token_id)):
        if any(a == b == token for a, b in pairwise(ids)):
            raise Broken(f"{name} is doubled: {ids}")
    if kind in ("text", "response"):
        equal(ids.count(tokenizer.eos_token_id), 1, "end tokens")
        equal(ids[-1], tokenizer.eos_token_id, "the last token")
        puts = bool(bos) or "bos" in draw.facts["adds"]
        equal(ids.count(tokenizer.bos_token_id), int(puts), "BOS tokens")


@relation
def permuted_file(draw: Draw) -> None:
    """The rows of a permuted file are the permuted rows of the file: no row depends on another.
    Exact."""
    tokenizer = tokenizer_of(draw)
    rows = []
    for _ in range(6):
        kinds = [
            {"messages": conversation_of(draw)},
            {"prompt": text_of(draw) + "a", "response": text_of(draw) + "b"},
            {"text": "a" + text_of(draw)},
        ]
        rows.append(draw.rng.choice(kinds))
    order = draw.rng.sample(range(6), 6)
    draw.note(rows=rows, order=order)
    files = [write_rows(draw, rows), write_rows(draw, [rows[i] for i in order], "permuted.jsonl")]
    one, two = (rows_of(load_batch(SFTDataConfig(sources=(f,)), tokenizer)) for f in files)
    equal(two, [one[i] for i in order], "rows of the permuted file")


@relation
def resumed_stream(draw: Draw) -> None:
    """A stream that is resumed anywhere, from a state that was JSON in between, gives the same rows
    and counts as one that was never stopped. Exact."""
    tokenizer = tokenizer_of(draw)
    rng = draw.rng
    kind = draw.one(stream=["prompts", "sft", "preference"])
    sources = []
    for name in ("one", "two")[: rng.randint(1, 2)]:
        rows = [
            {"prompt": text_of(draw) + "a", "response": "b", "chosen": "c" * rng.randint(1, 9),
             "rejected": "d"} for _ in range(rng.randint(1, 7))
        ]  # fmt: skip
        path = write_rows(draw, rows, f"{name}.jsonl")
        sources.append(FileSource(path=path, name=name, weight=rng.choice([0.5, 1.0, 3.0])))
    limit = draw.one(limit=[12, 40, 400])
    limits = {"prompt_max_len" if kind == "prompts" else "max_len": limit}
    options = {"shuffle": rng.random() < 0.7, "overlong": rng.choice(["drop", "truncate_left"])}
    makers: dict[str, Any] = {
        "prompts": (PromptStream, PromptDataConfig),
        "sft": (BatchStream, SFTDataConfig),
        "preference": (BatchStream, PreferenceDataConfig),
    }
    stream_class, config_class = makers[kind]
    config = config_class(sources=tuple(sources), **limits, **options)

    def new() -> Any:
        return stream_class(config, tokenizer, seed=rng_seed)

    rng_seed = rng.randrange(100)
    sizes = [rng.randint(1, 4) for _ in range(6)]
    stop = draw.one(stop=range(6))
    never, stopped = new(), new()
    wanted = [_plain(never.next(size)) for size in sizes]
    found = [_plain(stopped.next(size)) for size in sizes[:stop]]
    state = json.loads(json.dumps(stopped.state_dict()))
    again = new()
    again.load_state_dict(state)
    found += [_plain(again.next(size)) for size in sizes[stop:]]
    equal(found, wanted, "rows after a resume")
    equal(again.counts, never.counts, "counts after a resume")


def _plain(rows: Any) -> Any:
    if isinstance(rows, Batch):
        return (rows.tokens.tolist(), rows.action_mask.tolist(), rows.group_ids.tolist())
    return rows
