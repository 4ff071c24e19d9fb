"use strict";
// Draws charts with uPlot: those of a page whose data lies in #charts, where a figure says which one it shows, and for other scripts.
(() => {
  const style = getComputedStyle(document.documentElement);
  const [soft, line] = [style.getPropertyValue("--soft").trim(), style.getPropertyValue("--line").trim()];
  const hues = ["#2f6fde", "#d1495b", "#2a9d5c", "#b7791f", "#7b4fd0", "#0f8b8d", "#8c5a3c", "#6b7684"];
  const figure = (value) =>
    value == null ? "–" : Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 });
  const tick = (_, values) =>
    values.map((value) => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 }));
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, values: tick };
  const series = (chart) =>
    chart.series.map((each, index) => {
      const hue = hues[index % hues.length];
      const common = { label: each.name, stroke: hue, width: 1.5, value: (_, value) => figure(value) };
      if (chart.steps) return { ...common, fill: hue + "33", paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
      if (each.dots) return { ...common, paths: () => null, points: { show: true, size: 7, fill: hue } };
      return { ...common, spanGaps: true };
    });
  window.columns = (chart) => [chart.x, ...chart.series.map((each) => each.values)];
  window.draw = (holder, chart) => {
    const size = () => ({ width: Math.max(holder.clientWidth - 24, 200), height: 220 });
    const options = {
      ...size(),
      scales: { x: { time: false }, y: chart.steps ? { range: (_, low, high) => [0, Math.max(high * 1.05, 1)] } : {} },
      axes: [axis, { ...axis, size: 66 }],
      cursor: chart.unit === "step" ? { sync: { key: "step" } } : {},
      series: [{ label: chart.unit, value: (_, value) => figure(value) }, ...series(chart)],
    };
    const plot = new uPlot(options, columns(chart), holder);
    // a figure gets narrower, too, when another one is put beside it
    new ResizeObserver(() => size().width === plot.width || plot.setSize(size())).observe(holder);
    return plot;
  };
  const data = document.getElementById("charts");
  const figures = data ? [...document.querySelectorAll("figure[data-chart]")] : [];
  window.charts = figures.map((holder) => draw(holder, JSON.parse(data.textContent)[Number(holder.dataset.chart)]));
})();
