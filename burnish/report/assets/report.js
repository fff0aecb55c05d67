"use strict";
// The report: its charts are drawn from the tables below them, its samples from embedded JSON.
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
  const samples = json("samples-data");
  if (samples) BurnishSamples.table(document.getElementById("samples-table"), BurnishSamples.rows(samples));
})();
