"use strict";
// One run: curves, steps, time, memory, recipe, warnings.
(() => {
  const { make, link, number, pill } = Watch;
  const keyOf = (chart) => chart.lines.map((line) => line.metric).join(" ");
  const TABS = [["curves", "Curves"], ["steps", "Samples"], ["time", "Time"], ["memory", "Memory"], ["recipe", "Recipe"], ["warnings", "Warnings"]];
  const KINDS = { running: "up", failed: "down", died: "down", silent: "warn" };

  Watch.heading = (run, tab, content = null) => {
    const form = make("form", { class: "find", role: "search" },
      make("input", { type: "search", "aria-label": "Search all samples of the run", placeholder: "Search all samples", name: "text" }), make("button", { type: "submit" }, "Search"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = form.elements.text.value.trim();
      if (text) location.hash = link("search", { run, text });
    });
    const tabs = TABS.map(([name, title]) => make("a", { href: link("run", { run, tab: name === "curves" ? "" : name }), "aria-current": name === tab ? "page" : null }, title));
    tabs.push(make("a", { href: `/report?run=${encodeURIComponent(run)}` }, "Report"));
    return make("div", { class: "heading" }, content, make("div", { class: "tabs" }, make("nav", { "aria-label": "Views of the run" }, tabs), form));
  };

  Watch.runName = (run) => { try { return decodeURIComponent(run); } catch { return run; } };

  Watch.views.run = async (view, params, scope) => {
    const run = params.get("run") ?? "", tab = params.get("tab") ?? "curves";
    Watch.path([Watch.runName(run)]);
    const facts = make("div", { class: "run-facts" }), body = make("div", { class: "tab" });
    view.append(Watch.heading(run, tab, facts), body);
    const show = TABBED[tab] ?? TABBED.curves;
    const state = { run, params, scope, body, charts: new Map() };
    let busy = false, again = false;
    const refresh = async () => {
      if (busy) { again = true; return; }
      busy = true;
      try {
        const page = await Watch.get("run", { run });
        if (scope.ended) return;
        facts.replaceChildren(...factsOf(page));
        if (state.problem) { state.problem = false; state.body.replaceChildren(); state.signature = state.known = state.lanes = null; }
        await show(state, page);
      } catch (error) {
        state.problem = true;
        if (!scope.ended) body.replaceChildren(Watch.problem(error.message));
      } finally {
        busy = false;
        if (again && !scope.ended) { again = false; refresh(); }
      }
    };
    scope.onEnd(() => { for (const chart of state.charts.values()) chart.handle?.destroy(); });
    await refresh();
    if (scope.ended) return;
    scope.listen("events", { run }, {
      open: () => Watch.live("live"),
      lost: () => Watch.live("no connection"),
      on: {
        watching: refresh, // a change may have come before the connection, which a hidden tab closes
        changed: refresh,
        problem: (text) => { state.problem = true; body.replaceChildren(Watch.problem(text)); },
        gone: (text) => { Watch.live(""); view.replaceChildren(Watch.problem(text), make("p", {}, make("a", { href: "#/" }, "All runs"))); },
      },
    });
  };

  function factsOf(page) {
    const state = [pill(page.state.kind, KINDS[page.state.kind] ?? "")];
    if (page.state.reason && page.state.kind !== "running") state.push(make("span", { class: "muted" }, ` ${page.state.reason}`));
    const facts = page.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    return [make("h1", {}, page.title), make("dl", { class: "facts" }, make("div", {}, make("dt", {}, page.job), make("dd", {}, state)), facts)];
  }

  const TABBED = {
    curves(state, page) {
      const signature = JSON.stringify(page.sections.map((section) => [section.title, section.charts.map(keyOf)]));
      if (state.signature !== signature) build(state, page);
      state.signature = signature;
      fillTiles(state.tiles, page);
      const marks = page.resumes.map((resume) => ({ x: resume.step, label: "resumed" }));
      for (const section of page.sections) {
        for (const chart of section.charts) {
          chart.marks = marks;
          const known = state.charts.get(keyOf(chart));
          if (known.handle) known.handle.update(chart);
          known.chart = chart;
        }
        state.constants.get(section.title).replaceChildren(...section.constants.map((line) => make("li", {}, make("b", {}, line.title), ` ${line.value} `, make("span", { class: "muted" }, `${line.unit} ${line.note}`))));
      }
    },
    async steps(state) {
      const { steps } = await Watch.get("steps", { run: state.run });
      if (state.scope.ended) return;
      const key = JSON.stringify(steps.length && steps[0]);
      if (state.known === `${steps.length} ${key}`) return;
      state.known = `${steps.length} ${key}`;
      state.body.replaceChildren(...stepList(state.run, steps));
    },
    async time(state, page) {
      const data = await Watch.get("time", { run: state.run });
      if (!state.scope.ended) Watch.drawTime(state, data, page.times);
    },
    memory(state, page) {
      if (!page.memory) { state.body.replaceChildren(make("p", { class: "none" }, "Memory is measured while the run works; the table is written when it ends.")); return; }
      const { heads, rows, note } = page.memory;
      const lines = rows.map(([role, phase, cells]) => make("tr", {}, make("th", { scope: "row" }, role), make("td", {}, phase), cells.map((cell) => make("td", { class: "num" }, cell))));
      state.body.replaceChildren(make("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Memory by phase" }, make("table", { class: "grid" }, make("thead", {}, make("tr", {}, ["Process", "Phase", ...heads].map((head, i) => make("th", { scope: "col", class: i > 1 ? "num" : null }, head)))), make("tbody", {}, lines))), make("p", { class: "hint" }, note));
    },
    recipe(state, page) {
      const changes = page.resumes.filter((resume) => Object.keys(resume.changes).length).map((resume) => make("li", {}, make("b", {}, `Resumed after step ${number(resume.step)} with`), make("ul", {}, Object.entries(resume.changes).map(([key, change]) => make("li", {}, make("code", {}, key), ` ${change}`)))));
      state.body.replaceChildren(changes.length ? make("ul", { class: "card warnings" }, changes) : "", page.recipe ? make("pre", { class: "card", tabindex: "0", "aria-label": "Recipe" }, page.recipe) : make("p", { class: "none" }, "The folder has no recipe."));
    },
    warnings(state, page) {
      const lines = page.warnings.map((warning) => make("li", {}, make("pre", {}, warning.text), warning.count > 1 ? make("span", { class: "muted" }, `${number(warning.count)} times`) : null));
      state.body.replaceChildren(lines.length ? make("ul", { class: "card warnings" }, lines) : make("p", { class: "none" }, "No warning so far."));
    },
  };

  function fillTiles(tiles, page) {
    tiles.replaceChildren(...page.tiles.map((tile) => make("div", { class: "tile" }, make("p", { class: "label" }, tile.label), make("p", { class: "value" }, tile.value), make("p", { class: "note" }, tile.note))));
  }

  function build(state, page) {
    for (const chart of state.charts.values()) chart.handle?.destroy();
    state.charts.clear();
    state.constants = new Map();
    state.tiles = make("section", { class: "tiles", "aria-label": "Headline numbers" });
    state.body.replaceChildren(state.tiles);
    if (!page.num_steps) state.body.append(make("p", { class: "none" }, "No step has been logged yet."));
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); start(entry.target); }
    }, { rootMargin: "600px" });
    state.scope.onEnd(() => seen.disconnect());
    const start = (box) => {
      const known = state.charts.get(box.dataset.key);
      if (!known || known.handle) return;
      const onPoint = (x) => { location.hash = link("step", { run: state.run, step: Math.round(x) }); };
      known.handle = BurnishCharts.card(known.chart, { onPoint, sync: `run ${state.run}` });
      box.replaceWith(known.handle.element);
    };
    for (const section of page.sections) {
      const cards = section.charts.map((chart) => {
        const key = keyOf(chart);
        const box = make("figure", { "data-key": key, class: "card waiting" }, make("figcaption", {}, make("b", {}, chart.title)));
        state.charts.set(key, { chart, handle: null });
        seen.observe(box); // charts far below are drawn when they come near
        return box;
      });
      const constants = make("ul", { class: "constants" });
      state.constants.set(section.title, constants);
      const content = [make("div", { class: "cards" }, cards), constants];
      state.body.append(section.folded
        ? make("details", { class: "section" }, make("summary", {}, make("h2", {}, section.title), make("span", {}, `${section.charts.length} charts`)), content)
        : make("section", { class: "section" }, make("h2", {}, section.title), content));
    }
  }

  function stepList(run, steps) {
    if (!steps.length) return [make("p", { class: "none" }, "The run has kept no samples yet (observe.samples_per_step says how many it keeps).")];
    const splits = [...new Set(steps.flatMap(([, names]) => names))].sort((a, b) => (a !== "train") - (b !== "train") || a.localeCompare(b));
    const go = make("form", { class: "controls free" }, make("label", { for: "go" }, "Go to step "), make("input", { id: "go", type: "number", min: steps.at(-1)[0], max: steps[0][0], value: steps[0][0] }), make("button", { type: "submit" }, "Open"), make("span", { class: "count" }, `${number(steps.length)} steps with samples`));
    go.addEventListener("submit", (event) => {
      event.preventDefault();
      const wanted = Number(go.querySelector("input").value);
      const [step, names] = steps.reduce((best, entry) => (Math.abs(entry[0] - wanted) < Math.abs(best[0] - wanted) ? entry : best));
      location.hash = link("step", { run, step, split: names.includes("train") ? "" : names[0] });
    });
    const lists = splits.map((split) => {
      const of = steps.filter(([, names]) => names.includes(split));
      const shown = of.slice(0, 300).map(([step]) => make("li", {}, make("a", { href: link("step", { run, step, split: split === "train" ? "" : split }) }, number(step))));
      if (of.length > shown.length) shown.push(make("li", { class: "muted" }, `and ${number(of.length - shown.length)} older ones`));
      return make("section", { class: "section" }, make("h2", {}, split), make("ul", { class: "numbers" }, shown));
    });
    return [go, ...lists];
  }
})();
