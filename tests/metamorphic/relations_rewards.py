"""Relations of rewards: numbers are equal by value, code is judged whatever stands around it, the
check of the data finds the labels that a run refuses, and failures follow their policy."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

from metamorphic.base import CLOSERS, Broken, Draw, Refused, equal, relation
from metamorphic.draw_code import passes_directly, program_of
from metamorphic.draw_text import (
    BOS,
    EOS,
    TEMPLATES,
    Tok,
    conversation_of,
    text_of,
    tokenizer_of,
    tools_of,
    write_rows,
)
from metamorphic.relations_rules import _item, math_reward
from tokenizers import processors

from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.config.rollout import DynamicSampling
from burnish.config.sandbox import UnsafeSubprocessSandbox
from burnish.data.batches import load_batch
from burnish.data.forms import open_rows
from burnish.data.messages import as_messages
from burnish.data.pieces import encode_piece
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.rendering import render_text
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import ResponseEncoder
from burnish.data.stream import RowRef
from burnish.jobs import rl
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.function.reward import FunctionScorer
from burnish.rewards.labels import label_problem
from burnish.rewards.math.text import judge, read_label
from burnish.rewards.model import rows
from burnish.rewards.python_code import reward as python_code
from burnish.rewards.python_code.config import PythonCodeReward
from burnish.rewards.reward_set import NoGroupLeftError, RewardSet
from burnish.types import Group
from tests.rewards.code_pairs import passes_in_python, read_pairs

# ---- numbers -------------------------------------------------------------------------------------


def _forms(value: Fraction) -> list[str]:
    """Ways to write a number without a base."""
    sign, size = "-" * (value < 0), abs(value)
    over, under = size.numerator, size.denominator
    forms = [f"{sign}\\frac{{{over}}}{{{under}}}", f"{sign}{2 * over}/{2 * under}"]
    if under == 1:
        forms += [f"{sign}{over}", f"{sign}{over:,}", f"{sign}{over}.00", f"{sign}{over} apples"]
        forms += [f"{sign}{over}e0", f"{sign}{over / 10} \\times 10^{{1}}"]
    if under in (2, 4, 5):
        forms += [f"{sign}{float(size)}", f"{sign}{float(size)}0", f"${sign}{float(size)}$"]
    if over > under > 1:
        forms.append(f"{sign}{over // under} {over % under}/{under}")
    return forms


def _in_base(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = f"{digit}{digits}"
    return digits


@relation
def numbers_are_their_values(draw: Draw) -> None:
    """A label and an answer that are numbers are equal if and only if their values are, in every
    form of both. Numbers with a base are equal if their digits and bases are; the answer may leave
    the base out. Exact."""
    rng = draw.rng

    def value() -> Fraction:
        number = rng.choice([rng.randint(1, 30), rng.randint(1000, 99999)])
        return Fraction(number * rng.choice([1, -1]), rng.choice([1, 1, 2, 3, 4, 5, 7]))

    if draw.one(based=[False, False, True]):
        number, base = rng.randint(2, 5000), rng.choice([2, 3, 8])
        digits = _in_base(number, base)
        forms = [f"{digits}_{base}", f"{digits}_{{{base}}}", f"0{digits}_\\text{{{base}}}"]
        pairs = [(rng.choice(forms), rng.choice(forms), True), (rng.choice(forms), digits, True)]
        pairs.append((rng.choice(forms), str(number), str(number) == digits))
        pairs.append((digits, rng.choice(forms), False))
        pairs.append((rng.choice(forms), f"{digits}_{base + 1}", False))
    else:
        one, other = value(), value()
        pairs = [(rng.choice(_forms(one)), rng.choice(_forms(x)), one == x) for x in (one, other)]
    draw.note(pairs=pairs)
    items = [_item(label, f"So it is \\boxed{{{text}}}.") for label, text, _ in pairs]
    equal(math_reward().score(items), [float(same) for _, _, same in pairs], "scores")


QUOTES = (
    *("'", '"', "`", "``", "```", "‘ ’", "“ ”", "„ “", "« »", "‹ ›", "「 」", "『 』", "＂"),
    *("$", "\\( \\)", ""),
)
EMPHASIS = ("", "", "_", "**", "__")
SIGNS = ("", "", "-", "negative ", "minus ", "**negative** ", "Negative: ")
AT = (
    *("The answer is {}.", "The answer is {}", "Answer: {}", "I had 99, but it is {}", "x = {}"),
    *("\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "**Answer:** {}\n\nI hope it helps."),
)


@relation
def marks_around_numbers_are_no_part_of_them(draw: Draw) -> None:
    """Quotation marks, emphasis and the delimiters of formulas around a number change no score, and
    a sign in words before them is its sign. Exact."""
    value = Fraction(draw.rng.randint(1, 500), draw.rng.choice([1, 1, 2, 4]))
    text = draw.rng.choice([f"{value}", f"{float(value)}"])
    for marks in draw.rng.sample([draw.rng.choice(QUOTES), draw.rng.choice(EMPHASIS)], 2):
        before, _, after = marks.partition(" ")
        text = f"{before}{text}{after or before}"
    sign, at = draw.rng.choice(SIGNS), draw.rng.choice(AT)
    response = at.format(sign + text)
    draw.note(response=response)
    minus = "-" if sign else ""
    items = [_item(f"{one}{value}", response) for one in (minus, "" if minus else "-")]
    equal(math_reward().score(items), [1.0, 0.0], "scores")


@relation
def names_are_their_letters_in_order(draw: Draw) -> None:
    """A label that is a name of any length equals itself at every place of an answer, and no other
    order of its letters. Exact."""
    rng = draw.rng
    name = rng.choice("bdgklmprs") + rng.choice("aeiou") + rng.choice("bdgklmnprst")
    name += "".join(rng.choices("aeilnorst", k=rng.choice([0, 0, 1, 3])))
    write = draw.one(write=[str.title, str.title, str.upper])
    other = name[::-1] if name[::-1] != name else name[1:] + name[0]
    at = draw.one(at=AT)
    draw.note(name=name, other=other)
    items = [_item(write(name), at.format(write(text))) for text in (name, other)]
    equal(math_reward().score(items), [1.0, 0.0], "scores")


# ---- code ----------------------------------------------------------------------------------------

PROGRAMS = {
    "def f(x):\n    return 3 * x": ["assert f(7) == 21", "assert f('a') == 'aaa'"],
    "class S:\n    def __init__(self):\n        self.n = []\n    def f(self, x):\n"
    "        self.n.append(x)\n        return sum(self.n)": [
        "s = S()\ns.f(1)\nassert s.f(2) == 3",
        "assert S().f(5) == 5",
    ],
    "total = 0\ndef f(x):\n    global total\n    total += x": ["f(2)\nf(3)\nassert total == 5"],
}
"""Right programs and their tests."""
HARMLESS = (
    *("import math", "# def f(x): return 0", "_unused = [1, 2]", '"""f(x)."""', "print('hello')"),
    *("def helper(y):\n    return y", "class Other: pass", "loop = []\nloop.append(loop)"),
    "import collections\nRow = collections.namedtuple('Row', 'a b')\nrow = Row(1, 2)",
)
AROUND = (
    ("", ""),
    ("Here it is.\n\n", "\n\nIt works."),
    ("<think>\n```python\nraise SystemExit\n```\n</think>\n", ""),
    ("First try:\n```\ndef f(x): return None\n```\nBetter:\n", ""),
    ("Run it:\n```bash\npython f.py\n```\n", "\n```text\n21\n```\n"),
)
_CODE: list[python_code.PythonCodeScorer] = []


def _code_reward() -> python_code.PythonCodeScorer:
    if not _CODE:
        sandbox = UnsafeSubprocessSandbox(kind="unsafe_subprocess")
        _CODE.append(python_code.PythonCodeScorer(PythonCodeReward(sandbox=sandbox)))
        CLOSERS.append(lambda: _CODE.pop().close() if _CODE else None)
    return _CODE[0]


@relation
def code_surroundings(draw: Draw) -> None:
    """The score of a program does not depend on text, thoughts and blocks around it, its fence, or
    on harmless lines in it; one that returns something else fails. Exact."""
    rng = draw.rng
    program = draw.one(program=list(PROGRAMS))
    right = draw.one(right=[True, True, False])
    lines = [program if right else program.replace("3 * x", "x").replace("+= x", "+= 1")]
    if not right:
        lines[0] = lines[0].replace("sum(self.n)", "len(self.n)")
    for line in rng.sample(HARMLESS, rng.randint(0, 3)):
        lines.insert(rng.choice([0, len(lines)]), line)
    before, after = rng.choice(AROUND)
    fence, indent = rng.choice(["python", "py", "", "Python"]), rng.choice(["", " \t"])
    if fence:  # a block without a language counts if none is Python
        after += rng.choice(["", "\nOutput:\n```\n21\n```\n"])
    text = f"{before}```{fence}{indent}\n" + "\n".join(lines) + f"\n```{after}"
    draw.note(text=text)
    equal(_code_reward().score([_item(PROGRAMS[program], text)]), [float(right)], "score")


@relation
def code_passes_as_in_python(draw: Draw) -> None:
    """Code scores 1 if and only if python3 runs it and then its tests without an error: classes,
    errors, streams and mocks, right and wrong. Exact."""
    pair = draw.rng.choice(read_pairs())
    code = pair.right if draw.one(right=[True, False]) else pair.wrong
    if draw.one(undefined_annotation=[False, False, True]):
        code += "\ndef undefined(x: Undefined): pass\n"
    draw.note(pair=pair.name)
    expected = float(passes_in_python(code, pair.tests))
    response = f"```python\n{code}\n```"
    equal(_code_reward().score([_item(pair.tests, response)]), [expected], "score")


@relation
def shared_data_is_as_in_python(draw: Draw) -> None:
    """Code scores 1 if and only if Python runs it and then its tests without an error, for every
    class of containers that the code and the tests share and change: results, arguments,
    attributes, defaults and globals, of right code and of code that copies them. Exact."""
    code, tests = program_of(draw)
    draw.note(tests=tests)
    expected = float(passes_directly(code, tests))
    equal(_code_reward().score([_item(tests, f"```python\n{code}\n```")]), [expected], "score")


# ---- bounded work --------------------------------------------------------------------------------

PIECES = (
    *("\\boxed{", "}", "{", "<think>", "</think>", "####", "answer is ", "```python\n", "```\n"),
    *(
        "1",
        "10_",
        "1,",
        "a",
        " ",
        "\n",
        "_",
        "\\frac{1}",
        "(",
        "<answer>",
        "=",
        "and ",
        "\\boxed{1}",
    ),
)
CPU_S = 5.0


@relation
def answers_are_found_in_bounded_time(draw: Draw) -> None:
    """Looking for the answer and the code in 40,000 characters takes at most 5 s of CPU time, 1e-1
    times of which is usual."""
    rng = draw.rng
    unit = "".join(rng.choices(PIECES, k=rng.randint(1, 3)))
    text = rng.choice(["", "\\boxed{3} "]) + unit * (40_000 // len(unit))
    draw.note(unit=unit)
    begun = time.process_time()
    judge(read_label("42"), text)
    python_code.read_code(text, "last_block")
    if (seconds := time.process_time() - begun) > CPU_S:
        raise Broken(f"it took {seconds:.1f} s of CPU time")


# ---- labels and failures -------------------------------------------------------------------------

LABELS: tuple[Any, ...] = (
    *(None, "", " ", "nan", "N/A", float("nan"), float("inf"), 3, 2.5, True, [1], [1, 2], {}, "[]"),
    *("####", "#### 5", "\\boxed{}", "\\boxed{7}", "Paris", "10_2", "1/0", "a sentence " * 9),
    *("2024-05-06", "1e999", 10**500, "x^2", "(C)", "None", "<answer></answer>"),
)


@relation
def labels_are_refused_before_the_run(draw: Draw) -> None:
    """A label that the check of the data refuses raises SampleError in the reward, and one that the
    reward does not understand was refused by the check. Exact."""
    label = draw.rng.choice(LABELS)
    label = text_of(draw) if draw.rng.random() < 0.3 else label
    draw.note(label=label)
    item = _item(label, "\\boxed{5}")
    problem = label_problem(("math",), item.prompt)
    error = ""
    try:
        math_reward().score([item])
    except SampleError as raised:
        error = str(raised)
    if "cannot parse the label as mathematics" not in error:  # only math-verify knows
        equal(problem is not None, bool(error), f"the check says {problem}, the reward {error}")


def _bad(kind: str, released: threading.Event) -> Any:
    if kind == "raises":
        raise ValueError("no score")
    if kind == "exits":
        raise SystemExit(3)
    if kind == "hangs":
        released.wait(30)
    return {"none": None, "nan": float("nan"), "text": "1"}.get(kind, [1.0])


def _group(number: int) -> Group:
    """Two responses ``NUMBER.0`` and ``NUMBER.1``."""
    items = [_item("1", f"{number}.{i}") for i in range(2)]
    prompt = replace(items[0].prompt, id=f"q:{number}")
    samples = [
        replace(x.sample, prompt_id=prompt.id, sample_id=f"{prompt.id}/{i}", group_id=number)
        for i, x in enumerate(items)
    ]
    return Group(group_id=number, prompt=prompt, samples=tuple(samples))


@relation
def failures_follow_their_policy(draw: Draw) -> None:
    """A function that fails for some responses stops the run, or drops their groups and changes no
    other: then the rest has the rewards of a run without them. Exact."""
    rng, released = draw.rng, threading.Event()
    kind = draw.one(kind=["raises", "exits", "none", "nan", "text", "list", "hangs"])
    bad = {f"{g}.{s}" for g in range(4) for s in range(2) if rng.random() < 0.2}
    then = draw.one(then=["fail", "drop_group"])

    def score(response: str) -> Any:
        return _bad(kind, released) if response in bad else float(response)

    reward = FunctionScorer(score, name="r", timeout_s=0.05 if kind == "hangs" else 30.0)
    rewards = RewardSet(
        [(reward, 1.0)],
        on_failure=FailurePolicy(then=then),
        shaping=ShapingConfig(),
        generate_max_len=4,
    )
    lost = {int(name[0]) for name in bad}
    if kind == "hangs" and lost:  # one call scores all groups, and none of them returned
        lost = {0, 1, 2, 3}
    draw.note(bad=sorted(bad))
    try:
        kept = {
            g.group_id: [s.reward for s in g.samples]
            for g in rewards.score([_group(number) for number in range(4)]).groups
        }
    except (RewardError, NoGroupLeftError):
        equal(then == "drop_group" and len(lost) < 4, False, "the run is stopped")
        equal(bool(lost), True, "a failure")
        return
    finally:
        released.set()
        reward.close()
    wanted = {n: [float(f"{n}.{i}") for i in range(2)] for n in range(4) if n not in lost}
    equal(kept, wanted, "rewards of the groups that are left")
    equal(then == "drop_group" or not lost, True, "the run continues")


@relation
def groups_that_differ_in_training_are_kept(draw: Draw) -> None:
    """Dynamic sampling keeps every group whose trained rewards differ by more than 1e-6, the
    rounding of normalized sums, and no other unless running statistics may make them differ."""
    rng = draw.rng
    entries = [
        SimpleNamespace(
            name=name,
            weight=rng.choice([-1.0, 0.0, 0.5, 1.0]),
            running_norm=rng.choice([None, None, "mean_std", "std"]),
        )
        for name in ("first", "second")
    ]
    scores = {
        (entry.name, f"{number}.{i}"): rng.choice([0.0, 0.5, 1.0])
        for entry in entries
        for number in range(4)
        for i in range(2)
    }
    draw.note(entries=entries, scores=scores)

    def score(name: str, response: str) -> float:
        return scores[name, response]

    rewards = RewardSet(
        [(FunctionScorer(partial(score, e.name), name=e.name), e.weight) for e in entries],
        on_failure=FailurePolicy(),
        shaping=ShapingConfig(reward_clip=draw.one(clip=[None, 0.5])),
        generate_max_len=4,
        running={e.name: e.running_norm for e in entries if e.running_norm},
    )
    config: Any = SimpleNamespace(
        rollout=SimpleNamespace(dynamic_sampling=DynamicSampling()),
        algorithm=SimpleNamespace(advantage=SimpleNamespace(normalizes_each=False)),
        rewards=entries,
    )
    group_filter = rl._group_filter(config)
    assert group_filter is not None
    measured = rewards.measure([_group(number) for number in range(4)])
    kept = [group_filter.keeps(scored, rewards) for scored in measured]
    is_plain = not any(entry.running_norm and entry.weight for entry in entries)
    for is_kept, group in zip(kept, rewards.finish(measured).groups, strict=True):
        first, second = (sample.reward for sample in group.samples)
        differs = abs(first - second) > 1e-6
        if differs or is_plain:
            equal(is_kept, differs, f"kept, with rewards {first} and {second}")
    rewards.close()


# ---- reward models -------------------------------------------------------------------------------

THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% set c = m['content'].split('</think>')[-1] %}"
    "{% set t = m['content'].split('</think>')[0].split('<think>')[-1] if '</think>' in "
    "m['content'] else '' %}{% if loop.last %}<think>\n{{ t.strip('\n') }}\n</think>\n\n"
    "{{ c.lstrip('\n') }}{% else %}{{ c.lstrip('\n') }}{% endif %}{% else %}{{ m['content'] }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
"""Writes empty reasoning into the last answer, as Qwen3's does."""


def _reward_tokenizer(draw: Draw, policy: Tok) -> Tok:
    """The policy's tokenizer or another one, perhaps with another template or other leading
    tokens."""
    own = Tok(
        tokenizer_object=type(policy.backend_tokenizer).from_str(policy.backend_tokenizer.to_str()),
        bos_token=BOS,
        eos_token=policy.eos_token,
        unk_token="<unk>",
    )
    own.chat_template = policy.chat_template
    change = draw.one(change=["none", "none", "template", "adds", "tokenizer"])
    if change == "template":
        own.chat_template = draw.rng.choice([*TEMPLATES.values(), THOUGHTS])
    if change == "adds":
        special = [(t, own.convert_tokens_to_ids(t)) for t in (BOS, EOS)]
        single = draw.one(single=["$A", f"{BOS} $A", f"{BOS} $A {EOS}"])
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=special
        )
    return tokenizer_of(draw) if change == "tokenizer" else own


@relation
def model_rewards_read_trained_rows(draw: Draw) -> None:
    """A reward model reads a given response as the tokens that ``burnish rm`` makes of the row,
    whatever the policy's tokenizer and template are, also if the response was cut. Exact."""
    policy = tokenizer_of(draw)
    if draw.rng.random() < 0.3:
        policy.chat_template = THOUGHTS
    reward = _reward_tokenizer(draw, policy)
    chat = draw.one(chat=[True, True, False])
    prompt = conversation_of(draw, answered=False) if chat else f"Q: {text_of(draw)}"
    text = text_of(draw, plain=draw.rng.random() < 0.5)
    cut = draw.one(cut=[False, False, True])
    text = draw.rng.choice(["", "", "<think>", "<think>\n"]) + text if cut else text
    text += draw.rng.choice(["", "", "", " ", "" if cut else str(policy.eos_token)])
    finish = "length" if cut else "stop"
    row = {"prompt": prompt, "tools": tools_of(draw) if chat else None}
    pair = row | {"chosen": "ab", "rejected": text, "rejected_finish_reason": finish}
    path = write_rows(draw, [pair], "pairs.jsonl")
    wanted = _rejected(PreferenceDataConfig(sources=(path,)), reward)  # type: ignore[arg-type]
    path = write_rows(draw, [row | {"response": text, "finish_reason": finish}])
    config = ResponseDataConfig(sources=(path,))  # type: ignore[arg-type]
    (source,) = open_rows(config)
    given = ResponseEncoder(config, policy).encode(source[0], RowRef("rows", 0, 0))
    draw.note(prompt=prompt, text=text, tools=row["tools"])
    item = RewardInput(given.group.prompt, given.group.samples[0])
    head, response = rows.reward_encoder(reward, policy, "rm")(item)
    equal([*head, *response], wanted, "tokens of the reward model")


@relation
def published_classifiers_read_the_rendering(draw: Draw) -> None:
    """A classifier of others reads an answer as the tokens of the rendered conversation, up to the
    last token that is no pad token, whatever the prompt of the answer opens. Plain text and a cut
    answer are the row of an exported model. Exact."""
    policy = tokenizer_of(draw)
    reward = _reward_tokenizer(draw, policy)
    opens = draw.one(opens=["", "", "<think>\n", "<think></think>"])
    generation = "{% if add_generation_prompt %}" + opens + "{% endif %}"
    reward.chat_template = f"{reward.chat_template}{generation if opens else ''}"
    chat = draw.one(chat=[True, True, True, False])
    prompt = conversation_of(draw, answered=False) if chat else f"Q: {text_of(draw)}"
    text = text_of(draw, plain=draw.rng.random() < 0.5)
    cut = draw.one(cut=[False, False, True])
    tools = tools_of(draw) if chat else None
    row = {"prompt": prompt, "response": text, "finish_reason": "length" if cut else "stop"}
    path = write_rows(draw, [row | {"tools": tools}])
    config = ResponseDataConfig(sources=(path,))  # type: ignore[arg-type]
    (source,) = open_rows(config)
    given = ResponseEncoder(config, policy).encode(source[0], RowRef("rows", 0, 0))
    pad_id = draw.one(pad_id=[None, None, reward.eos_token_id])
    draw.note(prompt=prompt, text=text, tools=tools)
    item = RewardInput(given.group.prompt, given.group.samples[0])
    exported, published = (
        [*head, *response]
        for head, response in (
            rows.reward_encoder(reward, policy, "rm", to_last_token=last, pad_id=pad_id)(item)
            for last in (False, True)
        )
    )
    if cut or not chat:
        expected = _without_end(exported, pad_id)
        equal(published, expected, "tokens without anything behind them")
        return
    messages = [*as_messages(prompt), {"role": "assistant", "content": text}]
    rendered = render_text(reward, messages, add_generation_prompt=False, tools=tools)
    complete = encode_piece(reward, rendered)
    if reward.unk_token_id in exported:
        raise Refused("an unknown character is a special token")
    if opens.endswith("\n") and "</think>" in text:
        raise Refused("the answer closes a block, whose beginning is rendered with it")
    equal(published, _without_end(complete, pad_id), "tokens of the rendering")


def _without_end(ids: list[int], pad_id: int | None) -> list[int]:
    while len(ids) > 1 and ids[-1] == pad_id:
        ids = ids[:-1]
    return ids


def _rejected(config: PreferenceDataConfig, tokenizer: Tok) -> list[int]:
    batch = load_batch(config, tokenizer)
    ids: list[int] = batch.tokens[int(batch.offsets[1]) :].tolist()
    return ids
