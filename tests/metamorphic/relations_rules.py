"""Relations of algorithms, configuration and the math reward."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from metamorphic.base import CLOSERS, Draw, Refused, close, equal, relation
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from burnish.algorithms import ADVANTAGES, POLICY_LOSSES
from burnish.algorithms.correction import correction_weights
from burnish.algorithms.policy_losses import BY_ROW
from burnish.config import ConfigError, dump_yaml, load_config
from burnish.config.algorithm import AlgorithmConfig, PolicyLossConfig
from burnish.config.docs import fields_table
from burnish.rewards.base import RewardInput
from burnish.rewards.math.reward import MathScorer
from burnish.steps.credit import assign_advantages
from burnish.steps.objectives import policy_objective
from burnish.train.base import Outputs
from burnish.types import Batch, Prompt, Sample, rows_to_batch

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

# ---- algorithms ----------------------------------------------------------------------------------


def scored_batch(draw: Draw) -> Batch:
    """Rows of one to four groups with rewards in eighths, so that sums of them are exact, and
    random log-probs and values; some tokens inside responses are not the policy's."""
    rng = draw.rng
    rows, masks, prompt_lens, groups = [], [], [], []
    for group in range(rng.randint(1, 4)):
        prompt = rng.randint(1, 5)
        for _ in range(rng.randint(1, 5)):
            length = rng.randint(1, 9)
            mask = [True] + [rng.random() < 0.8 for _ in range(length - 1)]
            rows.append(rng.choices(range(50), k=prompt + length))
            masks.append([False] * prompt + mask)
            prompt_lens.append(prompt)
            groups.append(group)
    batch = rows_to_batch(rows, masks, prompt_lens=prompt_lens, group_ids=groups)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def noise(scale: float, shift: float = 0.0) -> Tensor:
        found = shift + scale * torch.randn(batch.tokens.numel(), generator=generator)
        return found * batch.action_mask

    old = noise(1.0, -3.0)
    rewards = torch.tensor([rng.randint(-16, 16) / 8 for _ in rows])
    return replace(
        batch,
        rewards=rewards,
        old_logprobs=old,
        ref_logprobs=old + noise(0.1),
        sampler_logprobs=old + noise(0.1),
        teacher_logprobs=old + noise(0.5),
        values=noise(1.0),
        advantages=noise(1.0),
    )


def algorithm_of(draw: Draw) -> AlgorithmConfig:
    """Draw an algorithm; combinations that the config refuses are outside of the relations."""
    rng = draw.rng
    kinds = [k for k in ADVANTAGES if k != "on_policy_distill"]
    fields: dict[str, Any] = {
        "advantage": rng.choice(kinds),
        "policy_loss": rng.choice(list(POLICY_LOSSES)),
        "loss_aggregation": rng.choice(["token_mean", "sequence_mean", "sequence_sum_constant"]),
        "entropy_coef": rng.choice([0.0, 0.01]),
    }
    if rng.random() < 0.5:
        placement, estimator = rng.choice(["loss", "reward"]), rng.choice(["k1", "k2", "k3"])
        fields["kl"] = {"init_kl_coef": 0.1, "placement": placement, "estimator": estimator}
    if rng.random() < 0.5:
        level = rng.choice(["token", "sequence", "geometric"])
        fields["correction"] = {"level": level, "mode": rng.choice(["truncate", "clip", "mask"])}
    draw.note(algorithm=fields)
    try:
        return AlgorithmConfig(**fields)
    except ValidationError as error:
        raise Refused(str(error)) from error


@relation
def group_advantages(draw: Draw) -> None:
    """Group advantages do not change if a constant is added to the rewards of a group, or if groups
    get other ids; if rows are permuted, so are they.

    Exact for constants and ids (rewards in eighths and whole constants have exact sums and the
    order of additions stays); 1e-5 of permutations, which change that order."""
    kind = draw.one(advantage=["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline"])
    batch = scored_batch(draw)
    assert batch.rewards is not None
    rewards, ids, lengths = batch.rewards, batch.group_ids, batch.lengths
    advantage = ADVANTAGES[kind]
    wanted = advantage(rewards, ids, lengths=lengths)
    shifts = torch.tensor([draw.rng.randint(-100, 100) for _ in range(4)], dtype=torch.float32)
    close(advantage(rewards + shifts[ids], ids, lengths=lengths), wanted, 0.0, "shifted rewards")
    names = torch.tensor(draw.rng.sample(range(-1000, 1000), 4))
    close(advantage(rewards, names[ids], lengths=lengths), wanted, 0.0, "other ids")
    order = torch.tensor(draw.rng.sample(range(batch.num_rows), batch.num_rows))
    found = advantage(rewards[order], ids[order], lengths=lengths[order])
    close(found, wanted[order], 1e-5, "permuted rows")


@relation
def assigned_advantages(draw: Draw) -> None:
    """Advantages and returns of all tokens belong to their rows: permuting rows permutes them, and
    values, log-probs and rewards of tokens outside of the mask do not change them.

    1e-4 of values up to about 20: whitening adds in another order."""
    batch, config = scored_batch(draw), algorithm_of(draw)
    wanted = assign_advantages(batch, config, kl_coef=0.1)
    order = draw.rng.sample(range(batch.num_rows), batch.num_rows)
    draw.note(order=order)
    permuted = assign_advantages(batch.select(order), config, kl_coef=0.1)
    outside = ~batch.action_mask
    dirty = {
        name: torch.where(outside, torch.full_like(value, 1e3), value)
        for name in ("values", "old_logprobs", "ref_logprobs")
        if (value := vars(batch)[name]) is not None
    }
    cleaned = assign_advantages(replace(batch, **dirty), config, kl_coef=0.1)
    for name in ("advantages", "returns"):
        one = vars(wanted)[name]
        if one is None:
            continue
        close(vars(permuted)[name], vars(wanted.select(order))[name], 1e-4, f"permuted {name}")
        close(vars(cleaned)[name], one, 0.0, f"{name} with other values outside of the mask")


@relation
def losses_ignore_masked(draw: Draw) -> None:
    """Log-probs and advantages outside of the mask, NaN and infinite ones included, change neither
    a per-token policy loss nor its gradient, nor a correction weight. Exact."""
    batch = scored_batch(draw)
    kind = draw.one(loss=POLICY_LOSSES)
    garbage = draw.one(garbage=[float("nan"), float("inf"), -float("inf"), 1e30])
    mask = batch.action_mask
    config = TypeAdapter(PolicyLossConfig).validate_python(kind)
    options = config.model_dump(exclude={"kind"})
    options |= {"row_ids": batch.row_ids} if kind in BY_ROW else {}
    assert batch.old_logprobs is not None and batch.advantages is not None
    tensors = [batch.old_logprobs + 0.3 * batch.advantages, batch.old_logprobs, batch.advantages]

    def run(values: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = values[0].clone().requires_grad_()
        loss, _ = POLICY_LOSSES[kind](logprobs, *values[1:], mask, **options)
        loss.sum().backward()
        level, mode = draw.facts["level"], draw.facts["mode"]
        bounds = {"low": 0.5, "high": 2.0, "row_ids": batch.row_ids}
        weights, _ = correction_weights(*values[:2], mask, level=level, mode=mode, **bounds)
        assert logprobs.grad is not None
        return loss.detach(), logprobs.grad * mask, weights

    draw.one(level=["token", "sequence", "geometric"])
    draw.one(mode=["truncate", "clip", "mask"])
    wanted = run(tensors)
    found = run([torch.where(mask, value, garbage) for value in tensors])
    for what, one, two in zip(("loss", "gradient", "weights"), found, wanted, strict=True):
        close(one, two, 0.0, what)


@relation
def objective_of_parts(draw: Draw) -> None:
    """The RL objective of a batch, and its gradient, are the sums of those of its parts, for every
    algorithm, aggregation and split, in any order of rows.

    1e-5 of the largest entry: sums in another order."""
    batch, config = scored_batch(draw), algorithm_of(draw)
    rng = draw.rng
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    assert batch.old_logprobs is not None
    change = 0.2 * torch.randn(batch.tokens.numel(), generator=generator)
    logprobs = (batch.old_logprobs + change) * batch.action_mask
    loss = policy_objective(config, max_len=16, kl_coef=lambda: 0.1)
    order = rng.sample(range(batch.num_rows), batch.num_rows)
    cuts = sorted(rng.sample(range(1, batch.num_rows), rng.randint(0, batch.num_rows - 1)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    draw.note(parts=parts)

    def run(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        leaf = logprobs.clone().requires_grad_()
        total = torch.zeros(())
        for part in rows:
            # the leaf travels through select as one more array of the batch
            micro = batch.select(part)
            own = replace(batch, values=leaf).select(part).values
            found, _ = loss(Outputs(logprobs=own, entropy=own), micro)
            total = total + found
        total.backward()
        assert leaf.grad is not None
        return total.detach(), leaf.grad

    wanted, slope = run([list(range(batch.num_rows))])
    found, own_slope = run(parts)
    close(found, wanted, 1e-5 * max(1.0, float(wanted.abs())), "loss")
    close(own_slope, slope, 1e-5 * max(1.0, float(slope.abs().max())), "gradient")


# ---- configuration -------------------------------------------------------------------------------

TRICKY = (
    *("#", " #", ": ", ":", "{}", "{x}", "[", "]", "010", "1:00", "yes", "No", "on", "1e-6", "007"),
    *(
        "true",
        "-",
        "- ",
        "|",
        ">",
        "&a",
        "*a",
        "!x",
        "%",
        "@",
        "`",
        '"',
        "'",
        "\\",
        "\\n",
        "=",
        ",",
    ),
    *("null", "~", "2020-01-01", "é", "a", "b c", " ", "\n", "\u0085", "\u2028", "0x10", "1_000"),
)
NULLS = ("", "~", "null", "Null", "NULL")
VALUES = (
    *("1", "0", "2", "010", "0o10", "0x10", "1_000", "1e-6", "1e3", "1.", ".5", "-1", "+1", "1:00"),
    *("yes", "no", "on", "true", "True", "TRUE", "null", "~", "[1, 2]", "[]", "{}", "abc", "2.0"),
    *("0.5", "1e400", ".inf", "2020-01-01", "'1'", '"a"', "[a, 'b']", "- 1", "a: b"),
)


def _loaded(recipe: Any, overrides: list[str]) -> Any:
    """The config, or "refused"."""
    try:
        with contextlib.chdir(ROOT):
            return load_config(recipe, overrides)
    except ConfigError:
        return "refused"


@relation
def dumped_config(draw: Draw) -> None:
    """A config that is written and read again is the same config. Exact."""
    recipe = draw.one(recipe=RECIPES)
    text = "".join(draw.rng.choices(TRICKY, k=draw.rng.randint(1, 5)))
    keys = [f"seed={draw.rng.randrange(10**6)}", f"train.lr={draw.rng.random():.3g}"]
    keys += [f"data.system_prompt={text}", f"run_name={text}", f"model.tokenizer_path={text}"]
    overrides = draw.rng.sample(keys, draw.rng.randint(0, len(keys)))
    draw.note(overrides=overrides)
    config = _loaded(recipe, overrides)
    if config == "refused":
        raise Refused("the overrides do not fit the recipe")
    path = draw.folder / "dumped.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    again = _loaded(path, [])
    equal(again, config, "the config that was read again")


cached_table = cache(fields_table)


@relation
def override_is_file(draw: Draw) -> None:
    """``key=TEXT`` on the command line gives the same config as the same text in the file, quoted
    as YAML has it, for every text field; and as ``key: VALUE`` in the file for every other field.
    Exact; a value that one of them refuses is refused by both."""
    recipe = draw.one(recipe=RECIPES)
    fields = cached_table(yaml.safe_load(recipe.read_text(encoding="utf-8"))["job"])
    for _ in range(5):
        field = draw.rng.choice(fields)
        keys = ["0" if key == "N" else key for key in field.path.split(".")]
        types = {other.type for other in fields if other.path == field.path}  # one per kind
        text = types & {"text", "text, or null"}
        if keys != ["job"] and _override_is_file(draw, recipe, keys, min(text or types)):
            return
    raise Refused("the values fit none of the fields")


def _override_is_file(draw: Draw, recipe: Path, keys: list[str], kind: str) -> bool:
    """Check the relation for one field; False if a value is refused on both sides."""
    if is_text := kind in ("text", "text, or null"):
        value = "".join(draw.rng.choices(TRICKY, k=draw.rng.randint(1, 4)))
        if value in NULLS or value.strip()[:1] in ("'", '"'):
            return False  # these mean something else on the command line
    else:
        value = draw.rng.choice(VALUES)
    tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    place = _below(tree, keys)
    if place is None:
        return False
    last: Any = int(keys[-1]) if isinstance(place, list) else keys[-1]
    place[last] = "PLACEHOLDER"
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    written = json.dumps(value) if is_text else f"\n{' ' * 20}{value}"
    path = draw.folder / "recipe.yaml"
    path.write_text(text.replace("PLACEHOLDER", written), encoding="utf-8")
    override = f"{'.'.join(keys)}={value}"
    draw.note(override=override, type=kind)
    found, wanted = _loaded(recipe, [override]), _loaded(path, [])
    equal(found, wanted, "the override and the file")
    return bool(found != "refused")


def _below(tree: Any, keys: list[str]) -> Any:
    """The mapping or list that holds the last key, made if its section is missing; None if there
    is none."""
    for key in keys[:-1]:
        if isinstance(tree, list):
            tree = tree[int(key)] if key.isdigit() and int(key) < len(tree) else None
        elif isinstance(tree, dict):
            tree = tree.setdefault(key, {})
        else:
            return None
    if isinstance(tree, list) and not (keys[-1].isdigit() and int(keys[-1]) < len(tree)):
        return None
    return tree if isinstance(tree, (dict, list)) else None


# ---- the math reward -----------------------------------------------------------------------------

_MATH: list[MathScorer] = []


def math_reward() -> MathScorer:
    """One reward with its worker process, for all draws."""
    if not _MATH:
        _MATH.append(MathScorer(timeout_s=30.0))
        CLOSERS.append(lambda: _MATH.pop().close() if _MATH else None)
    return _MATH[0]


def _answers(draw: Draw) -> tuple[str, list[str], list[str]]:
    """(label, forms of the same value, forms of other values)."""
    rng = draw.rng
    n, q = rng.choice([rng.randint(2, 30), rng.randint(1000, 99999)]), rng.choice([3, 7, 9, 11])
    p = rng.choice([k for k in range(1, 40) if k % q])
    found: dict[str, tuple[str, list[str], list[str]]] = {
        "integer": (f"{n}", [f"{n}", f"{n}.0", f"{n:,}"], [f"{n + 1}", f"-{n}", f"{n}1", f"{n}.5"]),
        "negative": (f"-{n}", [f"-{n}", f"-{n}.0", f"−{n}"], [f"{n}", f"-{n + 1}", f"-{n}.5"]),
        "fraction": (
            f"{p}/{q}",
            [f"\\frac{{{p}}}{{{q}}}", f"\\dfrac{{{p}}}{{{q}}}", f"{p}/{q}", f"{2 * p}/{2 * q}"],
            [f"\\frac{{{q}}}{{{p}}}", f"{p + 1}/{q}", f"\\frac{{{p}}}{{{q + 1}}}", f"-{p}/{q}"],
        ),
        "decimal": (f"{n}.25", [f"{n}.25", f"{n}.250", f"{4 * n + 1}/4"], [f"{n}.26", f"{n}.5"]),
        "polynomial": (
            f"x^2+{n}x",
            [f"x^2+{n}x", f"x^{{2}} + {n}x", f"{n}x+x^2", f"x(x+{n})"],
            [f"x^2-{n}x", f"x^3+{n}x", f"x^2+{n + 1}x"],
        ),
        "root": (f"{n}\\sqrt{{3}}", [f"{n}\\sqrt{{3}}", f"{n} \\sqrt{{3}}"], [f"{n}\\sqrt{{2}}"]),
        "pi": (f"{n}\\pi", [f"{n}\\pi", f"{n} \\pi"], [f"{n + 1}\\pi", f"{n}"]),
        "pair": (f"({p}, {n})", [f"({p},{n})", f"({p}, {n})"], [f"({n + 50}, {p})", f"({p})"]),
        "letter": ("C", ["C", "(C)", "\\text{C}"], ["B", "(D)"]),
        "thousands": ("6,000", ["6000", "6,000", "6{,}000", "6\\,000"], ["6", "600", "60,000"]),
    }
    return found[draw.one(kind=found)]


SPACING: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("as it is", lambda s: s),
    ("blanks around", lambda s: f"  {s} "),
    ("thin spaces around", lambda s: f"\\,{s}\\;"),
    ("dollars around", lambda s: f"${s}$"),
    ("displaystyle", lambda s: f"\\displaystyle {s}"),
    ("full stop", lambda s: f"{s}."),
)
FRAMES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("box", lambda s: f"\\boxed{{{s}}}"),
    ("box in a formula", lambda s: f"So $$\\boxed{{{s}}}$$"),
    ("box with a newline", lambda s: f"\\boxed{{\n{s}\n}}"),
    ("fbox", lambda s: f"Therefore $\\fbox{{{s}}}$"),
    ("#### line", lambda s: f"#### {s}"),
    ("the answer is", lambda s: f"The final answer is ${s}$."),
    ("answer tag", lambda s: f"<answer>{s}</answer>"),
)
SENTENCES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("German", lambda s: f"Die Antwort ist {s}."),
    ("French", lambda s: f"La réponse finale est {s}."),
    ("Spanish", lambda s: f"La respuesta correcta es {s}."),
    ("Portuguese", lambda s: f"A resposta é {s}."),
    ("Italian", lambda s: f"La risposta è {s}."),
    ("Russian", lambda s: f"Ответ: {s}."),
    ("Vietnamese", lambda s: f"Đáp án đúng là {s}."),
    ("Chinese", lambda s: f"所以答案是{s}。"),
    ("Japanese", lambda s: f"答えは{s}です。"),
    ("Korean", lambda s: f"정답은 {s}입니다."),
    ("Thai", lambda s: f"คำตอบคือ {s}"),
)
"""Sentences with the answer in other languages than English. What is no number or choice is not
read in them, unless it stands in a formula."""
NUMBERS_AND_CHOICES = ("integer", "negative", "decimal", "fraction", "letter", "thousands")
UNMARKED: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("Chinese", lambda s: f"所以，结果是{s}。"),
    ("Chinese with a unit", lambda s: f"一共{s}元"),
    ("Japanese", lambda s: f"合計は{s}です。"),
    ("full-width colon", lambda s: f"结果：{s}"),
    ("colon", lambda s: f"Step 3, total:{s}"),
    ("tag", lambda s: f"<b>{s}</b>"),
    ("name behind it", lambda s: f"结果是{s}（见 A4 纸）。"),
    ("full-width digits", lambda s: f"结果是{s.translate(_FULL_WIDTH)}。"),
)
"""Surroundings of a number that math-verify does not find in them."""
_FULL_WIDTH = {ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789.,"}
BEFORE = (
    *("", "First, 3 + 4 = 7. ", "Let me think.\n\n", "<think>\\boxed{12345}</think>\n"),
    *("I first had \\boxed{777}, which is wrong. Again, more carefully than before: ", "答案：\n"),
    *("1. Add.\n2. Multiply by 5.\n\n", "<think>the answer is 99</think>", "x = 5, so\n"),
)
AFTER = ("", "\n", " \n\n", "\n\nI hope this helps.", "\n\nThat is what was to be found. ")


@relation
def math_surroundings(draw: Draw) -> None:
    """What stands around a marked answer (text, thoughts, earlier boxes, white space, LaTeX
    spacing) changes no score: equal forms of the label score 1, other values 0. Exact."""
    label, right, wrong = _answers(draw)
    reward = math_reward()
    items, wanted = [], []
    for _ in range(4):
        good = draw.rng.random() < 0.5
        form = draw.rng.choice(right if good else wrong)
        spacing, change = draw.rng.choice(SPACING)
        name, frame = draw.rng.choice(FRAMES)
        before = draw.rng.choice(BEFORE)
        if spacing == "displaystyle" and draw.facts["kind"] == "letter":
            change = str  # a choice is no formula
        if spacing == "dollars around" and name == "box in a formula":
            change = str  # nor are there formulas in formulas
        if name == "the answer is":
            change = str
            if "wrong" in before:  # behind a box, "answer is" marks quantities only (last_answer)
                before = ""
        if draw.facts["kind"] in ("integer", "negative", "decimal") and draw.rng.random() < 0.3:
            name, frame = draw.rng.choice(UNMARKED)
            change = str
            before = "" if "boxed{777}" in before else before  # which is a mark
        elif draw.facts["kind"] in NUMBERS_AND_CHOICES and draw.rng.random() < 0.4:
            name, frame = draw.rng.choice(SENTENCES)
            change = str
            before = "" if "boxed{777}" in before else before
        text = before + frame(change(form)) + draw.rng.choice(AFTER)
        items.append(_item(label, text))
        wanted.append(float(good))
    draw.note(label=label, texts=[item.sample.text for item in items])
    equal(reward.score(items), wanted, "scores")


def _item(label: str, text: str) -> RewardInput:
    prompt = Prompt(id="q:0", token_ids=(1,), text="q", label=label)
    sample = Sample(
        sample_id="q:0/0",
        prompt_id="q:0",
        group_id=0,
        prompt_ids=(1,),
        response_ids=(2,),
        sampler_logprobs=(0.0,),
        action_mask=(True,),
        versions=(0,),
        text=text,
        finish_reason="stop",
    )
    return RewardInput(prompt, sample)
