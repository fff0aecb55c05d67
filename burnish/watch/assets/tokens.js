"use strict";
// The tokens of a sample, colored by one of their numbers.
(() => {
  const { make, number } = Watch;
  // name: [title, explanation, scale]. "around": blue below 0, red above; "high": the darker, the larger; "mask": two colors.
  const COLORS = {
    difference: ["Trainer − sampler log-prob", "0: trainer and sampler agree. Red: the trainer finds the token more likely; blue: less likely.", "around"],
    ratio: ["Ratio trainer / sampler", "1: equal. Red above 1, blue below.", "ratio"],
    entropy: ["Entropy", "Nats of the distribution the token was drawn from: the darker, the less certain.", "high"],
    advantage: ["Advantage", "Red: made more likely by the update; blue: less likely.", "around"],
    sampler_logprob: ["Sampler log-prob", "The darker, the less likely the token was.", "low"],
    trainer_logprob: ["Trainer log-prob", "The darker, the less likely the token was.", "low"],
    teacher_difference: ["Teacher − trainer log-prob", "Red: the teacher finds the token more likely.", "around"],
    ref_difference: ["Trainer − reference log-prob", "Red: more likely than under the reference.", "around"],
    value: ["Value", "The critic's value of the state before the token.", "around"],
    mask: ["Action mask", "Colored: sampled by the policy and trained. Plain: prompt, tool or environment.", "mask"],
    version: ["Weight version", "Optimizer steps of the weights that sampled the token.", "classes"],
  };

  function derived(tokens) {
    const length = tokens.tokens.length, all = (name) => tokens[name] ?? new Array(length).fill(null);
    const minus = (a, b) => a.map((x, i) => (x === null || b[i] === null || b[i] === undefined ? null : x - b[i]));
    const columns = {
      sampler_logprob: all("sampler_logprobs"), trainer_logprob: all("trainer_logprobs"), entropy: all("entropies"),
      advantage: all("token_advantages"), value: all("values"), version: all("versions"), mask: all("action_mask"),
    };
    columns.difference = minus(columns.trainer_logprob, columns.sampler_logprob);
    columns.ratio = columns.difference.map((x) => (x === null ? null : Math.exp(x)));
    columns.teacher_difference = minus(all("teacher_logprobs"), columns.trainer_logprob);
    columns.ref_difference = minus(columns.trainer_logprob, all("ref_logprobs"));
    for (const [name, values] of Object.entries(columns)) if (!values.some((x) => x !== null)) delete columns[name];
    return columns;
  }

  function shades(name, values) {
    const scale = COLORS[name][2], known = values.filter((x) => x !== null).map(Number);
    const center = scale === "ratio" ? 1 : 0;
    const sizes = known.map((x) => Math.abs(x - center)).sort((a, b) => a - b);
    const top = Math.max(sizes[Math.floor(sizes.length * 0.98)] ?? 0, 1e-12); // one outlier does not hide the rest
    const low = Math.min(...known), high = Math.max(...known), classes = [...new Set(known)].sort((a, b) => a - b);
    return (value) => {
      if (value === null) return ["", 0];
      if (scale === "mask") return value ? ["hot", 0.55] : ["", 0];
      if (scale === "classes") return [`class${classes.indexOf(value) % 4}`, 0.5];
      if (scale === "high") return ["hot", high > 0 ? Math.min(1, value / high) : 0];
      if (scale === "low") return ["hot", low < 0 ? Math.min(1, value / low) : 0];
      return [value >= center ? "hot" : "cold", Math.min(1, Math.abs(value - center) / top)];
    };
  }

  Watch.tokenView = (tokens, color, onColor) => {
    const columns = derived(tokens), names = Object.keys(COLORS).filter((name) => columns[name]);
    const section = make("section", { class: "section tokens-section" }, make("h2", {}, "Tokens"));
    if (!names.length) return section;
    let chosen = names.includes(color) ? color : names[0], at = -1;
    const select = make("select", { id: "color" }, names.map((name) => make("option", { value: name, selected: name === chosen }, COLORS[name][0])));
    const legend = make("p", { class: "hint" }), box = make("div", { class: "token-text", tabindex: "0", role: "region", "aria-label": "Tokens; arrow keys move from token to token" });
    const facts = make("dl", { class: "facts token-facts", "aria-live": "polite" });
    const spans = tokens.tokens.map((text, i) => {
      const span = make("span", { class: "token" }, text.replaceAll("\n", "⏎\n") || "∅");
      span.dataset.at = i;
      return span;
    });
    if (tokens.tokens_omitted) box.append(make("div", { class: "muted" }, `${number(tokens.tokens_omitted)} earlier tokens are not kept`));
    const rows = tokens.row_numbers ?? [];
    spans.forEach((span, i) => {
      if (i > 0 && rows[i] !== rows[i - 1]) box.append(make("div", { class: "muted" }, `training row ${rows[i] + 1}`));
      box.append(span);
    });

    function paint() {
      const shade = shades(chosen, columns[chosen]);
      spans.forEach((span, i) => {
        const [kind, amount] = shade(columns[chosen][i]);
        span.className = `token ${kind}${i === at ? " at" : ""}`;
        span.style.setProperty("--amount", `${Math.round(amount * 70)}%`);
      });
      const known = columns[chosen].filter((x) => x !== null).map(Number);
      legend.textContent = `${COLORS[chosen][1]} From ${BurnishCharts.format(Math.min(...known))} to ${BurnishCharts.format(Math.max(...known))}.`;
    }
    function show(i) {
      if (i < 0 || i >= spans.length) return;
      spans[at]?.classList.remove("at");
      at = i;
      spans[at].classList.add("at");
      spans[at].scrollIntoView({ block: "nearest" });
      const id = tokens.token_ids?.[i];
      const rows = [["Token", `${JSON.stringify(tokens.tokens[i])}${id === undefined ? "" : ` (${id})`}, number ${i + 1}`], ...names.map((name) => [COLORS[name][0], columns[name][i] === null ? "" : name === "mask" ? (columns[name][i] ? "trained" : "not trained") : BurnishCharts.format(Number(columns[name][i]))])];
      facts.replaceChildren(...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value || "–"))));
    }
    select.addEventListener("change", () => { chosen = select.value; onColor(chosen); paint(); });
    box.addEventListener("mouseover", (event) => { const i = event.target.dataset?.at; if (i !== undefined) show(Number(i)); });
    box.addEventListener("click", (event) => { const i = event.target.dataset?.at; if (i !== undefined) show(Number(i)); });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (!step) return;
      event.preventDefault();
      show(Math.min(spans.length - 1, Math.max(0, at + step)));
    });
    section.append(make("div", { class: "controls free" }, make("label", { for: "color" }, "Color ", select)), legend, make("div", { class: "card token-card" }, box, facts));
    paint();
    show(Math.max(0, (columns.mask ?? []).findIndex(Boolean)));
    return section;
  };
})();
