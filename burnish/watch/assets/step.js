"use strict";
// The samples of one step, by group or sorted by a column, and the search over all steps.
(() => {
  const { make, link, number, signed, tone, pill } = Watch;
  const HEADS = { reward: "Reward", advantage: "Advantage", tokens: "Tokens", finish: "End", version: "Weights", group: "Group", sample: "Sample", dropped: "Left out" };
  const SHOWN = ["reward", "advantage", "tokens", "finish", "version"];

  const sampleLink = (run, row) => link("sample", { run, step: row.step, split: row.split === "train" ? "" : row.split, sample: row.sample });
  const rewardTone = (rows) => {
    const rewards = rows.map((row) => row.reward).filter((x) => x !== null);
    const low = Math.min(...rewards), high = Math.max(...rewards);
    return (x) => (x === null || low === high ? "" : tone(x - (low + high) / 2));
  };

  function cell(row, column, color) {
    const value = column.startsWith("parts.") ? row.parts[column.slice(6)] : row[column];
    if (value === null || value === undefined) return "";
    if (column === "reward") return make("span", { class: `pill${color(value)}` }, number(value));
    if (column === "advantage") return make("span", { class: `pill${tone(value)}` }, signed(value));
    return typeof value === "number" ? number(value) : value;
  }

  function line(run, row, columns, color) {
    const text = make("a", { class: "text", href: sampleLink(run, row) }, row.response || "(empty)");
    const first = make("th", { scope: "row" }, text);
    if (row.is_episode) first.append(make("div", { class: "muted" }, "conversation"));
    if (row.dropped) first.append(make("div", { class: "problem" }, `left out: ${row.dropped}`));
    return make("tr", {}, first, columns.map((column) => make("td", { class: column === "finish" ? null : "num" }, cell(row, column, color))));
  }

  Watch.views.step = async (view, params, scope) => {
    const run = params.get("run") ?? "", step = Number(params.get("step")), split = params.get("split") || "train";
    Watch.path([Watch.runName(run), link("run", { run })], ["Samples", link("run", { run, tab: "steps" })], [`Step ${number(step)}${split === "train" ? "" : `, ${split}`}`]);
    const state = { q: params.get("q") ?? "", sort: params.get("sort") ?? "", desc: params.get("desc") === "1", page: Number(params.get("page") ?? 0) };
    const search = make("input", { type: "search", "aria-label": "Filter", placeholder: "Filter, such as: reward<0.5 finish=length some words", value: state.q, title: "Conditions on columns (reward, advantage, tokens, finish, version, group, parts.NAME; < <= = != >= >) and words, which are searched in prompts, responses, labels and conversations" });
    const splits = make("div", { class: "switch", role: "group", "aria-label": "Split" });
    const count = make("span", { class: "count", role: "status" });
    const body = make("div", { class: "tab" }), pages = make("div", { class: "pages" });
    const other = make("span", { class: "neighbors" });
    view.append(Watch.heading(run, "steps", make("h1", {}, `Step ${number(step)}`)),
      make("div", { class: "controls free" }, splits, make("div", { class: "grow" }, search), count, other), body, pages);

    const change = (changes) => { Object.assign(state, { page: 0 }, changes); Watch.remember({ q: state.q, sort: state.sort, desc: state.desc ? "1" : "", page: state.page || "" }); load(); };
    const typed = Watch.later((text) => change({ q: text }), 150);
    search.addEventListener("input", () => typed(search.value));
    let asked = 0;

    async function load() {
      const mine = ++asked;
      try {
        const data = await Watch.get("step", { run, step, split, q: state.q, sort: state.sort, desc: state.desc ? "1" : "", page: state.page });
        if (!scope.ended && mine === asked) draw(data);
      } catch (error) {
        if (!scope.ended && mine === asked) { body.replaceChildren(Watch.problem(error.message)); pages.replaceChildren(); }
      }
    }

    function head(column) {
      const sorted = state.sort === column;
      const button = make("button", { type: "button", onclick: () => change(sorted && !state.desc ? { sort: "", desc: false } : { sort: column, desc: !sorted || !state.desc }) },
        (HEADS[column] ?? column.replace("parts.", "")) + (sorted ? (state.desc ? " ↓" : " ↑") : ""));
      return make("th", { scope: "col", class: column === "finish" ? null : "num", "aria-sort": sorted ? (state.desc ? "descending" : "ascending") : null }, button);
    }

    function table(rows, columns, color, label) {
      return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, make("table", { class: "grid samples-of-step" },
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Response"), columns.map(head))), make("tbody", {}, rows.map((row) => line(run, row, columns, color)))));
    }

    function draw(data) {
      const parts = data.columns.filter((column) => column.startsWith("parts."));
      const columns = [...SHOWN.filter((column) => data.rows.some((row) => row[column] !== null)), ...(parts.length > 1 ? parts : [])];
      if (state.sort && !columns.includes(state.sort) && data.columns.includes(state.sort)) columns.push(state.sort);
      const color = rewardTone(data.rows);
      count.textContent = `${number(data.found)} of ${number(data.total)} samples`;
      splits.replaceChildren(...data.splits.map((name) => make("a", { href: link("step", { run, step, split: name === "train" ? "" : name }), "aria-current": name === split ? "page" : null }, name)));
      splits.hidden = data.splits.length < 2;
      if (!data.rows.length) body.replaceChildren(make("p", { class: "none" }, "No sample matches."));
      else if (state.sort) body.replaceChildren(make("div", { class: "card" }, table(data.rows, columns, color, "Samples")));
      else {
        const groups = new Map();
        for (const row of data.rows) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
        body.replaceChildren(...[...groups].map(([id, rows]) => {
          const group = data.groups[id], count = group.samples;
          const facts = [
            rows.length < count ? `${rows.length} of ${count} samples` : `${count} sample${count === 1 ? "" : "s"}`,
            group.mean_reward === null ? null : `mean reward ${number(group.mean_reward)}`,
            group.is_equal ? "equal rewards: no signal" : null,
          ];
          return make("section", { class: "card group" }, make("header", {}, make("div", { class: "text prompt" }, rows[0].prompt),
            rows[0].label === null ? null : make("div", { class: "wanted" }, "label ", make("b", {}, rows[0].label)),
            make("div", { class: "muted" }, [`group ${id}`, ...facts.filter(Boolean)].join(" · "))), table(rows, columns, color, `Group ${id}`));
        }));
      }
      pages.hidden = data.pages < 2;
      const to = (page) => change({ page });
      pages.replaceChildren(make("button", { type: "button", disabled: data.page === 0, onclick: () => to(data.page - 1) }, "Back"), make("span", {}, `Page ${data.page + 1} of ${data.pages}`), make("button", { type: "button", disabled: data.page >= data.pages - 1, onclick: () => to(data.page + 1) }, "Next"));
    }

    await load();
    try {
      const { steps } = await Watch.get("steps", { run });
      const of = steps.filter(([, names]) => names.includes(split)).map(([number_]) => number_).reverse();
      const before = of.filter((x) => x < step).at(-1), after = of.find((x) => x > step);
      const to = (x, text, key) => (x === undefined ? null : make("a", { href: link("step", { run, step: x, split: split === "train" ? "" : split, q: state.q, sort: state.sort, desc: state.desc ? "1" : "" }), rel: key }, text));
      if (!scope.ended) other.replaceChildren(...[to(before, `← ${before}`, "prev"), to(after, `${after} →`, "next")].filter(Boolean));
    } catch { /* the table above shows the problem */ }
  };

  // ---- search ---------------------------------------------------------------------------------

  Watch.hitCard = (run, hit) => make("li", { class: "card hit" }, make("a", { class: "text", href: sampleLink(run, hit) }, hit.excerpt || hit.response || "(empty)"),
    make("div", { class: "muted" }, [`step ${number(hit.step)}`, hit.split, hit.reward === null ? null : `reward ${number(hit.reward)}`, hit.tokens === null ? null : `${number(hit.tokens)} tokens`].filter(Boolean).join(" · ")));

  Watch.views.search = (view, params, scope) => {
    const run = params.get("run") ?? "", text = params.get("text") ?? "";
    Watch.path([Watch.runName(run), link("run", { run })], ["Search"]);
    const bar = make("progress", { max: 1, value: 0, "aria-label": "Share of the steps that was searched" }), note = make("p", { role: "status" }, "Searching …");
    const list = make("ul", { class: "hits" }), bad = make("div");
    view.append(Watch.heading(run, "steps", make("h1", {}, text)), make("div", { class: "controls free" }, bar, note), bad, list);
    let count = 0;
    const close = scope.listen("search", { run, text }, {
      once: true,
      lost: () => { close?.(); if (!view.dataset.done) note.textContent = "The search failed: the run cannot be read, or the server does not answer."; },
      on: {
        hits: (part) => {
          list.append(...part.hits.map((hit) => Watch.hitCard(run, hit)));
          count += part.hits.length;
          for (const name of part.unreadable ?? []) bad.append(Watch.problem(`${name} cannot be read and was left out.`));
          bar.max = Math.max(1, part.files);
          bar.value = part.files ? part.done : 1;
          const found = `${number(count)} hit${count === 1 ? "" : "s"}`;
          note.textContent = part.end === "complete" ? `${found} in ${number(part.files)} files` : part.end === "limit" ? `the newest ${found}; narrow the text to see older ones` : `${found}; ${number(part.done)} of ${number(part.files)} files`;
          if (part.end) view.dataset.done = part.end;
        },
      },
    });
  };
})();
