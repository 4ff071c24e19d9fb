"use strict";
// Rows that one can look through: shows a page of those that stand in #rows and in the template #further, and makes nothing.
(() => {
  const list = document.getElementById("rows");
  if (!list) return;
  const [find, source, state, order, count, more] = ["find", "source", "state", "order", "count", "more"].map((id) => document.getElementById(id));
  const page = Math.max(list.children.length, 1);
  const rows = [...list.children, ...document.getElementById("further").content.children].map((row, at) => ({ row, at, text: row.textContent.toLowerCase(), ...row.dataset }));
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
  let found = [];
  const show = (from) => {
    list.append(...found.slice(from, from + page).map((one) => one.row));
    more.hidden = found.length <= from + page;
  };
  const choose = () => {
    const word = find.value.toLowerCase();
    const here = rows.filter((one) => (one.why || "") === state.value);
    found = here.filter((one) => one.text.includes(word) && (!source.value || one.source === source.value)).sort(orders[order.value]);
    list.replaceChildren();
    show(0);
    count.textContent = `${found.length} of ${here.length}`;
  };
  for (const control of [find, source, state, order]) control.addEventListener("input", choose);
  more.addEventListener("click", () => show(list.children.length));
  document.getElementById("browse").hidden = false;
  choose();
})();
