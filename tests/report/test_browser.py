"""The page in a browser: charts and samples are drawn without errors, nothing leaves its card, and
without scripts every number can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chromium import chromium
from report_page import HOSTILE

from burnish.observe.metrics import MetricsLog
from burnish.observe.resumes import record_resume
from burnish.observe.samples import write_samples
from burnish.report.build import build_report
from burnish.report.number_text import format_number
from burnish.types import Group, Prompt, Sample


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 noisy steps with hostile names and texts, a constant, bytes and a resume."""
    run_dir: Path = tmp_path_factory.mktemp("run")
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"job": "rl", "note": HOSTILE}))
    log = MetricsLog(run_dir)
    for step in range(1, 61):
        line = {
            "reward/mean": step / 60 + 0.3 * math.sin(7 * step), "train/lr": 1e-5,
            f"reward/{HOSTILE}": float(step), "train/clip_frac": step % 5 / 100,
            "train/loss_scale": 2.0 ** (16 - step // 20), "memory/peak_rss_bytes": step * 2.0**27,
            "time/rollout_s": 2.0, "time/train_s": 1 + step % 3, "time/step_s": 6.0, "odd/x": step,
        }  # fmt: skip
        if step % 20 == 0:
            line |= {"eval/loss": 1.0 / step}
        log.log(step, line | {"train/loss": 2.0 / step})
    log.close()
    prompt = Prompt("p", (1,), HOSTILE, label=HOSTILE)
    sample = Sample("p/0", "p", 1, (1,), (2,), (0.0,), (True,), (0,), HOSTILE, "stop", 0.5)
    write_samples(run_dir, 60, [Group(1, prompt, (sample,))], {"p/0": 1.5}, limit=8)
    record_resume(run_dir, 30, {"train.lr": "was 0.1, now 0.2"})
    return build_report(run_dir)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_the_page_draws_everything_inside_its_cards(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append("a payload ran"))
    page.goto(report.as_uri())
    visible = page.locator("figure.chart:visible").count()
    assert errors == [] and visible == 6
    assert page.locator("figure.chart:visible canvas").count() == visible
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".card *, .tile *")].filter((node) => {
          const inner = node.getBoundingClientRect();
          const outer = node.closest(".scroll, .card, .tile").getBoundingClientRect();
          return !node.closest(".scroll *, pre *") && inner.width && inner.right > outer.right + 1;
        }).map((node) => node.outerHTML.slice(0, 100))"""
    )
    assert outside == []
    assert HOSTILE in page.locator(".sample").first.inner_text()
    page.locator("summary", has_text="More metrics").click()
    page.wait_for_function("document.querySelector('#more-metrics canvas')?.clientWidth > 100")
    page.close()


def test_a_chart_has_the_value_at_the_cursor_and_arrow_keys_move_it(
    browser: Any, report: Path
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 800})
    page.goto(report.as_uri())
    card = page.locator("figure.chart", has_text="peak rss")
    assert card.locator(".legend").inner_text().split() == [
        "step",
        "60",
        "peak",
        "rss",
        "7.5",
        "GiB",
    ]
    plot = card.locator("[role=slider]")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert plot.get_attribute("aria-valuetext") == "step 59, peak rss 7.375 GiB"
    page.keyboard.press("Home")
    assert plot.get_attribute("aria-valuetext") == "step 1, peak rss 128 MiB"
    other = page.locator("figure.chart", has_text="Loss scale").locator("[role=slider]")
    assert other.get_attribute("aria-valuenow") == "1", "cursors of all charts move together"
    page.close()


def test_a_step_without_a_measurement_is_not_a_zero(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    values = page.evaluate("""() => {
      const chart = BurnishCharts.read(document.querySelector("table[data-title=Loss]"));
      return chart.lines.find((line) => line.name === "eval").values;
    }""")
    assert len(values) == 60 and [v for v in values if v is not None] == [0.05, 0.025, 0.0166667]
    page.close()


def test_a_live_chart_is_updated_and_becomes_a_text_when_it_is_constant(
    browser: Any, report: Path
) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    drawn = page.evaluate(
        """() => {
          const element = document.createElement("div");
          document.querySelector("main").prepend(element);
          const chart = (values) => ({
            title: "T", unit: "bytes", x: [...values.keys()], lines: [{name: "a", values}],
          });
          const live = BurnishCharts.draw(element, chart([0]));
          const texts = [element.textContent];
          for (const values of [[0, 2 ** 20], [0, 2 ** 20, null, 2 ** 21], [3, 3, 3]]) {
            live.update(chart(values));
            texts.push(element.textContent);
          }
          live.destroy();
          return [...texts, element.childNodes.length];
        }"""
    )
    texts = ["0 B at step 0", "step 1a 1 MiB", "step 3a 2 MiB", "constant: 3 B over 3 steps"]
    assert drawn == [*texts, 0]
    values = [0.0, 1e-5, 1234.5, 65536.0, 1.5e12, -0.25]
    for unit in ("", "fraction", "bytes"):
        shown = page.evaluate(
            "([v, unit]) => v.map((x) => BurnishCharts.format(x, unit))", [values, unit]
        )
        assert shown == [format_number(value, unit) for value in values]
    page.close()


def test_without_scripts_the_tables_are_open_and_samples_are_text(
    browser: Any, report: Path
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("figure.chart table:visible").count() == 6
    assert page.locator("figure.chart", has_text="Clipped tokens").locator("tr").count() == 61
    assert HOSTILE in page.locator("#samples article").inner_text()
    assert "was 0.1, now 0.2" in page.locator("#config").inner_text()
    context.close()
