"use strict";
/* Samples of runs: a table with search and pages, and the conversation of an episode. A classic
   script with one global:

   BurnishSamples.table(element, rows) -> {update(rows), show({split, step, text})}
     Fill an element with the table of samples.
   BurnishSamples.conversation(row) -> element
     Everything that a sample read and wrote, with the parts that are trained on marked.
   BurnishSamples.cells(row, {tone(reward)}) -> {step, prompt, response, reward, advantage, tokens}
     The cells of a row of the table.
   BurnishSamples.rows(data) -> rows
     The rows of data that burnish.report.samples wrote.

   row = {step, split, prompt, response, label, reward, parts, advantage, finish, tokens, id, group,
          opening: {messages, tools}, episode: {status, seconds, num_turns, num_rows, turns}}
   Without an episode the last two are missing or null. All text was written by models and data
   rows: it is only ever set as textContent. */
globalThis.BurnishSamples = (() => {
  const PAGE = 25;

  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const isMissing = (x) => x === null || x === undefined;
  const number = (x, digits = 3) =>
    isMissing(x) ? "none" : Number(x.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: digits });
  const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
  const spaced = (name) => String(name ?? "").replaceAll("_", " ");
  const tone = (x) => (isMissing(x) || Math.abs(x) < 1e-9 ? "" : x > 0 ? " up" : " down");

  function rows(data) {
    return data.rows.map((values) => {
      const row = Object.fromEntries(data.columns.map((name, i) => [name, values[i] ?? null]));
      return { ...row, prompt: data.prompts[row.prompt], opening: data.openings[row.episode?.opening] ?? null };
    });
  }

  function cells(row, { tone: rewardTone = () => "" } = {}) {
    const cell = () => make("td");
    const step = cell();
    step.append(make("div", "", row.step), make("div", "muted", row.split));
    const prompt = cell();
    prompt.append(make("div", "text prompt", row.prompt));
    if (!isMissing(row.label)) {
      const label = make("div", "label-of", "label ");
      label.append(make("b", "", row.label));
      prompt.append(label);
    }
    const response = cell();
    response.append(make("div", "text", row.response));
    const reward = cell();
    reward.append(make("span", "pill" + rewardTone(row.reward), number(row.reward)));
    const parts = make("div", "parts");
    for (const [name, value] of Object.entries(row.parts ?? {})) {
      const line = make("div");
      line.append(make("span", "", name), make("span", "", number(value)));
      line.title = name;
      parts.append(line);
    }
    reward.append(parts);
    const advantage = cell();
    if (!isMissing(row.advantage)) advantage.append(make("span", "pill" + tone(row.advantage), (row.advantage > 0 ? "+" : "") + number(row.advantage, 2)));
    const tokens = cell();
    tokens.append(make("div", "", number(row.tokens)), make("div", "muted", row.episode ? spaced(row.episode.status) : row.finish === "length" ? "cut at limit" : row.finish ?? ""));
    return { step, prompt, response, reward, advantage, tokens };
  }

  // ---- conversations ------------------------------------------------------------------------

  // What the policy sampled stands out from what it only read.
  function conversation(row) {
    const isTrained = row.split === "train", talk = make("div", "talk");
    const masked = isTrained ? "masked: not trained on" : "read", sampled = isTrained ? "sampled: trained on" : "sampled";
    if (!row.episode) {
      talk.append(messageBox({ role: "prompt", text: row.prompt ?? "" }, "masked", masked));
      talk.append(messageBox({ role: "response", text: row.response ?? "" }, "policy", sampled));
      return talk;
    }
    const { episode } = row, opening = row.opening ?? { messages: [], tools: [] };
    const head = make("div", "talk-head");
    head.append(make("span", "pill" + (episode.status === "done" ? " up" : ""), spaced(episode.status)));
    const facts = [plural(episode.num_turns, "turn"), plural(row.tokens ?? 0, "sampled token"), `${number(episode.seconds, 2)} s`];
    if (episode.num_rows > 1) facts.push(`${episode.num_rows} training rows`);
    head.append(...facts.map((fact) => make("span", "", fact)));
    talk.append(head);
    if (opening.tools.length) talk.append(toolList(opening.tools));
    for (const message of opening.messages) talk.append(messageBox(message, "masked", masked));
    let next = 0;
    for (const turn of episode.turns) {
      if (turn.number > next) talk.append(make("div", "gap", `${plural(turn.number - next, "turn")} left out`));
      next = turn.number + 1;
      talk.append(turnLine(turn, episode));
      talk.append(messageBox(turn.message, "policy", sampled));
      if (turn.problem) talk.append(make("div", "problem", turn.problem));
      const note = turn.number === episode.num_turns - 1 ? "not read: the episode ended" : masked;
      for (const message of turn.answer) talk.append(messageBox(message, "masked", note));
    }
    return talk;
  }

  function turnLine(turn, episode) {
    const line = make("div", "turn");
    const facts = [
      plural(turn.tokens ?? 0, "token"),
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

  /* A text that scrolls must be reachable by keyboard. */
  function scrolled(className, text) {
    const node = make("div", className, text);
    if (text.length > 1500 || text.split("\n", 21).length > 20) {
      node.tabIndex = 0;
      node.setAttribute("role", "region");
      node.setAttribute("aria-label", "text");
    }
    return node;
  }

  function messageBox(message, kind, note) {
    const box = make("div", `message ${kind}`), head = make("div", "who");
    head.append(make("b", "", message.name ? `${message.role}: ${message.name}` : message.role), make("span", "", note));
    box.append(head);
    if (message.reasoning) box.append(scrolled("reasoning", message.reasoning));
    if (message.text) box.append(scrolled("said", message.text));
    for (const call of message.calls ?? []) {
      const entry = make("div", "call");
      entry.append(make("b", "", call.name), scrolled("said", call.arguments));
      box.append(entry);
    }
    if (box.children.length === 1) box.append(make("div", "muted", "(empty)"));
    return box;
  }

  function toolList(tools) {
    const list = make("details", "tools");
    list.append(make("summary", "", `${plural(tools.length, "tool")} offered: ${tools.map((tool) => tool.name).join(", ")}`));
    for (const tool of tools) list.append(scrolled("said", tool.schema));
    return list;
  }

  // ---- the table ----------------------------------------------------------------------------

  const textsOf = (message) => [message.text, message.reasoning, ...(message.calls ?? []).flatMap((call) => [call.name, call.arguments])];
  const talkOf = (row) => !row.episode ? [] : [
    ...(row.opening?.messages ?? []).flatMap(textsOf), row.episode.status,
    ...row.episode.turns.flatMap((turn) => [turn.message, ...turn.answer].flatMap(textsOf).concat(turn.problem)),
  ];
  const COLUMNS = [["step", "Step"], ["prompt", "Prompt"], ["response", "Response"], ["reward", "Reward"], ["advantage", "Advantage"], ["tokens", "Tokens"]];

  function table(element, first) {
    let all = [], columns = [], rewardTone = () => "", texts = new Map();
    const view = { split: null, step: "", text: "", sort: "step", down: true, page: 0 };
    const part = {};

    function button(text, action) {
      const node = make("button", "", text);
      node.type = "button";
      node.addEventListener("click", action);
      return node;
    }

    function frame() {
      const controls = make("div", "controls");
      part.split = make("div", "switch");
      part.split.setAttribute("role", "group");
      part.split.setAttribute("aria-label", "Split");
      const step = make("label", "", "Step "), grow = make("label", "grow");
      part.step = make("select");
      step.append(part.step);
      part.search = make("input");
      Object.assign(part.search, { type: "search", placeholder: "Search prompts, responses and labels" });
      part.search.setAttribute("aria-label", "Search samples");
      grow.append(part.search);
      part.count = make("span", "count");
      part.count.setAttribute("aria-live", "polite");
      controls.append(part.split, step, grow, part.count);
      const grid = make("table", "samples"), head = make("thead");
      part.heads = make("tr");
      part.body = make("tbody");
      head.append(part.heads);
      grid.append(head, part.body);
      const pages = make("div", "pages");
      part.page = make("span");
      part.back = button("Previous", () => { view.page -= 1; render(); });
      part.next = button("Next", () => { view.page += 1; render(); });
      pages.append(part.back, part.page, part.next);
      element.replaceChildren(controls, grid, pages);
      part.step.addEventListener("change", () => change({ step: part.step.value }));
      part.search.addEventListener("input", () => change({ text: part.search.value }));
    }

    function order(a, b) {
      const x = a[view.sort], y = b[view.sort];
      if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y); // what is missing stands last
      const by = typeof x === "string" ? x.localeCompare(y) : x - y;
      return (view.down ? -by : by) || b.step - a.step || (a.group ?? 0) - (b.group ?? 0);
    }

    function textOf(row) {
      if (!texts.has(row)) texts.set(row, [row.prompt, row.response, row.label, ...talkOf(row)].join("\n").toLowerCase());
      return texts.get(row);
    }

    function rowOf(row) {
      const tr = make("tr", "sample"), contents = cells(row, { tone: rewardTone });
      const text = row.episode ? `${plural(row.episode.num_turns, "turn")}: show the conversation` : "Show all";
      const more = make("button", "more", text);
      more.type = "button";
      more.setAttribute("aria-expanded", "false");
      contents.response.append(more);
      for (const [key, title] of columns) contents[key].dataset.label = title;
      tr.append(...columns.map(([key]) => contents[key]));
      const toggle = () => {
        const isOpen = tr.classList.toggle("open");
        more.setAttribute("aria-expanded", String(isOpen));
        more.textContent = isOpen ? "Fold" : text;
        if (!row.episode) return;
        if (!isOpen) { tr.nextSibling.remove(); return; }
        const unfolded = make("tr", "unfolded"), cell = make("td");
        cell.colSpan = columns.length;
        cell.append(conversation(row));
        unfolded.append(cell);
        tr.after(unfolded);
      };
      tr.addEventListener("click", () => { if (!String(getSelection())) toggle(); });
      return tr;
    }

    function render() {
      const text = view.text.trim().toLowerCase();
      const shown = all
        .filter((row) => (!view.split || row.split === view.split) && (view.step === "" || row.step === Number(view.step)) && (!text || textOf(row).includes(text)))
        .sort(order);
      const pages = Math.max(1, Math.ceil(shown.length / PAGE));
      view.page = Math.min(view.page, pages - 1);
      const visible = shown.slice(view.page * PAGE, (view.page + 1) * PAGE).map(rowOf);
      if (!visible.length) {
        const tr = make("tr"), td = make("td", "none", "No sample matches.");
        td.colSpan = columns.length;
        tr.append(td);
        visible.push(tr);
      }
      part.body.replaceChildren(...visible);
      for (const tr of visible) { // a text that is shown completely needs no button
        const isShort = [...tr.querySelectorAll(".text")].every((node) => node.scrollHeight <= node.clientHeight + 1);
        if (isShort && !tr.querySelector(".more")?.textContent.includes("conversation")) tr.querySelector(".more")?.remove();
      }
      part.count.textContent = `${number(shown.length)} of ${plural(all.length, "sample")}`;
      part.page.textContent = `Page ${view.page + 1} of ${pages}`;
      part.back.disabled = view.page === 0;
      part.next.disabled = view.page >= pages - 1;
      for (const th of part.heads.children) {
        th.removeAttribute("aria-sort");
        const isSorted = th.dataset.key === view.sort;
        if (isSorted) th.setAttribute("aria-sort", view.down ? "descending" : "ascending");
        th.firstChild.textContent = th.dataset.title + (isSorted ? (view.down ? " ↓" : " ↑") : "");
      }
      for (const node of part.split.children) node.setAttribute("aria-pressed", String(node.dataset.split === view.split));
    }

    function listSteps() {
      const steps = [...new Set(all.filter((row) => !view.split || row.split === view.split).map((row) => row.step))].sort((a, b) => b - a);
      part.step.replaceChildren(new Option("all", ""), ...steps.map((step) => new Option(String(step), String(step))));
      if (view.step !== "" && !steps.includes(Number(view.step))) view.step = "";
      part.step.value = view.step;
    }

    function change(changes) {
      Object.assign(view, { page: 0 }, changes);
      render();
    }

    function update(next) {
      all = next;
      texts = new Map();
      const splits = [...new Set(all.map((row) => row.split))].sort().reverse();
      if (view.split === null || (view.split && !splits.includes(view.split))) view.split = splits[0] ?? "";
      columns = COLUMNS.filter(([key]) => key !== "advantage" || all.some((row) => !isMissing(row.advantage)));
      const rewards = all.map((row) => row.reward).filter((x) => !isMissing(x));
      const low = rewards.reduce((a, b) => Math.min(a, b), Infinity), high = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
      rewardTone = (x) => (isMissing(x) || low === high ? "" : tone(x - (low + high) / 2));
      part.split.replaceChildren();
      part.split.hidden = splits.length < 2;
      for (const split of splits.length > 1 ? [...splits, ""] : splits) {
        const name = String(split ?? "none");
        const node = button(split === "" ? "All" : name[0].toUpperCase() + name.slice(1), () => { view.split = split; listSteps(); change({}); });
        node.dataset.split = split;
        part.split.append(node);
      }
      part.heads.replaceChildren(...columns.map(([key, title]) => {
        const th = make("th", `of-${key}`);
        th.scope = "col";
        Object.assign(th.dataset, { key, title });
        th.append(button(title, () => change({ sort: key, down: view.sort === key ? !view.down : key !== "prompt" && key !== "response" })));
        return th;
      }));
      listSteps();
      render();
    }

    /* Show a split, a step or a text. */
    function show({ split, step, text }) {
      if (split !== undefined) view.split = split;
      if (step !== undefined) view.step = isMissing(step) ? "" : String(step);
      if (text !== undefined) { view.text = text; part.search.value = text; }
      listSteps();
      change({});
    }

    frame();
    update(first);
    return { update, show };
  }

  return { table, conversation, cells, rows };
})();
