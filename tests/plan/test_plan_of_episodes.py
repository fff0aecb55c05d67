"""Plans of multi-turn episodes: rows of training, conversations in the KV cache, suggestions."""

from pathlib import Path

import pytest

from burnish.config import load_config
from burnish.plan.hardware import this_machine
from burnish.plan.oom import suggestions
from burnish.plan.predict import make_plan
from burnish.plan.train_role import largest_rows

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_multi_turn.yaml"


@pytest.mark.parametrize(
    ("changes", "policy", "reference"),
    [
        ((), 4, 4),
        (("algorithm.policy_loss=gspo",), 4, 4),
        (("rollout.episodes.history=template",), 4, 4),
        (("rollout.episodes.history=template", "algorithm.policy_loss=gspo"), 12, 4),
    ],
)
def test_a_micro_batch_of_episodes_has_all_rows_that_stay_together(changes, policy, reference):
    """4 samples of up to 3 turns. Rows share no prompt: the first messages may be one token. With a
    budget, a rank may have 128 x 3 rows in one micro-batch."""
    changes = (*changes, "algorithm.kl.init_kl_coef=0.1", "train.micro_train_batch_size=4")
    job = load_config(RECIPE, changes).resolve()
    for name, count in (("policy", policy), ("reference", reference)):
        rows = largest_rows(job, job.role(name), 64)
        assert len(rows) == count and {row.prompt for row in rows} == {1}
        assert max(row.length for row in rows) == 32
    budget = ("train.micro_train_batch_size=null", "train.max_tokens_per_micro_batch=100000")
    job = load_config(RECIPE, (*changes, *budget)).resolve()
    several = 3 if "rollout.episodes.history=template" in changes else 1
    assert len(largest_rows(job, job.role("policy"), 64)) == 128 * several


def test_a_plan_that_does_not_fit_suggests_shorter_conversations():
    """8 + 24 / 2 = 20 tokens."""
    found = suggestions(load_config(RECIPE), "step")
    assert [s.overrides for s in found][-1] == ("rollout.episodes.max_tokens=20",)


def test_the_kv_cache_holds_the_conversations_of_all_concurrent_episodes():
    """Rows of 32 tokens in training and prefill, and a block of 64 positions in the cache. 16 x 8 =
    128 episodes, or 10 of them."""
    for more, slots in ((), 128), (("rollout.episodes.max_concurrent=10",), 10):
        plan = make_plan(load_config(RECIPE, more), this_machine())
        (cache,) = [row for row in plan.rows if row.item == "KV cache"]
        assert cache.how.startswith(f"{slots} slots x 64 positions")
        said = "\n".join(plan.assumptions)
        assert "up to max_tokens=32; the KV cache holds those of all concurrent" in said
        assert f"at most {slots} at once" in said
        assert f"rollout: the largest micro-batch is {slots} rows of 32 tokens" in said
    single = make_plan(load_config(RECIPE.with_name("tiny_grpo.yaml")), this_machine())
    assert not [line for line in single.assumptions if "episode" in line]
