"""The page of runs in Chromium: views, live updates, links, keys, widths, themes, hostile texts."""

from __future__ import annotations

import json
import re
import shutil
from importlib import resources

import pytest
from watched_runs import log_step, open_view, serving, write_run, write_samples_of

from burnish.observe.metrics import MetricsLog

WIDTHS = ((1400, "light"), (360, "dark"))
VIEWS = {
    "runs": "",
    "curves": "#/run?run=first",
    "samples": "#/run?run=first&tab=steps",
    "time": "#/run?run=first&tab=time",
    "memory": "#/run?run=first&tab=memory",
    "recipe": "#/run?run=first&tab=recipe",
    "warnings": "#/run?run=first&tab=warnings",
    "step": "#/step?run=first&step=7",
    "sorted step": "#/step?run=first&step=7&sort=reward&desc=1",
    "sample": "#/sample?run=first&step=7&sample=train%3A0%407%2F0",
    "search": "#/search?run=first&text=step+5",
    "compare": "#/compare?run=first&run=group%2Fsecond&metric=train%2Floss",
}
AXE = resources.files("axe_core_python") / "axe.min.js"
_TOO_WIDE = """() => [...document.querySelectorAll('.card, .tile, main')]
  .filter((card) => card.scrollWidth > card.clientWidth + 1)
  .filter((card) => !/auto|scroll/.test(getComputedStyle(card).overflowX))
  .map((card) => card.className + ': ' + card.textContent.slice(0, 80))"""


@pytest.mark.parametrize(("width", "theme"), WIDTHS)
def test_every_view_fits_and_is_accessible(page, served, width, theme):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme)
    for name, address in VIEWS.items():
        open_view(page, served, address)
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(_TOO_WIDE) == [], name
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        seen = [(v["id"], [node["html"][:120] for node in v["nodes"][:3]]) for v in found]
        assert seen == [], (name, width)


def test_runs_are_filtered_chosen_and_compared(page, served):
    open_view(page, served)
    page.wait_for_selector("text=5 of 5 runs")
    page.get_by_label("Filter runs").fill("second finished")
    page.wait_for_selector("text=1 of 5 runs")
    assert page.locator("tbody tr").count() == 1
    page.get_by_label("Filter runs").fill("")
    page.get_by_label("Choose first").check()
    page.get_by_label("Choose group/second").check()
    open_view(page, served, page.evaluate("location.hash"))  # the address has the choice
    page.get_by_role("link", name="Compare 2 runs").click()
    page.wait_for_selector("text=train.lr")
    page.get_by_label("Metric").fill("train/loss")
    page.get_by_label("Metric").press("Enter")
    page.get_by_label("By").select_option("tokens")
    page.wait_for_selector("figcaption:has-text('train/loss')")
    assert "metric=train%2Floss&x=tokens" in page.evaluate("location.hash")


def test_a_step_is_filtered_and_sorted_and_the_link_says_so(page, served):
    open_view(page, served, "#/step?run=first&step=7")
    assert page.locator(".group").count() == 2
    page.get_by_label("Filter").fill("reward>0.5")
    page.wait_for_selector("text=2 of 4 samples")
    page.get_by_role("button", name="Tokens").first.click()
    page.wait_for_selector("[aria-sort=descending]")
    address = page.evaluate("location.hash")
    page.get_by_label("Filter").fill("reward>many")
    page.wait_for_selector("[role=alert]:has-text('many is not a number')")
    open_view(page, served, address)
    assert page.get_by_label("Filter").input_value() == "reward>0.5"
    assert [int(t) for t in page.locator("td:nth-child(4)").all_inner_texts()] == [13, 11]
    page.get_by_role("link", name="8 →").click()
    page.wait_for_selector("h1:has-text('Step 8')")


def test_tokens_are_colored_and_read_with_the_keys(page, served):
    open_view(page, served, VIEWS["sample"])
    tokens = page.locator(".token")
    assert tokens.all_inner_texts()[:3] == ["2", "+", "<b>"]
    assert "3 earlier tokens are not kept" in page.locator(".token-text").inner_text()
    colored = "all => all.map((token) => /hot|cold/.test(token.className))"
    only_the_third_has_both = [False, False, True, False]
    assert tokens.evaluate_all(colored) == only_the_third_has_both
    page.locator(".token-text").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    facts = page.locator(".token-facts").inner_text()
    assert re.search(r"Trainer − sampler log-prob\s+0.25", facts)
    page.get_by_label("Color").select_option("mask")
    assert "color=mask" in page.evaluate("location.hash")
    assert tokens.evaluate_all(colored) == [False, False, True, True]
    page.get_by_role("button", name="Find this prompt").click()
    page.wait_for_selector("text=120 samples; 60 of 60 files")


def test_what_a_resume_changed_is_in_the_recipe(page, served):
    open_view(page, served, VIEWS["recipe"])
    shown = page.locator("main").inner_text()
    assert "Resumed after step 30 with" in shown and "train.lr was 0.1, now <b>0.2</b>" in shown


def test_a_click_on_a_point_opens_its_step(page, served):
    open_view(page, served, VIEWS["curves"])
    plot = page.locator("figure:has-text('Mean reward') .u-over").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("[data-ready=step]")
    assert re.search(r"step=(29|30|31)\b", page.evaluate("location.hash"))


def test_a_run_is_followed_until_it_is_removed(page, tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    log = MetricsLog(run)
    with serving(tmp_path) as address:
        open_view(page, address, "#/run?run=run")
        steps = page.locator(".tile:has-text('Steps') .value")
        assert steps.inner_text() == "2"
        for step in range(3, 8):
            log_step(log, step)
            write_samples_of(run, step)
        page.wait_for_selector(".tile:has-text('Steps') .value:text-is('7')")
        page.get_by_role("link", name="Samples").click()
        page.wait_for_selector("text=7 steps with samples")
        log.close()
        shutil.rmtree(run)
        page.wait_for_selector("[role=alert]:has-text('there is no run')")
        page.get_by_role("link", name="All runs").click()
        page.wait_for_selector("text=contains no run yet")


def test_a_hidden_page_shows_what_it_missed(page, tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    write_run(tmp_path / "other", num_steps=1)
    hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    with serving(tmp_path) as address:
        open_view(page, address, "#/run?run=run")
        steps = page.locator(".tile:has-text('Steps') .value")
        page.evaluate(hide.format("true"))
        log = MetricsLog(run)
        log_step(log, 3)
        log.close()
        page.wait_for_timeout(500)
        assert steps.inner_text() == "2"
        page.evaluate(hide.format("false"))
        page.wait_for_selector(".tile:has-text('Steps') .value:text-is('3')")
        open_view(page, address)
        page.wait_for_selector("text=2 of 2 runs")
        page.get_by_role("link", name="run", exact=True).focus()
        page.evaluate(hide.format("true"))
        shutil.rmtree(tmp_path / "other")
        page.evaluate(hide.format("false"))
        page.wait_for_selector("text=1 of 1 runs")
        assert page.evaluate("document.activeElement.textContent") == "run"


def test_the_token_is_asked_for_and_the_link_is_kept(page, runs):
    with serving(runs, token="secret-token") as address:
        page.goto(f"{address}/#/step?run=first&step=7")
        page.get_by_label("Token").fill("secret-token")
        page.get_by_role("button", name="Open").click()
        page.wait_for_selector("h1:has-text('Step 7')")


def test_hostile_texts_stay_texts(page, served):
    for address in (
        "#/run?run=hostile",
        "#/run?run=hostile&tab=recipe",
        "#/run?run=hostile&tab=warnings",
        "#/step?run=hostile&step=1",
        "#/sample?run=hostile&step=1&sample=train%3A0%401%2F0",
        "#/search?run=hostile&text=onload",
        "#/search?run=%3Cscript%3E&text=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E",
        "#/nothing/<script>alert(1)</script>?run=<b>",
        "report?run=hostile",
        "plain",
    ):
        if address.startswith("#"):
            if "script%3E" in address:
                continue
            open_view(page, served, address)
        else:
            page.goto(f"{served}/{address}")
        assert page.evaluate("window.hacked") is None, address
        assert page.locator("main img, main b:text-is('bold'), svg[onload]").count() == 0, address
    open_view(page, served, "#/step?run=hostile&step=1")
    assert "<script>window.hacked = 1</script>" in page.locator("header .prompt").first.inner_text()


def test_the_page_can_be_used_with_the_keys_alone(page, served):
    open_view(page, served)
    page.wait_for_selector("text=5 of 5 runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "first":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-ready=run]")


def test_without_scripts_the_runs_and_reports_are_readable(browser, served):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(served)
    page.get_by_role("link", name="Runs and their reports without scripts").click()
    page.get_by_role("link", name="first", exact=True).click()
    assert "What is 2 + 2?" in page.locator("body").inner_text()
    context.close()


def test_a_server_that_ended_is_named(browser, tmp_path):
    write_run(tmp_path / "run", num_steps=2)
    context = browser.new_context()
    page = context.new_page()
    with serving(tmp_path) as address:
        open_view(page, address, "#/step?run=run&step=1")
    page.get_by_label("Filter").fill("reward>0.5")
    page.wait_for_selector("[role=alert]:has-text('Is burnish watch still running?')")
    context.close()


def test_json_of_a_hostile_run_is_well_formed(served, page):
    page.goto(f"{served}/api/step?run=hostile&step=1")
    rows = json.loads(page.locator("body").inner_text())["rows"]
    assert len(rows) == 4 and all(len(row["response"]) < 500 for row in rows)
