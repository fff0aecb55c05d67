"use strict";
// Helpers of all views. Texts of runs are only ever set as textContent.
const Watch = (() => {
  const views = {};

  // Returns an element: make("a", {class: "x", href: "#/"}, "text", child, ...). null children are left out.
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
    return node;
  }

  const svg = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };

  function sparkline(values, label) {
    const low = Math.min(...values), high = Math.max(...values);
    const x = (i) => (100 * i) / Math.max(1, values.length - 1);
    const y = (value) => (high > low ? 26 - 24 * ((value - low) / (high - low)) : 14);
    const box = svg("svg", { viewBox: "0 0 100 28", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label });
    box.append(svg("polyline", { points: values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
    return box;
  }

  // The address: #/view?key=value. Repeated keys are kept.
  function address() {
    const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
    return { name: path || "runs", params: new URLSearchParams(query) };
  }

  function link(name, params) {
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries(params))
      for (const one of Array.isArray(value) ? value : [value]) if (one !== "" && one !== null && one !== undefined) query.append(key, one);
    return `#/${name === "runs" ? "" : name}${String(query) ? `?${query}` : ""}`;
  }

  // Changes parameters of the address in place: the view keeps running.
  function remember(changes) {
    const { name, params } = address();
    const all = {};
    for (const key of params.keys()) all[key] = params.getAll(key);
    history.replaceState(null, "", link(name, { ...all, ...changes }));
  }

  async function get(path, params = {}) {
    let reply;
    try {
      reply = await fetch(`/api/${path}?${new URLSearchParams(params)}`, { headers: { Accept: "application/json" } });
    } catch {
      throw new Error("The server does not answer. Is burnish watch still running?");
    }
    if (reply.status === 401) location.assign("/login");
    const content = await reply.json().catch(() => ({ error: `The server answered with status ${reply.status}.` }));
    if (!reply.ok) throw new Error(content.error);
    return content;
  }

  // What a view started, ended when another one is shown.
  class Scope {
    constructor() { this.ended = false; this.ends = []; }
    onEnd(action) { this.ends.push(action); }
    end() { this.ended = true; for (const action of this.ends) action(); }
    // Listens to events of the server while the page is visible: browsers allow six connections per server.
    listen(path, params, handlers) {
      const query = new URLSearchParams(params);
      let source = null;
      const close = () => { source?.close(); source = null; };
      const open = () => {
        if (source || this.ended || document.hidden) return;
        source = new EventSource(`/api/${path}?${query}`);
        source.addEventListener("open", () => handlers.open?.());
        source.addEventListener("error", () => handlers.lost?.());
        source.addEventListener("end", () => { close(); handlers.end?.(); });
        for (const [name, handle] of Object.entries(handlers.on))
          source.addEventListener(name, (event) => { if (!this.ended) handle(JSON.parse(event.data)); });
      };
      const change = () => (document.hidden ? handlers.once || close() : handlers.once || open());
      document.addEventListener("visibilitychange", change);
      this.onEnd(() => { document.removeEventListener("visibilitychange", change); close(); });
      open();
      return close;
    }
  }

  const number = (x, digits = 3) => (x === null || x === undefined ? "" : Number(x.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: digits }));
  const signed = (x, digits = 2) => (x === null || x === undefined ? "" : (x > 0 ? "+" : "") + number(x, digits));
  const tone = (x) => (x === null || x === undefined || Math.abs(x) < 1e-9 ? "" : x > 0 ? " up" : " down");

  function duration(seconds) {
    if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
    return `${Math.round(seconds / 86400)} d`;
  }

  const problem = (text) => make("p", { class: "problem", role: "alert" }, text);
  const pill = (text, kind = "") => make("span", { class: `pill ${kind}` }, text);

  function path(...parts) {
    const nav = document.getElementById("path");
    nav.replaceChildren(...parts.flatMap(([text, href]) => [make("span", { class: "sep", "aria-hidden": "true" }, "/"), href ? make("a", { href }, text) : make("span", { "aria-current": "page" }, text)]));
    document.title = [...parts.map(([text]) => text).reverse(), "Burnish"].join(" · ");
  }

  const live = (text) => { document.getElementById("live").textContent = text; };

  function later(action, ms) {
    let timer;
    return (...values) => { clearTimeout(timer); timer = setTimeout(() => action(...values), ms); };
  }

  return { views, make, sparkline, address, link, remember, get, Scope, number, signed, tone, duration, problem, pill, path, live, later };
})();
