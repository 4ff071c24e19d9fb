"use strict";
// Draws charts with uPlot: those of a page whose data lies in #charts, where a figure says which one it shows, and for other scripts.
(() => {
  const hues = ["#2f6fde", "#d1495b", "#2a9d5c", "#b7791f", "#7b4fd0", "#0f8b8d", "#8c5a3c", "#6b7684"];
  const figure = (value) =>
    value == null ? "–" : Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 });
  const tick = (_, values) =>
    values.map((value) => value == null ? "" : value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 }));
  const axis = () => {
    const style = getComputedStyle(document.documentElement);
    const [soft, line] = [style.getPropertyValue("--soft").trim(), style.getPropertyValue("--line").trim()];
    return { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, values: tick };
  };
  // averages of a line up to each value; one before it counts `share` of the next. Their sum of weights is one from the first value on.
  window.averages = (values, share) => {
    let [sum, weight] = [0, 0];
    return values.map((value) => {
      if (value == null) return null;
      sum = share * sum + (1 - share) * value;
      weight = share * weight + (1 - share);
      return sum / weight;
    });
  };
  const lines = (chart) => (chart.unit === "step" ? chart.series.filter((each) => !each.dots && each.values.length > 1) : []);
  const series = (chart, share) => {
    const all = chart.series.map((each, index) => {
      const hue = hues[index % hues.length];
      const common = { label: each.name, stroke: hue, width: 1.5, value: (_, value) => figure(value) };
      if (chart.steps) return { ...common, fill: hue + "33", paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
      if (each.dots) return { ...common, paths: () => null, points: { show: true, size: 7, fill: hue } };
      return { ...common, spanGaps: true, ...(share ? { stroke: hue + "44" } : {}) };
    });
    const smooth = (each) => {
      const hue = hues[chart.series.indexOf(each) % hues.length];
      return { label: `${each.name}, smoothed`, stroke: hue, width: 2, spanGaps: true, points: { show: false }, value: (_, value) => figure(value) };
    };
    return share ? [...all, ...lines(chart).map(smooth)] : all;
  };
  window.columns = (chart, share = 0) => [
    chart.x,
    ...chart.series.map((each) => each.values),
    ...(share ? lines(chart).map((each) => averages(each.values, share)) : []),
  ];
  const spans = (chart) => {
    const values = chart.series.flatMap((each) => each.values.filter((value) => value != null));
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    return low > 0 && values.reduce((a, b) => Math.max(a, b), 0) > 4 * low;
  };
  // share: of smoothing, 0: none; log: whether an axis may be logarithmic
  window.draw = (holder, chart, { share = 0, log = false } = {}) => {
    const size = () => ({ width: Math.max(holder.clientWidth - 24, 200), height: 220 });
    const rising = chart.steps ? { range: (_, low, high) => [0, Math.max(high * 1.05, 1)] } : {};
    const options = {
      ...size(),
      scales: { x: { time: false }, y: log && !chart.steps && spans(chart) ? { distr: 3 } : rising },
      axes: [axis(), { ...axis(), size: 66 }],
      cursor: chart.unit === "step" ? { sync: { key: "step" } } : {},
      series: [{ label: chart.unit, value: (_, value) => figure(value) }, ...series(chart, share)],
      hooks: { destroy: [() => watch.disconnect()] },
    };
    const plot = new uPlot(options, columns(chart, share), holder);
    // a figure gets narrower, too, when another one is put beside it
    const watch = new ResizeObserver(() => size().width === plot.width || plot.setSize(size()));
    watch.observe(holder);
    return plot;
  };
  const data = document.getElementById("charts");
  if (!data) return;
  const all = JSON.parse(data.textContent);
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const [tools, smooth, log] = ["tools", "smooth", "log"].map((id) => document.getElementById(id));
  window.charts = [];
  const redraw = () => {
    const how = tools ? { share: Number(smooth.value), log: log.checked } : {};
    window.charts.forEach((plot) => plot.destroy());
    window.charts = figures.map((holder) => draw(holder, all[Number(holder.dataset.chart)], how));
  };
  redraw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  if (!tools) return;
  tools.hidden = !all.some((chart) => lines(chart).length);
  log.parentElement.hidden = !all.some((chart) => chart.unit === "step" && spans(chart));
  smooth.addEventListener("input", () => {
    document.getElementById("smoothed").textContent = smooth.value;
    redraw();
  });
  log.addEventListener("change", redraw);
})();
