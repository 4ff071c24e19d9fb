"use strict";
// Rows that one can look through: hides and orders what stands in #rows, and makes nothing.
(() => {
  const list = document.getElementById("rows");
  if (!list) return;
  const [find, source, state, order, count] = ["find", "source", "state", "order", "count"].map((id) => document.getElementById(id));
  const rows = [...list.children].map((row, at) => ({ row, at, text: row.textContent.toLowerCase(), ...row.dataset }));
  const orders = {
    entry: (a, b) => a.at - b.at,
    longest: (a, b) => b.tokens - a.tokens,
    shortest: (a, b) => a.tokens - b.tokens,
    "most trained": (a, b) => b.share - a.share,
    "least trained": (a, b) => a.share - b.share,
  };
  if (rows.some((one) => one.loss)) orders["highest loss"] = (a, b) => (b.loss || -1) - (a.loss || -1);
  for (const name of Object.keys(orders)) order.add(new Option(name === "entry" ? "in the order of the entry" : `${name} first`, name));
  for (const name of new Set(rows.map((one) => one.why).filter(Boolean))) state.add(new Option(`quarantined: ${name}`, name));
  state.hidden = state.options.length < 2;
  for (const name of new Set(rows.map((one) => one.source).filter(Boolean))) source.add(new Option(name, name));
  source.hidden = source.options.length < 3;
  const show = () => {
    const word = find.value.toLowerCase();
    let shown = 0;
    const here = (one) => (one.why || "") === state.value;
    for (const one of rows) {
      one.row.hidden = !(here(one) && one.text.includes(word) && (!source.value || one.source === source.value));
      shown += !one.row.hidden;
    }
    list.append(...rows.sort(orders[order.value]).map((one) => one.row));
    count.textContent = `${shown} of ${rows.filter(here).length}`;
  };
  for (const control of [find, source, state, order]) control.addEventListener("input", show);
  document.getElementById("browse").hidden = false;
  show();
})();
