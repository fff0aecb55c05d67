"""YAML as people mean it: text stays text, odd numbers are refused, and no file takes long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config import ConfigError, JobConfig, dump_yaml, load_config
from burnish.observe.errors import SavedRecipeError
from burnish.observe.public_recipe import read_recipe

LOOKS_LIKE_MORE = ["010", "1:00", "1e-6", "yes", "off", "2020-01-01", "0x1f", "1_000", ".inf"]


def written(folder: Path, data: str = "{sources: [a.jsonl]}", more: str = "") -> Path:
    path = folder / "recipe.yaml"
    head = "job: sft\nmodel: {scratch: {}}\ntrain: {train_batch_size: 2}\n"
    path.write_text(f"{head}data: {data}\n{more}")
    return path


def loaded(recipe: Any, *overrides: str) -> JobConfig:
    return load_config(recipe, overrides)


def test_an_override_of_a_text_field_is_used_unchanged(recipes: dict[str, Any]) -> None:
    """A prompt for GSM8K was cut at its ` #`, which begins a comment in YAML."""
    text = "Solve it. End with #### and the number"
    assert loaded(recipes["sft"], f"data.system_prompt={text}").data.system_prompt == text
    for text in [*LOOKS_LIKE_MORE, "[INST] {x}", "*a", ": b", " c ", '"a" or "b"', "a: b #"]:
        assert loaded(recipes["sft"], f"data.text_key={text}").data.text_key == text


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("~", None), ("", None), ("'null'", "null"), (r'"a\nb"', "a\nb")],
)
def test_null_and_quotes_of_a_text_field_keep_their_meaning(
    recipes: dict[str, Any], text: str, value: str | None
) -> None:
    assert loaded(recipes["sft"], f"data.system_prompt={text}").data.system_prompt == value


@pytest.mark.parametrize("text", LOOKS_LIKE_MORE)
def test_a_text_field_of_a_recipe_is_used_unchanged(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, f"{{sources: [{text}, {{path: b.jsonl, name: {text}}}]}}")
    first, second = loaded(path).data.sources
    assert (first.path, second.name) == (text, text)


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_text_survives_an_override_in_quotes_and_a_dump(text: str) -> None:
    tree: dict[str, Any] = {"model": {"scratch": {}}, "train": {"train_batch_size": 2}}
    tree |= {"job": "sft", "data": {"sources": ["a.jsonl"], "system_prompt": text}}
    config = loaded(tree)
    import yaml

    from burnish.config.yaml_text import RecipeLoader

    assert loaded(yaml.load(dump_yaml(config), Loader=RecipeLoader)) == config


def test_a_dump_quotes_text_that_reads_as_a_number(tmp_path: Path) -> None:
    """``options`` may hold anything, so nothing but the quotes says that it is text."""
    source = {"kind": "environment", "options": {"a": "1e-6", "b": "2020-01-01", "c": 1e-6}}
    recipe = {
        "job": "generate",
        "model": {"scratch": {}},
        "data": {"sources": [source]},
    }
    path = tmp_path / "dump.yaml"
    path.write_text(dump_yaml(loaded(recipe)))
    assert loaded(path).data.sources[0].options == source["options"]


@pytest.mark.parametrize("text", ["010", "-0_7", "1:00", "1:30.5"])
def test_octal_and_base_60_numbers_are_rejected_with_a_fix(
    tmp_path: Path, recipes: dict[str, Any], text: str
) -> None:
    says = rf"YAML reads {text} as (octal|base 60).*write the number in decimal"
    with pytest.raises(ConfigError, match=says):
        loaded(recipes["sft"], f"data.max_len={text}")
    with pytest.raises(ConfigError, match=rf"{says}[\s\S]*recipe\.yaml\", line 4"):
        loaded(written(tmp_path, f"{{sources: [a.jsonl], max_len: {text}}}"))


@pytest.mark.parametrize("line", ["Solve it. End with #### x", "Solve it.  # short", "# none yet"])
def test_text_that_ends_at_a_comment_is_rejected(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, f"\n  sources: [a.jsonl]  # mine\n  system_prompt: {line}")
    with pytest.raises(ConfigError, match=r"system_prompt ends at a ` #`.*in quotes"):
        loaded(path)
    path.write_text(path.read_text().replace(line, f"'{line}'"))
    assert loaded(path).data.system_prompt == line


def test_an_override_with_a_comment_is_rejected(recipes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"` #` begins a YAML comment"):
        loaded(recipes["sft"], "data.max_len=5 # tokens")


def bomb(levels: int = 9) -> str:
    """Nine references to nine references to ...: 9**levels values in a few lines."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (bomb(), r"\(after alias expansion\)"),
        ("x: &x [*x]", "contains"),
        (f"x: {'[' * 3000}{']' * 3000}", r"nested deeper than 64 levels"),
        (f"x: [{'1,' * 60_000}]", r"more than 50000 values"),
        ("x: " + "1" * 5000, "valid number"),
        ("# " + "x" * (5 << 20), "4194304"),
        ("? [1, 2]\n: 3", "mapping"),
    ],
    ids=["alias bomb", "endless alias", "deep", "wide", "long number", "large", "odd key"],
)
def test_a_hostile_recipe_is_rejected_quickly(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loaded(written(tmp_path, more=text))


def test_a_file_larger_than_any_recipe_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a tebibyte would end the process for its memory."""
    with (tmp_path / "config.yaml").open("w") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is it a data file"):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(SavedRecipeError, match="is it a data file"):
        read_recipe(tmp_path)


def test_an_alias_is_a_copy_of_its_target(tmp_path: Path) -> None:
    """The same plain ``010`` is text in one place, and an error in another."""
    more = "eval:\n  data: &d\n    sources: [&s 010]\n    text_key: *s\nmax_epochs: *s\n"
    with pytest.raises(ConfigError, match="reads 010 as octal"):
        loaded(written(tmp_path, more=more))
    config = loaded(written(tmp_path, more=more.replace("max_epochs: *s\n", "")))
    assert (config.eval.data.sources[0].path, config.eval.data.text_key) == ("010", "010")
