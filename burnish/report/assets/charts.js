"use strict";
/* Charts of pages about runs, drawn with uPlot. A classic script with one global:

   BurnishCharts.draw(element, chart, {onPoint(x), sync: key}) -> {update(chart), destroy()}
     Fill an element with the plot, the values at the cursor and the note. A chart whose lines never
     change is one line of text.
   BurnishCharts.card(chart, options) -> {element, update(chart), destroy()}
     The same as a <figure class="card"> with title and unit.
   BurnishCharts.read(table) -> chart
     The chart that a table of the report contains.
   BurnishCharts.format(value, unit), BurnishCharts.unit(chart)
     A number as text, and the unit as it is drawn (GiB for bytes).

   chart = {title, unit, note, log, bars, x: [numbers], xLabel, lines: [{name, values: [number|null]}],
            marks: [{x, label}]}
   Only title, x and lines are needed. unit: "fraction" is drawn in percent, "bytes" in GiB or MiB.
   log: steps on an axis of powers of two. bars: stacked bars. marks: vertical lines.
   page.css has the styles: colors of lines are its variables --c0 to --c7. */
globalThis.BurnishCharts = (() => {
  const COLORS = 8, HEIGHT = 200, SMOOTH_FROM = 40, MARKERS_UP_TO = 12;
  const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

  // ---- numbers ------------------------------------------------------------------------------

  function plain(value) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size < 1e-3 || size >= 1e9) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    const digits = size >= 1e4 ? 0 : size >= 1e3 ? 1 : Math.max(0, 3 - Math.floor(Math.log10(size)));
    return value.toLocaleString("en-US", { maximumFractionDigits: digits });
  }

  function format(value, unit) {
    if (value === null || value === undefined) return "none";
    if (!Number.isFinite(value)) return String(value);
    if (unit === "fraction") return `${plain(100 * value)}%`;
    if (unit !== "bytes") return plain(value);
    const [name, size] = SIZES.find(([, size]) => Math.abs(value) >= size) ?? SIZES.at(-1);
    return `${plain(value / size)} ${name}`;
  }

  const measured = (values) => values.filter((value) => value !== null);

  /* [factor, unit]: what values are divided by for the axis, and their unit then. */
  function scaled({ unit = "", lines }) {
    if (unit === "fraction") return [0.01, "percent"];
    if (unit !== "bytes") return [1, unit];
    const top = lines.reduce((top, line) => Math.max(top, ...measured(line.values)), 0);
    return top >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  }

  // ---- lines --------------------------------------------------------------------------------

  function isNoisy(values) {
    let jumps = 0, low = values[0], high = values[0];
    for (let i = 1; i < values.length; i++) {
      jumps += Math.abs(values[i] - values[i - 1]);
      low = Math.min(low, values[i]);
      high = Math.max(high, values[i]);
    }
    return jumps / (values.length - 1) > 0.02 * (high - low);
  }

  /* Centered running mean of the measured values: peaks are not shifted. */
  function smooth(values, window) {
    const known = measured(values), sums = [0], half = Math.floor(window / 2);
    for (const value of known) sums.push(sums.at(-1) + value);
    let i = -1;
    return values.map((value) => {
      if (value === null) return null;
      i += 1;
      const start = Math.max(0, i - half), end = Math.min(known.length, i + half + 1);
      return (sums[end] - sums[start]) / (end - start);
    });
  }

  /* The series of a chart: {name, values (for the legend), drawn, color, faint, hidden}. */
  function seriesOf(chart, factor) {
    const { lines, log, bars } = chart;
    if (bars) {
      const below = chart.x.map(() => 0);
      const stacked = lines.map((line, i) => ({
        ...line, color: i, drawn: line.values.map((value, k) => (below[k] += (value ?? 0) / factor)),
      }));
      return { series: stacked.reverse(), window: 0 }; // the highest bars first, behind the others
    }
    const faint = [], strong = [];
    let window = 0;
    lines.forEach((line, i) => {
      const drawn = line.values.map((value) => (value === null ? null : value / factor));
      const known = measured(line.values);
      if (log || lines.length > 2 || known.length < SMOOTH_FROM || !isNoisy(known)) {
        strong.push({ ...line, drawn, color: i });
        return;
      }
      window = Math.floor(known.length / 40) * 2 + 1;
      const mean = smooth(line.values, window);
      faint.push({ ...line, drawn, color: i, faint: true });
      strong.push({ name: lines.length === 1 ? "running mean" : `${line.name}, running mean`, values: mean, drawn: mean.map((v) => (v === null ? null : v / factor)), color: i });
    });
    return { series: [...faint, ...strong], window };
  }

  /* "1e-5 over 40 steps" for a chart whose lines never change; null if one does. */
  function constant(chart) {
    if (chart.bars) return null;
    const known = chart.lines.map((line) => measured(line.values));
    if (known.some((values) => values.length === 0 || values.some((value) => value !== values[0]))) return null;
    const texts = known.map((values) => format(values[0], chart.unit));
    const value = new Set(texts).size > 1 ? chart.lines.map((line, i) => `${line.name} ${texts[i]}`).join(", ") : texts[0];
    const label = chart.xLabel ?? "step";
    return chart.x.length === 1 ? `${value} at ${label} ${plain(chart.x[0])}` : `constant: ${value} over ${plain(chart.x.length)} ${label}s`;
  }

  // ---- axes ---------------------------------------------------------------------------------

  const DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const power = (value) => {
    const exponent = Math.round(Math.log2(value));
    return `2${exponent < 0 ? "⁻" : ""}${[...String(Math.abs(exponent))].map((digit) => DIGITS[digit]).join("")}`;
  };

  /* Powers of two of the range, at most six. */
  function powers(low, high) {
    let first = Math.floor(Math.log2(low)), last = Math.ceil(Math.log2(high));
    if (first === last) { first -= 1; last += 1; }
    const every = Math.ceil((last - first) / 5), ticks = [];
    for (let k = first; k <= last; k += every) ticks.push(2 ** k);
    return { ticks, range: [2 ** (first - 0.3), 2 ** (last + 0.3)] };
  }

  function yRange(fromZero, low, high) {
    if (low === null) return [0, 1];
    const pad = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
    return [fromZero && low >= 0 ? 0 : low - pad, high + pad];
  }

  // ---- drawing ------------------------------------------------------------------------------

  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  function options(chart, series, width, hooks, sync) {
    const style = getComputedStyle(document.documentElement);
    const variable = (name) => () => style.getPropertyValue(name).trim();
    const font = `11px ${style.getPropertyValue("--sans").trim() || "sans-serif"}`;
    const color = (i) => variable(`--c${i % COLORS}`);
    const values = series.flatMap((line) => measured(line.drawn));
    const isLog = Boolean(chart.log) && values.length > 0 && values.every((value) => value > 0);
    const log = isLog ? powers(Math.min(...values), Math.max(...values)) : null;
    const fromZero = chart.bars || ["fraction", "bytes", "tokens", "tokens per second"].includes(chart.unit);
    const suffix = chart.unit === "fraction" ? "%" : "";
    const half = chart.bars && chart.x.length > 1 ? (chart.x[1] - chart.x[0]) / 2 : 0.5;
    const axis = { font, stroke: variable("--soft"), ticks: { show: false } };
    const bars = chart.bars ? uPlot.paths.bars({ size: [0.82, 48] }) : undefined;
    const stepped = isLog ? uPlot.paths.stepped({ align: 1 }) : undefined;
    return {
      width, height: HEIGHT + (chart.bars ? 60 : 0), hooks, legend: { show: false },
      padding: [8, Math.max(12, 3.5 * plain(chart.x.at(-1)).length), 0, 0], // half of the last label
      cursor: {
        y: false,
        drag: { x: true, y: false, dist: 8 },
        points: { size: 7, width: 0, fill: (_, i) => variable(`--c${series[i - 1].color % COLORS}`)(), ...(chart.bars ? { show: false } : {}) },
        move: (plot, left, top) => [left < 0 ? left : plot.valToPos(plot.data[0][plot.posToIdx(left)], "x"), top], // to a point
        ...(sync ? { sync: { key: sync, setSeries: false, scales: ["x", null] } } : {}),
      },
      scales: {
        x: { time: false, range: (_, low, high) => (chart.bars || low === high ? [low - half, high + half] : [low, high]) },
        y: isLog ? { distr: 3, log: 2, range: () => log.range } : { range: (_, low, high) => yRange(fromZero, low, high) },
      },
      axes: [
        { ...axis, size: 24, gap: 4, grid: { show: false }, space: 70, incrs: [1, 2, 5].flatMap((k) => [k, 10 * k, 100 * k, 1e3 * k, 1e4 * k, 1e5 * k, 1e6 * k]).sort((a, b) => a - b), values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en-US")) },
        {
          ...axis, gap: 6, space: 30, grid: { stroke: variable("--grid"), width: 1 },
          size: (plot, labels) => {
            if (!labels) return 40;
            plot.ctx.save();
            plot.ctx.font = `${11 * devicePixelRatio}px sans-serif`;
            const widest = Math.max(...labels.map((label) => plot.ctx.measureText(label).width)) / devicePixelRatio;
            plot.ctx.restore();
            return Math.ceil(widest) + 14;
          },
          ...(isLog ? { splits: () => log.ticks, filter: (_, ticks) => ticks, values: (_, ticks) => ticks.map(power) } : { values: (_, ticks) => ticks.map((tick) => plain(tick) + suffix) }),
        },
      ],
      series: [{}, ...series.map((line) => ({
        label: line.name, spanGaps: true, stroke: color(line.color),
        width: line.faint ? 1 : chart.bars ? 0 : 2, alpha: line.faint ? 0.3 : 1,
        ...(chart.bars ? { fill: color(line.color), paths: bars } : {}),
        ...(stepped ? { paths: stepped } : {}),
        points: { show: !chart.bars && measured(line.values).length <= MARKERS_UP_TO, size: 6, fill: color(line.color) },
      }))],
    };
  }

  function drawMarks(plot, marks) {
    const { ctx, bbox } = plot;
    const style = getComputedStyle(document.documentElement);
    ctx.save();
    ctx.strokeStyle = style.getPropertyValue("--faint").trim();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { x } of marks) {
      if (x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const left = Math.round(plot.valToPos(x, "x", true));
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function draw(element, first, { onPoint, sync } = {}) {
    let chart, plot = null, series = [], area, legend, entries, observer = null, downAt = 0;

    const factorOf = () => scaled(chart)[0];
    const label = () => chart.xLabel ?? "step";

    /* What decides the structure of the plot: with another one it is built anew. */
    const shape = (next) => JSON.stringify([next.title, next.unit, next.log, next.bars, constant(next) === null, next.lines.map((line) => line.name)]);

    function readout(index) {
      const i = index ?? chart.x.length - 1;
      const x = chart.x[i];
      entries.x.textContent = `${label()} ${plain(x ?? 0)}`;
      const parts = [];
      series.forEach((line, k) => {
        let value = line.values[i] ?? null;
        if (index === null && value === null) value = measured(line.values).at(-1) ?? null; // the last one
        const text = value === null ? "–" : format(value, chart.unit);
        entries.values[k].textContent = text;
        if (value !== null) parts.push(`${line.name} ${text}`);
      });
      const mark = chart.marks?.find((mark) => mark.x === x);
      area.setAttribute("aria-valuenow", String(x ?? 0));
      area.setAttribute("aria-valuetext", [`${label()} ${x}`, ...parts, ...(mark ? [mark.label] : [])].join(", "));
    }

    function move(index) {
      const i = Math.max(0, Math.min(chart.x.length - 1, index));
      const { min, max } = plot.scales.x;
      if (chart.x[i] < min || chart.x[i] > max) plot.setData(plot.data); // out of a zoom
      plot.setCursor({ left: plot.valToPos(chart.x[i], "x"), top: plot.over.clientHeight / 2 }, true, true);
    }

    const hide = () => plot.setCursor({ left: -10, top: -10 }, true, true);

    function onKey(event) {
      if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
      const at = plot.cursor.idx ?? (event.key === "ArrowRight" ? -1 : chart.x.length);
      const far = Math.max(1, Math.round(chart.x.length / 10));
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - far, PageUp: at + far, Home: 0, End: chart.x.length - 1 };
      if (event.key in moves) move(moves[event.key]);
      else if (event.key === "Escape") hide();
      else if (event.key === "Enter" && onPoint && plot.cursor.idx !== null) onPoint(chart.x[plot.cursor.idx]);
      else return;
      event.preventDefault();
    }

    function build() {
      const data = [chart.x, ...series.map((line) => line.drawn)];
      const hooks = {
        setCursor: [(plot) => readout(plot.cursor.left >= 0 ? plot.cursor.idx ?? null : null)],
        drawAxes: [(plot) => drawMarks(plot, chart.marks ?? [])],
      };
      plot = new uPlot(options(chart, series, area.clientWidth, hooks, sync), data, area);
      plot.over.addEventListener("pointerdown", (event) => { downAt = event.clientX; });
      // (uPlot swallows clicks beside a point, because the cursor snaps to it between down and up.)
      plot.over.addEventListener("pointerup", (event) => {
        const moved = Math.abs(event.clientX - downAt) > 4; // a zoom
        if (!onPoint || moved || event.button !== 0 || plot.cursor.idx === null) return;
        const x = chart.x[plot.cursor.idx];
        setTimeout(() => onPoint(x)); // after uPlot's own handlers
      });
    }

    function clear() {
      observer?.disconnect();
      plot?.destroy();
      plot = observer = null;
      element.replaceChildren();
    }

    function start() {
      const fixed = constant(chart);
      if (fixed !== null || chart.x.length === 0) {
        element.append(make("p", "constant", fixed ?? "no values"));
        return;
      }
      const built = seriesOf(chart, factorOf());
      series = built.series;
      area = make("div", "plot" + (onPoint ? " clickable" : "") + (chart.bars ? " tall" : ""));
      area.tabIndex = 0;
      area.setAttribute("role", "slider");
      area.setAttribute("aria-label", `${chart.title || "chart"}; arrow keys move the cursor`);
      area.setAttribute("aria-valuemin", String(chart.x[0]));
      area.setAttribute("aria-valuemax", String(chart.x.at(-1)));
      area.addEventListener("keydown", onKey);
      area.addEventListener("blur", () => { if (plot) hide(); });
      legend = make("div", "legend");
      entries = { x: make("span", "at"), values: [] };
      legend.append(entries.x);
      for (const line of series) {
        const entry = make("span", line.faint ? "entry faint" : "entry"), value = make("b");
        entry.append(make("i", `dot c${line.color % COLORS}`), `${line.name} `, value);
        entries.values.push(value);
        legend.append(entry);
      }
      if (chart.bars) legend.append(...[...legend.querySelectorAll(".entry")].reverse()); // lowest first
      element.append(area, legend);
      const notes = [chart.note, built.window ? `strong line: running mean of ${built.window} points` : ""].filter(Boolean);
      if (notes.length) element.append(make("p", "hint", notes.join("; ")));
      readout(null);
      // A chart in a folded section has no width until it opens.
      observer = new ResizeObserver(() => {
        const width = area.clientWidth;
        if (width === 0) return;
        if (plot === null) build();
        else if (plot.width !== width) plot.setSize({ width, height: plot.height });
      });
      observer.observe(area);
      if (area.clientWidth > 0) build();
    }

    function update(next) {
      const isSame = chart !== undefined && plot !== null && shape(next) === shape(chart);
      const window = isSame ? seriesOf(next, scaled(next)[0]) : null;
      // The unit of bytes and the number of drawn lines may change with the values.
      if (!isSame || scaled(next)[1] !== scaled(chart)[1] || window.series.length !== series.length || next.log || next.bars) {
        const hadFocus = area !== undefined && document.activeElement === area;
        chart = next;
        clear();
        start();
        if (hadFocus) area.focus({ preventScroll: true });
        return;
      }
      const isZoomed = plot.scales.x.min > chart.x[0] || plot.scales.x.max < chart.x.at(-1);
      chart = next;
      series = window.series;
      area.setAttribute("aria-valuemin", String(chart.x[0]));
      area.setAttribute("aria-valuemax", String(chart.x.at(-1)));
      plot.setData([chart.x, ...series.map((line) => line.drawn)], !isZoomed);
      if (isZoomed) plot.redraw();
      readout(plot.cursor.left >= 0 ? plot.cursor.idx ?? null : null);
    }

    const dark = matchMedia("(prefers-color-scheme: dark)");
    const repaint = () => plot?.redraw(false);
    dark.addEventListener("change", repaint);
    update(first);
    return { update, destroy: () => { dark.removeEventListener("change", repaint); clear(); } };
  }

  function card(chart, options = {}) {
    const element = make("figure", "card chart"), caption = make("figcaption"), body = make("div");
    const title = make("b"), unit = make("span");
    caption.append(title, " ", unit);
    element.append(caption, body);
    const name = (next) => { title.textContent = next.title; unit.textContent = scaled(next)[1]; };
    name(chart);
    const drawn = draw(body, chart, options);
    return { element, update: (next) => { name(next); drawn.update(next); }, destroy: () => { drawn.destroy(); element.remove(); } };
  }

  /* A table of the report has a row per x and a column per line. Its numbers are those that are drawn. */
  function read(table) {
    const { title, unit, factor, log, bars, note } = table.dataset;
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => (cell.textContent.trim() === "" ? null : Number(cell.textContent))));
    const names = [...table.tHead.rows[0].cells].slice(1).map((cell) => cell.textContent);
    return {
      title, unit, note, log: log !== undefined, bars: bars !== undefined, x: rows.map((row) => row[0]),
      lines: names.map((name, i) => ({ name, values: rows.map((row) => (row[i + 1] === null || row[i + 1] === undefined ? null : row[i + 1] * Number(factor))) })),
    };
  }

  return { draw, card, read, format, unit: (chart) => scaled(chart)[1] };
})();
