// The data, the state, and how nodes are made. Strings become text nodes, never markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const onPaper = matchMedia("print");
const state = { printing: false, layer: null, stack: "" };

/** An object's own entry; undefined for names that every object inherits, such as `constructor` and `__proto__`. */
const own = (object, key) => (Object.hasOwn(object, key) ? object[key] : undefined);

const byId = (id) => document.getElementById(id);
const paper = () => state.printing || onPaper.matches;
const dark = () => prefersDark.matches && !paper();

/** An element with attributes (`class`, `for`, ...), listeners (`onclick`) and children (nodes or strings). */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Text from the data, kept from turning the direction of what stands around it. */
const isolated = (text, attributes = {}) => el("bdi", attributes, text);

/** The text that an element of the page holds compressed (gzip, base64). */
async function unpacked(id) {
  const letters = atob(byId(id).textContent.trim());
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at); // ten times as fast as Uint8Array.from
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** A labelled `<select>`; `choices` are strings, `choose` gets the index. */
function picker(id, label, choices, choose) {
  const options = choices.map((choice, index) => el("option", { value: index }, choice));
  return el("span", { class: "field" }, el("label", { for: id }, label), el("select", { id, onchange: (event) => choose(Number(event.target.value)) }, ...options));
}

const counted = (number) => number.toLocaleString("en");

/** A number with four significant digits, whole numbers whole; en dash where there is none. */
function readable(value) {
  if (value == null) return "–";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

/** Labels for plotly write markup characters as entities; this reads them back. */
const plain = (text) => String(text).replace(/<br>/g, " ").replace(/&#123;/g, "{").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");

/** A name that may break after its dots and underscores, but not inside a number. */
const breakable = (name) => el("bdi", {}, ...String(name).split(/(?<=[._])(?!\d)/).flatMap((part) => [part, el("wbr")]));

/** A table whose first column names the rows; scrolls sideways on its own where it is too wide. */
function scrollingTable({ title, columns, rows, corner = "", text = false }) {
  const head = el("tr", {}, el("th", { scope: "col" }, corner), ...columns.map((name) => el("th", { scope: "col" }, breakable(name))));
  const body = rows.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, breakable(name)), ...cells.map((cell) => el("td", {}, isolated(cell)))));
  const table = el("table", { class: text ? "data text" : "data" }, ...(columns.some(Boolean) ? [el("thead", {}, head)] : []), el("tbody", {}, ...body));
  return el("div", { class: "verdict-table", tabindex: "0", role: "region", "aria-label": title }, table);
}

/** The same under its title, with a note; behind its title where it is long. */
function titledTable(table) {
  const note = table.note ? [el("p", { class: "subtitle" }, table.note)] : [];
  if (table.folded) return el("details", { class: "titled about" }, el("summary", {}, table.title), ...note, scrollingTable(table));
  return el("div", { class: "titled" }, el("h3", {}, table.title), ...note, scrollingTable(table));
}

/** Prompts and the texts that continue them. */
function makeTexts({ title, items, note }) {
  const texts = items.map(([prompt, text]) => el("li", {}, isolated(prompt, { class: "prompt" }), isolated(text)));
  const under = note ? [el("p", { class: "subtitle" }, note)] : [];
  return el("div", { class: "titled" }, ...(title ? [el("h3", {}, title)] : []), ...under, el("ol", { class: "texts" }, ...texts));
}
