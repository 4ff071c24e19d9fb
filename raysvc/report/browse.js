"use strict";
// Rows that one can look through: filters, sorts and searches those of #table, and draws a page of what is found.
window.browsed = (async () => {
  const list = document.getElementById("rows");
  if (!list) return;
  const [find, source, state, order, count, more] = ["find", "source", "state", "order", "count", "more"].map((id) => document.getElementById(id));
  const packed = Uint8Array.from(atob(document.getElementById("table").textContent), (one) => one.charCodeAt(0));
  const table = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  const page = Number(list.dataset.shown);
  const figure = (value) => value.toLocaleString("en");
  const make = (tag, ...inside) => {
    const one = document.createElement(tag);
    one.append(...inside);
    return one;
  };
  // text as [tags, text]; tags stand one in the other
  const mark = ([tags, text]) => tags.split(" ").reduceRight((inside, tag) => make(tag, inside), text);
  const framed = (name, ...inside) => Object.assign(make("div", ...inside), { className: name });
  const rows = table.id.map((id, at) => ({
    id,
    tokens: table.tokens[at],
    share: table.trained[at] / Math.max(table.tokens[at], 1),
    source: table.sources[table.source[at]],
    loss: table.loss[at],
    steps: table.steps[at],
    ...table.texts[at],
  }));
  rows.push(...table.aside.map((one) => ({ ...one, id: `source row ${one.shown}`, runs: [["span", `${one.why}\n${one.detail}`]] })));
  const facts = (row) =>
    row.why
      ? ["quarantined"]
      : [`${figure(row.tokens)} tokens`, `${Math.round(100 * row.share)}% trained`, ...(row.loss == null ? [] : [`loss ${row.loss.toFixed(3)}`])];
  const begin = (row) =>
    row.why || (row.runs || []).filter(([tags]) => !tags.endsWith("i")).map(([, text]) => text).join("").slice(0, 480).replace(/\s+/g, " ").slice(0, 120);
  const command = (row) => `${table.command} ${row.why ? `--source-row ${row.shown}` : `--row ${row.id}`}`;
  const opened = (row) => {
    const where = [(table.sources.length > 1 || row.why) && row.source && `source ${row.source}`, row.steps && `trained in step ${row.steps.join(", ")}`].filter(Boolean).join("; ");
    const parts = [make("p", where ? `${where}. ` : "", make("code", command(row)), row.runs ? "" : " prints its text, which is not in this page.")];
    if (row.runs) parts.push(framed("row", ...row.runs.map(mark)));
    if (row.ids) {
      const ids = make("details", make("summary", "Tokens and ids"));
      // an id with loss is written as -id - 1
      const shown = () => ids.append(framed("ids", ...row.ids.map((id) => make(id < 0 ? "b" : "span", make("code", table.pieces[id < 0 ? ~id : id]), String(id < 0 ? ~id : id)))));
      ids.addEventListener("toggle", shown, { once: true });
      parts.push(ids);
    }
    return parts;
  };
  const drawn = (row) => {
    const one = make("details", make("summary", ...[row.id, ...facts(row)].map((text) => make("span", text)), make("q", begin(row))));
    one.addEventListener("toggle", () => one.append(...opened(row)), { once: true });
    return one;
  };
  const orders = {
    ...(rows.some((one) => !one.runs) ? { "with their text": (a, b) => Number(!a.runs) - Number(!b.runs) } : {}),
    entry: () => 0,
    longest: (a, b) => b.tokens - a.tokens,
    shortest: (a, b) => a.tokens - b.tokens,
    "most trained": (a, b) => b.share - a.share,
    "least trained": (a, b) => a.share - b.share,
  };
  if (rows.some((one) => one.loss != null)) orders["highest loss"] = (a, b) => (b.loss ?? -Infinity) - (a.loss ?? -Infinity);
  for (const name of Object.keys(orders)) order.add(new Option(name === "entry" ? "in the order of the entry" : `${name} first`, name));
  for (const [name, number] of Object.entries(table.quarantined)) state.add(new Option(`quarantined: ${name} (${figure(number)})`, name));
  if (state.options.length > 2) state.add(new Option("quarantined: all reasons", "*"));
  state.hidden = state.options.length < 2;
  for (const name of table.sources) source.add(new Option(name, name));
  source.hidden = source.options.length < 3;
  const texts = new Map(); // of rows, in small letters, once somebody searches
  const text = (row) => {
    if (!texts.has(row)) texts.set(row, (row.runs || []).map((run) => run[1]).join("").toLowerCase());
    return texts.get(row);
  };
  const all = (why) => (why === "*" ? Object.values(table.quarantined).reduce((sum, one) => sum + one, 0) : why ? table.quarantined[why] : table.written);
  let found = [];
  const show = (from) => {
    list.append(...found.slice(from, from + page).map(drawn));
    more.hidden = found.length <= from + page;
  };
  const choose = () => {
    const word = find.value.trim().toLowerCase();
    const here = (row) => (state.value === "*" ? row.why : (row.why || "") === state.value) && (!source.value || row.source === source.value);
    found = rows.filter((row) => here(row) && (!word || row.id === word || text(row).includes(word))).sort(orders[order.value]);
    list.replaceChildren();
    show(0);
    count.textContent = `${figure(found.length)} of ${figure(all(state.value))}`;
  };
  for (const control of [find, source, state, order]) control.addEventListener("input", choose);
  more.addEventListener("click", () => show(list.children.length));
  document.getElementById("browse").hidden = false;
  choose();
})();
