"use strict";
// Shows the view that the address names.
(() => {
  let scope = null;

  async function show() {
    scope?.end();
    const mine = (scope = new Watch.Scope());
    const { name, params } = Watch.address(), view = document.getElementById("view");
    delete view.dataset.done;
    view.replaceChildren();
    Watch.live("");
    const draw = Object.hasOwn(Watch.views, name) ? Watch.views[name] : null;
    if (!draw) Watch.path(["Unknown page"]);
    try {
      if (!draw) throw new Error(`There is no page ${name}.`);
      await draw(view, params, mine);
    } catch (error) {
      if (!mine.ended) view.append(Watch.problem(error.message), Watch.make("p", {}, Watch.make("a", { href: "#/" }, "All runs")));
    }
    if (!mine.ended) view.dataset.ready = name;
  }

  addEventListener("hashchange", () => { delete document.getElementById("view").dataset.ready; scrollTo(0, 0); show(); });
  document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("view").focus(); });
  show();
})();
