"""Model families through the paths of the project: one row of ``make models`` for each mechanism,
and the page that it writes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from burnish.models.shrink import build, shrink

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from families import config_of, names  # noqa: E402
from family_cells import CELLS, measure  # noqa: E402

PACKED, PADDED, REFUSED = "packed", "padded", "refused"
MECHANISMS = {
    "llama": PACKED,  # the plain case
    "gemma3_text": PACKED,  # windows in some layers
    "gemma2": PACKED,  # attention softcap and final softcap
    "granite": PACKED,  # logit scale, attention and residual multipliers
    "gpt_oss": PADDED,  # attention sinks
    "falcon (ALiBi)": PADDED,  # position biases
    "qwen3_5": PADDED,  # linear attention and attention
    "nemotron_h": PADDED,  # Mamba-2, attention and MLP layers
    "mamba2": PADDED,  # no attention at all
    "qwen3_moe": PACKED,  # a mixture of experts
    "deepseek_v3": PACKED,  # latent attention, router biases in buffers
    "glm": PACKED,  # partial rotary embedding
    "phi3": PACKED,  # longrope
    "stablelm": PADDED,  # parallel residual, attention outside the interface
    "gemma3n_text": PACKED,  # layers that share keys and values
    "qwen3_vl": PACKED,  # a composite checkpoint, trained on text
    "bert": REFUSED,  # attention in both directions
}


NO_LORA = ("mamba2", "nemotron_h")
"""peft does not adapt ``out_proj`` of Mamba layers, so it refuses ``all-linear``."""

NOT_BUILT = {
    "gemma3n": "timm",  # its vision tower is in another package
    "gemma4_assistant": "hidden_size_per_layer_input",  # a drafter: it has no default config
    "gemma4_unified_assistant": "layer types",  # a drafter: it reads another model's cache
    "musicgen": "text configs",  # the config names three models
    "musicgen_melody": "text configs",
}
"""Types that transformers cannot build from a config of theirs, and a word of its error."""


@pytest.mark.slow
def test_every_mapped_type_is_built_small() -> None:
    """At most 4 million parameters (two vision towers have tables of positions), finite logits that
    depend on an earlier token."""
    ids = torch.arange(5, 17)[None]
    other = ids.clone()
    other[0, 2] = 50
    failed = {}
    for name in names():
        try:
            model = build(shrink(config_of(name)))
        except Exception as error:
            failed[name] = str(error)
            continue
        with torch.no_grad():
            one, two = (model(input_ids=x, use_cache=False).logits for x in (ids, other))
        assert one.isfinite().all(), name
        assert (one - two)[0, 3:].abs().max() > 1e-3, name
        assert sum(p.numel() for p in model.parameters()) < 4_000_000, name
    assert failed.keys() == NOT_BUILT.keys()
    assert all(word in failed[name] for name, word in NOT_BUILT.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_path_of_a_mechanism_is_exact_or_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cells = measure(config_of(name), tmp_path)
    bad = {n: cell for n, cell in cells.items() if cell.state in ("WRONG", "failed")}
    assert not bad
    if MECHANISMS[name] == REFUSED:
        assert cells["load"].state == "refused" and len(cells["load"].text) > 40
        return
    assert cells["load"].state == "exact"
    packed = cells["shared_prefix"]
    assert packed.text == ("" if MECHANISMS[name] == PACKED else "computed as padded")
    for path in ("greedy", "sampled", "checkpoint", "export", "reward_model"):
        assert cells[path].state == "exact", (path, cells[path])
    refused = {path for path in CELLS if cells[path].state == "refused"}
    assert refused <= ({"lora", "tensor_parallel"} if name in NO_LORA else {"tensor_parallel"})


def test_the_page_was_generated_with_the_pinned_versions() -> None:
    """docs/models.md tells what is true of the libraries that `make test` installs."""
    lock = (ROOT / "constraints" / "cpu.lock.txt").read_text(encoding="utf-8")
    found = json.loads((ROOT / "docs" / "models.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for package, version in found["versions"].items():
        pinned = re.search(rf"^{package}==([^+\s]+)", lock, re.MULTILINE)
        assert pinned is not None and version.partition("+")[0] == pinned[1]
        assert f"{package} {version}" in page
    assert set(names()) <= set(found["rows"]) <= {*names(), *CONFIG_MAPPING}


def test_the_page_has_no_wrong_cell() -> None:
    found = json.loads((ROOT / "docs" / "models.json").read_text(encoding="utf-8"))
    cells = {
        f"{name}: {path}": cell["state"]
        for name, row in found["rows"].items()
        for path, cell in row["cells"].items()
    }
    assert not [where for where, state in cells.items() if state in ("WRONG", "failed")]
    assert {path for row in found["rows"].values() for path in row["cells"]} == set(CELLS)
