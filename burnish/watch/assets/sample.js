"use strict";
// One sample: its conversation, its tokens, and the same prompt at other steps.
(() => {
  const { make, link, number, signed, tone } = Watch;

  Watch.views.sample = async (view, params, scope) => {
    const run = params.get("run") ?? "", step = Number(params.get("step")), split = params.get("split") || "train", id = params.get("sample") ?? "";
    const at = { run, step, split: split === "train" ? "" : split };
    Watch.path([Watch.runName(run), link("run", { run })], [`Step ${number(step)}`, link("step", at)], [id]);
    const { sample, group, tokens } = await Watch.get("sample", { run, step, split, sample: id });
    if (scope.ended) return;
    const facts = [["Reward", number(sample.reward), tone(sample.reward)], ...Object.entries(sample.parts).map(([name, value]) => [name, number(value), ""]), ["Advantage", signed(sample.advantage, 3), tone(sample.advantage)], ["Tokens", number(sample.tokens), ""], ["End", sample.finish ?? "", ""], ["Label", sample.label ?? "", ""]].filter(([, value]) => value !== "");
    view.append(Watch.heading(run, "steps", make("h1", {}, id)),
      make("dl", { class: "facts" }, facts.map(([name, value, color]) => make("div", {}, make("dt", {}, name), make("dd", {}, color ? make("span", { class: `pill${color}` }, value) : value)))));
    const others = group.map((other, i) => make("a", { href: link("sample", { ...at, sample: other, color: params.get("color") ?? "" }), "aria-current": other === id ? "page" : null }, i + 1));
    if (group.length > 1) view.append(make("nav", { class: "switch of-group", "aria-label": "Samples of the group" }, others));
    if (sample.episode) view.append(make("section", { class: "section" }, make("h2", {}, "Conversation"), make("div", { class: "card talk" }, BurnishSamples.conversation(sample))));
    else view.append(make("section", { class: "section" }, make("h2", {}, "Prompt"), make("div", { class: "card whole", tabindex: "0" }, sample.prompt)), make("section", { class: "section" }, make("h2", {}, "Response"), make("div", { class: "card whole", tabindex: "0" }, sample.response)));
    if (tokens) view.append(Watch.tokenView(tokens, params.get("color") ?? "", (color) => Watch.remember({ color })));
    else view.append(make("section", { class: "section" }, make("h2", {}, "Tokens"), make("p", { class: "none" }, "The tokens of this sample were not kept; observe.samples_with_tokens says of how many samples per step they are.")));
    view.append(samePrompt(run, at, split, id, scope));
  };

  // The same prompt at other steps, side by side, oldest first.
  function samePrompt(run, at, split, id, scope) {
    const list = make("ul", { class: "side" }), note = make("span", { class: "count", role: "status" });
    const button = make("button", { type: "button", class: "button" }, "Find this prompt at all steps");
    const hits = [];
    button.addEventListener("click", () => {
      button.disabled = true;
      const close = scope.listen("search", { run, how: "prompt_of", step: at.step, split, text: id }, {
        once: true,
        lost: () => close?.(),
        on: {
          hits: (part) => {
            hits.push(...part.hits);
            hits.sort((a, b) => a.step - b.step || String(a.sample).localeCompare(String(b.sample)));
            list.replaceChildren(...hits.map((hit) => make("li", { class: "card" }, make("div", { class: "muted" }, `step ${number(hit.step)} · ${hit.split}`, hit.reward === null ? null : make("span", { class: `pill${tone(hit.reward)}` }, number(hit.reward))), make("a", { class: "text", href: link("sample", { run, step: hit.step, split: hit.split === "train" ? "" : hit.split, sample: hit.sample }) }, hit.response || "(empty)"))));
            note.textContent = part.end === "limit" ? `the newest ${number(hits.length)} samples; older ones are not listed` : `${number(hits.length)} samples; ${number(part.done)} of ${number(part.files)} files`;
          },
        },
      });
    });
    return make("section", { class: "section" }, make("h2", {}, "The same prompt"), make("div", { class: "controls free" }, button, note), list);
  }
})();
