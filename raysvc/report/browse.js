"use strict";
// Rows that one can look through: filters, sorts and searches those of #table, and draws a page of what is found.
window.browsed = (async () => {
  const list = document.getElementById("rows");
  if (!list) return;
  const [find, source, state, order, count, more] = ["find", "source", "state", "order", "count", "more"].map((id) => document.getElementById(id));
  const inflated = (id) => {
    const text = atob(document.getElementById(id).textContent);
    const packed = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at++) packed[at] = text.charCodeAt(at);
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate")));
  };
  const table = await inflated("table").json();
  const stream = new Uint8Array(await inflated("tokens").arrayBuffer());
  const page = Number(list.dataset.shown);
  const LONG = 24; // characters that all rows of a page begin with: they tell nothing
  const figure = (value) => value.toLocaleString("en");
  const counted = (value, one) => `${figure(value)} ${one}${value === 1 ? "" : "s"}`;
  const make = (tag, ...inside) => {
    const one = document.createElement(tag);
    one.append(...inside);
    return one;
  };
  // what stands in tags that stand one in the other
  const mark = ([tags, ...inside]) => tags.split(" ").reduceRight((inner, tag) => [make(tag, ...inner)], inside)[0];
  const framed = (name, ...inside) => Object.assign(make("div", ...inside), { className: name });
  let end = 0;
  const rows = table.id.map((id, at) => ({
    id,
    tokens: table.tokens[at],
    share: table.trained[at] / Math.max(table.tokens[at], 1),
    source: table.sources[table.source[at]],
    loss: table.loss[at],
    role: table.roles[at],
    second: at % 2 === 1,
    steps: table.steps[at],
    untrained: table.untrained[at],
    kept: table.kept[at],
    first: end,
    end: (end += table.kept[at]),
  }));
  // rows that stay together: one, or the two of a pair
  const units = table.roles.length ? rows.flatMap((row, at) => (row.second ? [] : [[row, rows[at + 1]]])) : rows.map((row) => [row]);
  const aside = table.aside.map((one) => ({ ...one, id: `source row ${one.shown}` }));
  units.push(...aside.map((row) => [row]));
  // a bit for each token that is held, then its number in table.ids, in groups of seven bits
  const hit = (at) => (stream[at >> 3] >> (7 - (at & 7))) & 1;
  const numbers = new Uint32Array(end);
  for (let at = 0, from = (end + 7) >> 3; at < end; at++) {
    let group = 0;
    do numbers[at] |= (stream[from] & 127) << (7 * group++);
    while (stream[from++] > 127);
  }
  const pieces = table.pieces.map((text) => Uint8Array.from(text, (one) => one.charCodeAt(0)));
  const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
  // of neighbouring tokens, which may share the bytes of a character
  const joined = (from, to) => {
    let size = 0;
    for (let at = from; at < to; at++) size += pieces[numbers[at]].length;
    const bytes = new Uint8Array(size);
    for (let at = from, place = 0; at < to; place += pieces[numbers[at++]].length) bytes.set(pieces[numbers[at]], place);
    return utf8.decode(bytes);
  };
  const tags = (at) => [...(hit(at) ? ["b"] : []), ...(table.special[numbers[at]] ? ["i"] : [])].join(" ") || "span";
  const runs = (row) => {
    if (row.why) return [["span", row.text]];
    const found = [];
    const gap = row.kept < row.tokens ? row.first + Math.ceil(row.kept / 2) : -1;
    for (let at = row.first, from = at; at < row.end; from = at) {
      while (++at < row.end && at !== gap && tags(at) === tags(from));
      found.push([tags(from), joined(from, at)]);
      if (at === gap) found.push(["i", ` […${figure(row.tokens - row.kept)} tokens…] `]);
    }
    return found;
  };
  const facts = (row) =>
    row.why
      ? [`quarantined: ${[row.why, row.detail].filter(Boolean).join(", ")}`]
      : [row.role, counted(row.tokens, "token"), `${Math.round(100 * row.share)}% trained`, row.loss != null && `${row.role ? "pair's loss" : "loss"} ${row.loss.toFixed(3)}`, row.untrained && "not trained"].filter(Boolean);
  const begin = (row) =>
    row.why ? row.text : runs({ ...row, end: Math.min(row.end, row.first + 480) }).filter(([tags]) => !tags.endsWith("i")).map(([, text]) => text).join("").replace(/\s+/g, " ");
  // characters with which all of some texts begin, a system message as a rule
  const shared = ([first = "", ...others]) => {
    let size = 0;
    while (size < first.length && others.every((one) => one[size] === first[size])) size++;
    return others.length ? first.lastIndexOf(" ", size - 1) + 1 : 0;
  };
  const command = (row) => `${table.command} ${row.why ? `--source-row ${row.shown}` : `--row ${row.id}`}`;
  const opened = (row) => {
    const where = [(table.sources.length > 1 || row.why) && row.source && `source ${row.source}`, row.steps && `trained in step ${row.steps.join(", ")}`, row.untrained && `not trained: ${row.untrained}`].filter(Boolean).join("; ");
    const parts = [make("p", where ? `${where}. ` : "", make("code", command(row)), row.kept || row.why ? "" : " prints its text, which is not in this page.")];
    if (row.kept || row.why) parts.push(framed("row", ...runs(row).map(mark)));
    if (row.kept) {
      const ids = make("details", make("summary", "Tokens and ids"));
      const token = (at) => mark([tags(at), make("code", joined(at, at + 1)), String(table.ids[numbers[at]])]);
      const shown = () => ids.append(framed("ids", ...Array.from({ length: row.kept }, (_, place) => token(row.first + place))));
      ids.addEventListener("toggle", shown, { once: true });
      parts.push(ids);
    }
    return parts;
  };
  const drawn = (row, text) => {
    const one = make("details", make("summary", ...[row.id, ...facts(row)].map((fact) => make("span", fact)), make("q", text.slice(0, 120))));
    one.addEventListener("toggle", () => one.append(...opened(row)), { once: true });
    if (row.why) one.className = "aside";
    if (row.role) one.className = row.second ? "second" : "first";
    return one;
  };
  // what is smallest comes first; of a pair the smaller one counts
  const orders = {
    ...(table.kept.includes(0) ? { "with their text": (row) => Number(!row.kept) } : {}),
    entry: () => 0,
    longest: (row) => -row.tokens,
    shortest: (row) => row.tokens,
    "most trained": (row) => -row.share,
    "least trained": (row) => row.share,
  };
  if (rows.some((one) => one.loss != null)) orders["highest loss"] = (row) => -(row.loss ?? -Infinity);
  for (const name of Object.keys(orders)) order.add(new Option(name === "entry" ? "in the order of the entry" : `${name} first`, name));
  for (const [name, number] of Object.entries(table.quarantined)) state.add(new Option(`quarantined: ${name} (${figure(number)})`, name));
  if (Object.keys(table.quarantined).length > 1) state.add(new Option("quarantined: all reasons", "*"));
  const idle = {}; // reason -> rows that no step trains
  for (const row of rows) if (row.untrained) idle[row.untrained] = (idle[row.untrained] ?? 0) + 1;
  for (const [why, number] of Object.entries(idle)) state.add(Object.assign(new Option(`not trained: ${why} (${figure(number)})`, why), { idle: number }));
  state.hidden = state.options.length < 2;
  for (const name of table.sources) source.add(new Option(name, name));
  source.hidden = source.options.length < 3;
  const texts = new Map(); // of rows, in small letters, once somebody searches
  const text = (row) => {
    if (!texts.has(row)) texts.set(row, (row.why ? `${row.why}\n${row.detail}\n${row.text}` : joined(row.first, row.end)).toLowerCase());
    return texts.get(row);
  };
  const all = (why) => (why === "*" ? Object.values(table.quarantined).reduce((sum, one) => sum + one, 0) : why ? table.quarantined[why] : table.rows);
  let found = [];
  const show = (from) => {
    const some = found.slice(from, from + page);
    const texts = some.map(begin);
    const same = shared(texts);
    list.append(...some.map((row, at) => drawn(row, same > LONG ? `…${texts[at].slice(same)}` : texts[at])));
    more.hidden = found.length <= from + page;
  };
  const choose = () => {
    const word = find.value.trim().toLowerCase();
    const one = state.selectedOptions[0];
    const is = (row) => (one.idle ? row.untrained === one.value : one.value === "*" ? row.why : (row.why || "") === one.value);
    const here = (row) => is(row) && (!source.value || row.source === source.value);
    const wanted = (row) => here(row) && (!word || row.id === word || text(row).includes(word));
    const place = (unit) => Math.min(...unit.map(orders[order.value]));
    const sorted = units.filter((unit) => unit.some(wanted)).map((unit) => [place(unit), unit]).sort(([a], [b]) => (a < b ? -1 : Number(a > b)));
    found = sorted.flatMap(([, unit]) => unit);
    list.replaceChildren();
    show(0);
    count.textContent = `${figure(found.length)} of ${figure(one.idle ?? all(one.value))}`;
  };
  for (const control of [find, source, state, order]) control.addEventListener("input", choose);
  more.addEventListener("click", () => show(list.children.length));
  document.getElementById("browse").hidden = false;
  choose();
})();
