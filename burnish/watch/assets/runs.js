"use strict";
// The table of runs, and several runs side by side.
(() => {
  const { make, link, number, duration } = Watch;
  const KINDS = { running: "up", failed: "down", died: "down", silent: "warn" };

  Watch.views.runs = (view, params, scope) => {
    const rows = new Map(), lines = new Map();
    const chosen = new Set(params.getAll("run"));
    let text = params.get("q") ?? "", offset = 0;
    const title = make("h1", {}, "Runs");
    const count = make("span", { class: "count", role: "status" }, "Looking for runs …");
    const compare = make("a", { class: "button", href: "#/" }, "Compare");
    const search = make("input", { type: "search", "aria-label": "Filter runs", placeholder: "Filter by name, job, model or state", value: text });
    search.addEventListener("input", () => { text = search.value; Watch.remember({ q: text }); draw(); });
    const body = make("tbody");
    const heads = ["", "Run", "State", "Changed", "Job", "Model", "Step", "Headline", ""].map((head) => make("th", { scope: "col" }, head || make("span", { class: "hidden" }, "Choose")));
    heads.at(-1).replaceChildren(make("span", { class: "hidden" }, "Course"));
    const table = make("table", { class: "grid runs" }, make("thead", {}, make("tr", {}, heads)), body);
    view.append(title, make("div", { class: "controls free" }, make("div", { class: "grow" }, search), count, compare), make("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, table));

    const choose = (id, on) => {
      if (on) chosen.add(id); else chosen.delete(id);
      Watch.remember({ run: [...chosen] });
      action();
    };
    const action = () => {
      compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Choose runs to compare";
      compare.classList.toggle("off", chosen.size < 2);
      compare.setAttribute("href", chosen.size > 1 ? link("compare", { run: [...chosen] }) : link("runs", { run: [...chosen], q: text }));
    };

    const age = (row) => (row.changed === null || row.error ? "" : `${duration(Date.now() / 1000 - offset - row.changed)} ago`);

    // Cells of known rows are replaced, except for those that can have the focus.
    function put(row) {
      const next = line(row), known = lines.get(row.id);
      if (known) { while (known.children.length > 2) known.lastChild.remove(); known.append(...[...next.children].slice(2)); }
      else lines.set(row.id, next);
      rows.set(row.id, row);
    }

    function line(row) {
      const box = make("input", { type: "checkbox", "aria-label": `Choose ${row.name}` });
      box.checked = chosen.has(row.id);
      box.addEventListener("change", () => choose(row.id, box.checked));
      const name = make("th", { scope: "row" }, make("a", { href: link("run", { run: row.id }) }, row.name));
      if (row.error) return make("tr", {}, make("td", {}, box), name, make("td", { colspan: "7" }, make("span", { class: "pill down" }, "unreadable"), ` ${row.error}`));
      const step = row.step === null ? "" : number(row.step) + (row.planned ? `/${number(row.planned)}` : "");
      const state = make("td", {}, make("span", { class: `pill ${KINDS[row.state] ?? ""}` }, row.state));
      if (row.reason && row.state !== "running") state.append(make("div", { class: "muted reason", title: row.reason }, row.reason));
      const headline = row.headline;
      return make("tr", {}, make("td", {}, box), name, state,
        make("td", { class: "num" }, age(row)),
        make("td", {}, row.job), make("td", { class: "long" }, row.model), make("td", { class: "num" }, step),
        make("td", {}, headline ? [make("div", {}, headline.last), make("div", { class: "muted" }, headline.label)] : ""),
        make("td", {}, headline && headline.spark.length > 1 ? Watch.sparkline(headline.spark, `${headline.label}: from ${headline.first} to ${headline.last}`) : ""));
    }

    const order = (a, b) => (b.state === "running") - (a.state === "running") || (b.changed ?? 0) - (a.changed ?? 0) || a.name.localeCompare(b.name);
    function draw() {
      const words = text.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = [...rows.values()].filter((row) => {
        const all = [row.name, row.job, row.model, row.state, row.reason, row.error].join(" ").toLowerCase();
        return words.every((word) => all.includes(word));
      }).sort(order);
      const nodes = shown.map((row) => lines.get(row.id));
      if (nodes.some((node, i) => body.children[i] !== node) || body.children.length !== nodes.length) {
        const focused = document.activeElement;
        body.replaceChildren(...nodes);
        if (body.contains(focused)) focused.focus();
      }
      if (rows.size) count.textContent = `${number(shown.length)} of ${number(rows.size)} runs`;
    }
    // Rows arrive one by one: the table is drawn at most 20 times per second.
    let drawing = 0;
    const soon = () => { drawing ||= setTimeout(() => { drawing = 0; if (!scope.ended) draw(); }, 50); };

    const sent = new Set(); // runs that this connection has told of
    const drop = (id) => { rows.delete(id); lines.delete(id); chosen.delete(id); sent.delete(id); action(); };
    action();
    scope.listen("runs", {}, {
      open: () => { Watch.live("live"); sent.clear(); },
      lost: () => Watch.live("no connection"),
      on: {
        run: (row) => { sent.add(row.id); put(row); soon(); },
        gone: (id) => { drop(id); soon(); },
        all: (info) => {
          offset = Date.now() / 1000 - info.now;
          Watch.path();
          for (const id of [...rows.keys()]) if (!sent.has(id)) drop(id);
          for (const [id, row] of rows) if (!row.error) lines.get(id).children[3].textContent = age(row);
          draw();
          if (!info.runs) count.textContent = `${info.folder} contains no run yet`;
        },
      },
    });
    Watch.path();
  };

  // ---- several runs ---------------------------------------------------------------------------

  function smoothed(values, window) {
    if (window <= 1) return values;
    const half = Math.floor(window / 2);
    return values.map((_, i) => {
      const part = values.slice(Math.max(0, i - half), i + half + 1);
      return part.reduce((sum, value) => sum + value, 0) / part.length;
    });
  }

  // One axis for curves that were measured at different places.
  function joined(data, window) {
    const places = [...new Set(data.runs.flatMap((run) => run.x))].sort((a, b) => a - b);
    const at = new Map(places.map((place, i) => [place, i]));
    const lines = data.runs.map((run) => {
      const values = new Array(places.length).fill(null);
      smoothed(run.values, window).forEach((value, i) => { values[at.get(run.x[i])] = value; });
      return { name: run.name, metric: data.metric, values };
    });
    const labels = { step: "step", tokens: "tokens", time: "seconds" };
    const note = data.runs.some((run) => run.mean_of > 1) ? `each point is the mean of up to ${Math.max(...data.runs.map((run) => run.mean_of))} entries` : "";
    return { title: data.metric, unit: /_frac$|pass@|accuracy$/.test(data.metric) ? "fraction" : /_bytes$/.test(data.metric) ? "bytes" : "", note, log: false, bars: false, x: places, xLabel: labels[data.x], lines };
  }

  Watch.views.compare = async (view, params, scope) => {
    const runs = params.getAll("run");
    Watch.path(["Compare"]);
    const metric = make("input", { list: "metrics", id: "metric", value: params.get("metric") ?? "", autocomplete: "off" });
    const names = make("datalist", { id: "metrics" });
    const axis = make("select", { id: "axis" }, ["step", "tokens", "time"].map((name) => make("option", { value: name, selected: name === (params.get("x") ?? "step") }, name)));
    const window = make("input", { type: "range", id: "smooth", min: 1, max: 51, step: 2, value: params.get("smooth") ?? 1 });
    const card = make("div");
    const labeled = (text, control) => make("label", { for: control.id }, `${text} `, control);
    const differences = make("section", {}, make("h2", {}, "Recipes"));
    view.append(make("h1", {}, `${runs.length} runs`),
      make("div", { class: "controls free" }, labeled("Metric", metric), names, labeled("By", axis), labeled("Smoothing", window)), card, differences);
    let drawn = null, data = null, asked = 0;
    const draw = () => {
      if (!data) return;
      const chart = joined(data, Number(window.value));
      if (drawn && chart.x.length) { drawn.update(chart); return; }
      drawn?.destroy();
      drawn = chart.x.length ? BurnishCharts.card(chart, {}) : null;
      card.replaceChildren(drawn ? drawn.element : make("p", { class: "none" }, "None of these runs has this metric."));
    };
    const load = async () => {
      const query = new URLSearchParams({ metric: metric.value, x: axis.value });
      for (const run of runs) query.append("run", run);
      const mine = ++asked;
      try {
        const reply = await Watch.get("curves", query);
        if (scope.ended || mine !== asked) return;
        data = reply;
        if (names.children.length !== data.metrics.length) names.replaceChildren(...data.metrics.map((name) => make("option", { value: name })));
        if (!metric.value) metric.value = data.metric;
        draw();
      } catch (error) {
        if (scope.ended || mine !== asked) return;
        drawn?.destroy();
        drawn = null;
        card.replaceChildren(Watch.problem(error.message));
      }
    };
    const changed = () => { Watch.remember({ metric: metric.value, x: axis.value }); load(); };
    metric.addEventListener("change", changed);
    axis.addEventListener("change", changed);
    window.addEventListener("input", () => { Watch.remember({ smooth: window.value === "1" ? "" : window.value }); draw(); });
    scope.onEnd(() => drawn?.destroy());
    const timer = setInterval(() => { if (!document.hidden) load(); }, 5000);
    scope.onEnd(() => clearInterval(timer));
    await load();
    try {
      const query = new URLSearchParams();
      for (const run of runs) query.append("run", run);
      const { names: heads, keys } = await Watch.get("compare", query);
      if (scope.ended) return;
      const cells = keys.map(([key, ...values]) => make("tr", {}, make("th", { scope: "row" }, key), values.map((value) => make("td", { class: "mono" }, value))));
      differences.append(keys.length
        ? make("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Keys that differ" }, make("table", { class: "grid" }, make("thead", {}, make("tr", {}, ["Key", ...heads].map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, cells)))
        : make("p", {}, "The recipes are equal."));
    } catch (error) {
      differences.append(Watch.problem(error.message));
    }
  };
})();
