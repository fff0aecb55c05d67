"use strict";
// Figures in a folded section have no width until it opens.
for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => {
    for (const plot of details.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(plot);
  });
}
// Plotly sizes the first figures before the page's last columns, fonts and scroll bar are there.
const fit = () => {
  for (const plot of document.querySelectorAll(".js-plotly-plot"))
    if (plot.offsetParent !== null) Plotly.Plots.resize(plot);
};
addEventListener("load", () => { fit(); setTimeout(fit, 200); });

// The samples table. All text was written by models and data rows: it is only ever set as textContent.
(() => {
  const source = document.getElementById("samples-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const rows = data.rows.map((row) => ({ ...row, prompt: data.prompts[row.prompt], opening: data.openings[row.episode?.opening] }));
  const textsOf = (message) => [message.text, message.reasoning, ...(message.calls ?? []).flatMap((call) => [call.name, call.arguments])];
  const talkOf = (row) => !row.episode ? [] : [
    ...row.opening.messages.flatMap(textsOf), row.episode.status,
    ...row.episode.turns.flatMap((turn) => [turn.message, ...turn.answer].flatMap(textsOf).concat(turn.problem)),
  ];
  for (const row of rows) row.found = [row.prompt, row.response, row.label, ...talkOf(row)].join("\n").toLowerCase();
  const byId = (id) => document.getElementById(id);
  const PAGE = 25;
  const splits = [...new Set(rows.map((row) => row.split))].sort().reverse();
  const columns = [
    ["step", "Step", "7%"], ["prompt", "Prompt", "27%"], ["response", "Response", "34%"], ["reward", "Reward", "14%"],
    ["advantage", "Advantage", "9%"], ["tokens", "Tokens", "9%"],
  ].filter(([key]) => key !== "advantage" || rows.some((row) => row.advantage !== null));
  const view = { split: splits[0], step: "", text: "", sort: "step", down: true, page: 0 };

  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const number = (x, digits = 3) =>
    x === null || x === undefined ? "none" : Number(x.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: digits });
  const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
  const spaced = (name) => name.replaceAll("_", " ");
  const tone = (x) => (x === null || x === undefined || Math.abs(x) < 1e-9 ? "" : x > 0 ? " up" : " down");

  const rewards = rows.map((row) => row.reward).filter((x) => x !== null);
  const low = Math.min(...rewards), high = Math.max(...rewards), middle = (low + high) / 2;
  const rewardTone = (x) => (x === null || low === high ? "" : tone(x - middle));

  function cells(row) {
    const make_td = (className) => make("td", className);
    const step = make_td();
    step.append(make("div", "", row.step), make("div", "muted", row.split));
    const prompt = make_td();
    prompt.append(make("div", "text prompt", row.prompt));
    if (row.label !== null) {
      const wanted = make("div", "wanted", "label ");
      wanted.append(make("b", "", row.label));
      prompt.append(wanted);
    }
    const response = make_td();
    response.append(make("div", "text", row.response));
    if (row.episode) response.append(make("div", "more", `${plural(row.episode.num_turns, "turn")}: show the conversation`));
    const reward = make_td();
    reward.append(make("span", "pill" + rewardTone(row.reward), number(row.reward)));
    const parts = make("div", "parts");
    for (const [name, value] of Object.entries(row.parts)) {
      const line = make("div");
      line.append(make("span", "", name), make("span", "", number(value)));
      line.title = name;
      parts.append(line);
    }
    reward.append(parts);
    const advantage = make_td();
    if (row.advantage !== null) advantage.append(make("span", "pill" + tone(row.advantage), (row.advantage > 0 ? "+" : "") + number(row.advantage, 2)));
    const tokens = make_td();
    tokens.append(make("div", "", number(row.tokens)), make("div", "muted", row.episode ? spaced(row.episode.status) : row.finish === "length" ? "cut at limit" : row.finish));
    return { step, prompt, response, reward, advantage, tokens };
  }

  // The conversation of an episode: what the policy sampled stands out from what it only read.
  function conversation(row) {
    const { episode, opening } = row, trained = row.split === "train";
    const cell = make("td", "talk");
    cell.colSpan = columns.length;
    const head = make("div", "talk-head");
    head.append(make("span", "pill" + (episode.status === "done" ? " up" : ""), spaced(episode.status)));
    const facts = [plural(episode.num_turns, "turn"), plural(row.tokens, "sampled token"), `${number(episode.seconds, 2)} s`];
    if (episode.num_rows > 1) facts.push(`${episode.num_rows} training rows`);
    head.append(...facts.map((fact) => make("span", "", fact)));
    cell.append(head);
    if (opening.tools.length) cell.append(toolList(opening.tools));
    const masked = trained ? "masked: not trained on" : "read";
    for (const message of opening.messages) cell.append(messageBox(message, "masked", masked));
    let next = 0;
    for (const turn of episode.turns) {
      if (turn.number > next) cell.append(make("div", "gap", `${plural(turn.number - next, "turn")} left out`));
      next = turn.number + 1;
      cell.append(turnLine(turn, episode));
      cell.append(messageBox(turn.message, "policy", trained ? "sampled: trained on" : "sampled"));
      if (turn.problem) cell.append(make("div", "problem", turn.problem));
      const note = turn.number === episode.num_turns - 1 ? "not read: the episode ended" : masked;
      for (const message of turn.answer) cell.append(messageBox(message, "masked", note));
    }
    const tr = make("tr", "unfolded");
    tr.append(cell);
    return tr;
  }

  function turnLine(turn, episode) {
    const line = make("div", "turn");
    const facts = [
      plural(turn.tokens, "token"),
      `prompt ${number(turn.prompt_tokens)}${turn.cached_tokens ? `, ${number(turn.cached_tokens)} cached` : ""}`,
      `engine ${number(turn.engine_s)} s`,
      `environment ${number(turn.environment_s)} s`,
    ];
    if (episode.num_rows > 1 && turn.row !== null) facts.push(`training row ${turn.row + 1}`);
    line.append(make("b", "", `Turn ${turn.number + 1}`), ...facts.map((fact) => make("span", "", fact)));
    for (const [name, value] of Object.entries(turn.counts)) if (value) line.append(make("span", "", `${spaced(name)} ${number(value)}`));
    for (const [name, value] of Object.entries(turn.rewards)) line.append(make("span", "pill" + tone(value), `${name} ${value > 0 ? "+" : ""}${number(value)}`));
    return line;
  }

  function messageBox(message, kind, note) {
    const box = make("div", `message ${kind}`), head = make("div", "who");
    head.append(make("b", "", message.name ? `${message.role}: ${message.name}` : message.role), make("span", "", note));
    box.append(head);
    if (message.reasoning) box.append(make("div", "reasoning", message.reasoning));
    if (message.text) box.append(make("div", "said", message.text));
    for (const call of message.calls ?? []) {
      const made = make("div", "call");
      made.append(make("b", "", call.name), make("div", "said", call.arguments));
      box.append(made);
    }
    if (box.children.length === 1) box.append(make("div", "muted", "(empty)"));
    return box;
  }

  function toolList(tools) {
    const list = make("details", "tools");
    list.append(make("summary", "", `${plural(tools.length, "tool")} offered: ${tools.map((tool) => tool.name).join(", ")}`));
    for (const tool of tools) list.append(make("div", "said", tool.schema));
    return list;
  }

  function order(a, b) {
    const x = a[view.sort], y = b[view.sort];
    if (x === null || y === null) return (x === null) - (y === null); // what is missing stands last
    const by = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (view.down ? -by : by) || b.step - a.step || a.group - b.group;
  }

  function draw() {
    const text = view.text.trim().toLowerCase();
    const shown = rows
      .filter((row) => (!view.split || row.split === view.split) && (view.step === "" || row.step === Number(view.step)) && row.found.includes(text))
      .sort(order);
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    view.page = Math.min(view.page, pages - 1);
    const body = byId("rows");
    body.replaceChildren();
    for (const row of shown.slice(view.page * PAGE, (view.page + 1) * PAGE)) {
      const tr = make("tr");
      tr.tabIndex = 0;
      tr.title = "Open or fold the whole text";
      const made = cells(row);
      tr.append(...columns.map(([key]) => made[key]));
      const toggle = () => {
        if (String(getSelection())) return;
        const open = tr.classList.toggle("open");
        if (!row.episode) return;
        if (open) tr.after(conversation(row));
        else tr.nextSibling.remove();
      };
      tr.addEventListener("click", toggle);
      tr.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
      body.append(tr);
    }
    if (!shown.length) {
      const td = make("td", "none", "No sample matches.");
      td.colSpan = columns.length;
      const tr = make("tr");
      tr.append(td);
      body.append(tr);
    }
    byId("count").textContent = `${number(shown.length)} of ${number(rows.length)} samples`;
    byId("page").textContent = `Page ${view.page + 1} of ${pages}`;
    byId("back").disabled = view.page === 0;
    byId("next").disabled = view.page >= pages - 1;
    for (const th of byId("heads").children) {
      th.removeAttribute("aria-sort");
      const sorted = th.dataset.key === view.sort;
      if (sorted) th.setAttribute("aria-sort", view.down ? "descending" : "ascending");
      th.firstChild.textContent = th.dataset.title + (sorted ? (view.down ? " ↓" : " ↑") : "");
    }
    for (const button of byId("split").children) button.setAttribute("aria-pressed", String(button.dataset.split === view.split));
  }

  function listSteps() {
    const select = byId("step");
    const steps = [...new Set(rows.filter((row) => !view.split || row.split === view.split).map((row) => row.step))].sort((a, b) => b - a);
    select.replaceChildren(new Option("all", ""), ...steps.map((step) => new Option(String(step), String(step))));
    if (!steps.includes(Number(view.step))) view.step = "";
    select.value = view.step;
  }

  const change = (changes) => { Object.assign(view, { page: 0 }, changes); draw(); };
  for (const split of splits.length > 1 ? [...splits, ""] : splits) {
    const button = make("button", "", split ? split[0].toUpperCase() + split.slice(1) : "All");
    button.type = "button";
    button.dataset.split = split;
    button.addEventListener("click", () => { view.split = split; listSteps(); change({}); });
    byId("split").append(button);
  }
  for (const [key, title, width] of columns) {
    const th = make("th");
    th.dataset.key = key;
    th.dataset.title = title;
    th.style.width = width;
    const button = make("button", "", title);
    button.type = "button";
    button.addEventListener("click", () => change({ sort: key, down: view.sort === key ? !view.down : key !== "prompt" && key !== "response" }));
    th.append(button);
    byId("heads").append(th);
  }
  byId("step").addEventListener("change", (event) => change({ step: event.target.value }));
  byId("search").addEventListener("input", (event) => change({ text: event.target.value }));
  byId("back").addEventListener("click", () => { view.page -= 1; draw(); });
  byId("next").addEventListener("click", () => { view.page += 1; draw(); });
  listSteps();
  draw();
})();
