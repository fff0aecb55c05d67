"use strict";
// The report: its charts are drawn from the tables below them, its samples from compressed JSON.
(() => {
  const page = document.documentElement;
  const json = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
  const marks = json("marks") ?? [];
  for (const figure of document.querySelectorAll("figure.chart")) {
    const numbers = figure.querySelector("details.numbers");
    numbers.open = false; // open without a script
    const chart = BurnishCharts.read(numbers.querySelector("table"));
    BurnishCharts.draw(figure.querySelector(".drawing"), { ...chart, marks }, { sync: "run" });
    figure.querySelector(":scope > .hint")?.remove(); // drawn with the chart
  }
  page.classList.add("drawn");

  const packed = document.getElementById("samples-data"), table = document.getElementById("samples-table");
  async function showSamples() {
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    BurnishSamples.table(table, BurnishSamples.rows(await new Response(stream).json()));
  }
  if (packed) showSamples().catch((error) => { table.textContent = `Samples cannot be shown (${error}). They are in samples/*.parquet.`; });
})();
