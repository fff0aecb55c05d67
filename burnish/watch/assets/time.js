"use strict";
// Lanes of time on a canvas: wheel or buttons zoom, dragging moves.
(() => {
  const { make, number } = Watch;
  const ROW = 26, TOP = 22;

  Watch.drawTime = (state, data, times) => {
    if (!state.lanes) {
      state.body.replaceChildren();
      if (data.lanes.length) state.lanes = lanes(state, data);
      else state.body.append(make("p", { class: "none" }, "The timeline is written every half minute, and when the run ends."));
      state.tables = make("div");
      state.body.append(state.tables);
    } else state.lanes.set(data);
    state.tables.replaceChildren(...times.map((split) => {
      const rows = split.phases.map((phase) => make("tr", {}, make("th", { scope: "row" }, phase.name), make("td", { class: "num" }, phase.total), make("td", { class: "num" }, phase.per_step), make("td", { class: "num" }, `${phase.percent.toFixed(1)}%`)));
      const heads = ["Phase", "Total", "Per step", "Share"].map((head, i) => make("th", { scope: "col", class: i ? "num" : null }, head));
      return make("section", { class: "section" }, make("h2", {}, split.chart.title), make("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": split.chart.title }, make("table", { class: "grid" }, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows))));
    }));
  };

  function lanes(state, data) {
    const canvas = make("canvas", { tabindex: "0", role: "img" }), tip = make("p", { class: "hint", role: "status" }, "Point at a span; wheel or + and − zoom, dragging or arrow keys move.");
    const button = (text, title, action) => make("button", { type: "button", title, "aria-label": title, onclick: action }, text);
    const shown = { from: 0, to: data.seconds };
    const body = make("tbody");
    const table = make("table", { class: "grid" }, make("thead", {}, make("tr", {}, ["Lane", "Busy", "Share", "Spans", "Longest gap"].map((head, i) => make("th", { scope: "col", class: i ? "num" : null }, head)))), body);
    state.body.append(make("section", { class: "section" }, make("h2", {}, "Lanes"), make("div", { class: "controls free" }, button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)), button("All", "Show everything", () => { shown.from = 0; shown.to = data.seconds; draw(); }), tip), make("div", { class: "card lanes" }, canvas), make("p", { class: "hint" }, data.note), make("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Lanes" }, table)));

    const threads = () => new Set(data.lanes.map((lane) => lane.thread).filter(Boolean));
    const title = (lane) => (lane.thread && threads().size > 1 ? `${lane.name} (${lane.thread})` : lane.name);
    function fill() {
      canvas.setAttribute("aria-label", `Lanes of time: ${data.lanes.map((lane) => `${title(lane)} busy ${Math.round((100 * lane.busy_s) / (data.seconds || 1))}%`).join(", ")}`);
      body.replaceChildren(...data.lanes.map((lane) => {
        const [at, length] = lane.gap;
        return make("tr", {}, make("th", { scope: "row" }, title(lane)), make("td", { class: "num" }, `${number(lane.busy_s, 2)} s`), make("td", { class: "num" }, `${((100 * lane.busy_s) / (data.seconds || 1)).toFixed(1)}%`), make("td", { class: "num" }, number(lane.spans.length)), make("td", { class: "num" }, `${number(length, 2)} s at ${number(at, 1)} s`));
      }));
    }
    const left = () => Math.min(160, canvas.clientWidth * 0.3);
    const x = (seconds) => left() + ((seconds - shown.from) / (shown.to - shown.from)) * (canvas.clientWidth - left());
    function draw() {
      const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = TOP + ROW * data.lanes.length;
      canvas.style.height = `${height}px`;
      canvas.width = width * scale;
      canvas.height = height * scale;
      const paint = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
      paint.scale(scale, scale);
      paint.font = `12px ${color("--sans")}`;
      paint.textBaseline = "middle";
      const step = 10 ** Math.floor(Math.log10((shown.to - shown.from) / 4 || 1));
      for (let at = Math.ceil(shown.from / step) * step; at <= shown.to; at += step * ((shown.to - shown.from) / step > 12 ? 2 : 1)) {
        paint.fillStyle = color("--grid");
        paint.fillRect(x(at), TOP - 4, 1, height);
        paint.fillStyle = color("--soft");
        paint.fillText(`${number(at, 3)} s`, x(at) + 3, 9);
      }
      data.lanes.forEach((lane, i) => {
        const y = TOP + ROW * i;
        paint.fillStyle = color("--text");
        paint.fillText(title(lane), 8, y + ROW / 2, left() - 12);
        for (const [start, length, phase] of lane.spans) {
          paint.fillStyle = color(`--c${phase % 8}`);
          if (start + length < shown.from || start > shown.to) continue;
          const begin = Math.max(left(), x(start)), end = Math.min(width, x(start + length));
          paint.fillRect(begin, y + 4, Math.max(1, end - begin), ROW - 8);
        }
      });
    }
    function zoom(factor, center = (shown.from + shown.to) / 2) {
      const span = Math.min(data.seconds, Math.max(1e-4, (shown.to - shown.from) * factor)), share = (center - shown.from) / (shown.to - shown.from);
      shown.from = Math.min(Math.max(0, center - span * share), data.seconds - span);
      shown.to = shown.from + span;
      draw();
    }
    function move(seconds) {
      const span = shown.to - shown.from;
      shown.from = Math.min(Math.max(0, shown.from + seconds), Math.max(0, data.seconds - span));
      shown.to = shown.from + span;
      draw();
    }
    const seconds = (event) => shown.from + ((event.offsetX - left()) / (canvas.clientWidth - left())) * (shown.to - shown.from);
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, seconds(event)); }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const span = shown.to - shown.from, action = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-span / 5), ArrowRight: () => move(span / 5) }[event.key];
      if (action) { event.preventDefault(); action(); }
    });
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = event.offsetX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (drag !== null) { move(((drag - event.offsetX) / (canvas.clientWidth - left())) * (shown.to - shown.from)); drag = event.offsetX; return; }
      const lane = data.lanes[Math.floor((event.offsetY - TOP) / ROW)], at = seconds(event);
      const span = lane?.spans.find(([start, length]) => start <= at && at <= start + length);
      tip.textContent = span ? `${title(lane)}: ${data.phases[span[2]] === lane.name ? "" : `${data.phases[span[2]]}, `}${number(span[1], 4)} s from ${number(span[0], 3)} s` : lane ? `${title(lane)}: idle at ${number(at, 3)} s` : "";
    });
    const watcher = new ResizeObserver(draw);
    watcher.observe(canvas);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    state.scope.onEnd(() => { watcher.disconnect(); dark.removeEventListener("change", draw); });
    fill();
    return { set(next) { const all = shown.to >= data.seconds; data = next; if (all) shown.to = data.seconds; fill(); draw(); } };
  }
})();
