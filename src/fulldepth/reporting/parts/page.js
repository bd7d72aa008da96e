// Draws the figures with plotly, redraws them for the colour scheme and the printer, and marks a layer of the strip.

const DATA = JSON.parse(document.getElementById("data").textContent);
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const onPaper = matchMedia("print");
const FINE = matchMedia("(pointer: fine)").matches; // a mouse drags to zoom; a finger scrolls the page
const PRINT_WIDTH = 320; // half of a sheet, A4 or Letter
const state = { printing: false, layer: null, stack: "" };
let round = 0;

const DARK = new Map(Object.entries(DATA.dark)); // also of strings such as `constructor`, which every object inherits
const byId = (id) => document.getElementById(id);
const all = (selector) => [...document.querySelectorAll(selector)];
const paper = () => state.printing || onPaper.matches;
const figureOf = (div) => DATA.figures[div.dataset.figure];

/** An element with attributes and children (nodes or strings, which become text). */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Text from the data, kept from turning the direction of what stands around it. */
const isolated = (text) => el("bdi", {}, text);

/** Run plotly.js, which the page holds compressed (gzip, base64), and draw. */
async function loadPlotly() {
  document.documentElement.dataset.ready = "no";
  try {
    const letters = atob(byId("plotly").textContent.trim());
    const bytes = new Uint8Array(letters.length);
    for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at); // ten times as fast as Uint8Array.from
    const script = el("script", {}, await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
    document.head.append(script);
    script.remove();
  } catch {
    byId("no-figures").textContent = `This browser cannot unpack the figures: they take Chrome 80, Firefox 113 or Safari 16.4. Their numbers: results.parquet of each result folder.`;
    byId("no-figures").hidden = false;
    document.documentElement.dataset.ready = "yes";
    return;
  }
  drawAll();
}

/** A copy of a figure's part with every colour of the light page replaced by its dark counterpart. */
function recoloured(part) {
  if (typeof part === "string") return prefersDark.matches && !paper() ? DARK.get(part) ?? part : part;
  if (Array.isArray(part)) return part.map(recoloured);
  if (part && typeof part === "object") return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, recoloured(value)]));
  return part;
}

function layoutFor(div, { data, layout }) {
  const base = recoloured(layout);
  const isMap = data.some((trace) => trace.type === "heatmap");
  const width = paper() ? PRINT_WIDTH : div.clientWidth;
  if (width < 400) for (const axis of isMap ? [base.xaxis, base.yaxis] : [base.xaxis]) Object.assign(axis, fewerTicks(axis));
  const template = recoloured(DATA.template);
  if (state.layer && base.xaxis.unifiedhovertitle?.text === "Layer %{x}" && !isMap && `${div.dataset.figure.split(":")[1]} `.startsWith(state.stack && `${state.stack} `)) {
    const ends = { x0: state.layer - 0.5, x1: state.layer + 0.5, y0: 0, y1: 1, yref: "paper" };
    base.shapes = [...(base.shapes || []), { type: "rect", ...ends, layer: "below", line: { width: 0 }, fillcolor: template.layout.yaxis.gridcolor }];
  }
  base.xaxis.fixedrange = base.yaxis.fixedrange = !FINE;
  const toolbar = paper() ? 0 : 26; // it may cover no cell and no name of a line
  const height = toolbar + (isMap ? Math.max(240, Math.min(width, 500) * 0.88) : Math.min(base.height, paper() ? 260 : base.height) + legendHeight(base, data, width));
  const margin = { l: width < 480 ? 46 : 56, r: 12, t: (isMap ? 8 : 20) + toolbar, b: 44 };
  const legend = { ...base.legend, ...(toolbar && { yref: "container", y: 1 - toolbar / height, yanchor: "top" }) };
  return { ...base, template, height, width, margin, legend, autosize: false, dragmode: FINE ? "zoom" : false };
}

/** Settings of an axis with at most six of its ticks, the last one among them; without ticks of its own, plotly's. */
function fewerTicks({ tickvals, ticktext }) {
  if (!tickvals || ticktext) return { tickvals: null, ticktext: null, nticks: 6 };
  const step = Math.ceil(tickvals.length / 6);
  return { tickvals: tickvals.filter((_, at) => (tickvals.length - 1 - at) % step === 0) };
}

/** What a legend of several lines takes, so that it does not take it from the figure. */
function legendHeight(layout, data, width) {
  if (!layout.showlegend) return 0;
  const names = data.filter((trace) => trace.showlegend !== false).map((trace) => (trace.name || "").length);
  const columns = Math.max(1, Math.floor((width - 60) / (Math.max(...names) * 6.4 + 46)));
  return (Math.ceil(names.length / columns) - 1) * 20 + (width < 360 ? 30 : 0); // narrow: the axis labels take more, too
}

function draw(div) {
  if (!window.Plotly || (!paper() && div.closest("details.more:not([open])"))) return; // drawn when it is opened
  const figure = figureOf(div);
  Plotly.react(div, recoloured(figure.data), layoutFor(div, figure), {
    displaylogo: false,
    responsive: false,
    displayModeBar: paper() ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"], ["toImage"]],
    toImageButtonOptions: { format: "svg", filename: div.dataset.figure.replace(/[^\w.-]+/g, "_") },
  });
}

/** Redraw every figure, those in sight first, a few milliseconds at a time. */
function drawAll() {
  if (!window.Plotly) return;
  const mine = ++round;
  document.documentElement.dataset.ready = "no";
  const away = (div) => Math.abs(div.getBoundingClientRect().top);
  const queue = all(".plot").sort((a, b) => away(a) - away(b));
  const next = () => {
    if (mine !== round) return;
    const until = performance.now() + 24;
    while (queue.length && performance.now() < until) draw(queue.shift());
    if (queue.length) setTimeout(next);
    else document.documentElement.dataset.ready = "yes";
  };
  next();
}

/** Show another reading of a figure. */
function choose(figure, name) {
  const div = figure.querySelector(".plot");
  div.dataset.figure = name;
  const { title, subtitle, alt } = figureOf(div).about;
  div.ariaLabel = `${title}. ${alt}`;
  figure.querySelector(".subtitle").textContent = subtitle;
  figure.querySelector(".alt").textContent = alt;
  draw(div);
}

/** Mark a layer of a stack in every figure over its layers, and scroll to one of them. */
function showLayer({ target, currentTarget: { dataset } }) {
  const layer = Number(dataset.layer);
  state.layer = state.layer === layer && state.stack === dataset.stack ? null : layer;
  state.stack = dataset.stack;
  const name = target.dataset.figureName || "displacement";
  const div = all(".plot").find((one) => one.dataset.figure.split(":")[0] === name);
  if (div) {
    const figure = div.closest("figure");
    const wanted = [...figure.querySelectorAll(".switch input, .switch option")].find((one) => one.value === `${name}:${dataset.stack}`);
    if (wanted) {
      wanted.checked = wanted.selected = true;
      choose(figure, wanted.value);
    }
    for (let box = div; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
    figure.scrollIntoView({ block: "nearest" });
  }
  drawAll();
}

/** One tab stop a strip, in which arrow keys move. */
function startStrip(strip) {
  for (const layer of strip.children) layer.addEventListener("click", showLayer);
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    const to = step && event.target[step];
    if (!to) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
}

/** On paper the colours are light, the figures fit the sheet, and the notes are open. */
function turnToPaper({ matches }) {
  if (matches === state.printing) return;
  state.printing = matches;
  for (const note of all(".method, .about, .more")) {
    if (matches) note.dataset.was = note.open ? "open" : "closed";
    note.open = matches || note.dataset.was === "open";
  }
  round += 1;
  all(".plot").forEach(draw);
  document.documentElement.dataset.ready = "yes";
}

const word = (index) => DATA.words[index];

/** Lens grid: rows are layers (deepest on top), columns positions. */
function startLens() {
  const [model, sample] = [byId("lens-model"), byId("lens-sample")];
  const chosen = () => DATA.lens[model?.selectedIndex || 0].samples;
  const fillSamples = () => {
    const before = Math.max(0, sample.selectedIndex);
    sample.replaceChildren(...chosen().map((one) => el("option", {}, one.title)));
    sample.selectedIndex = Math.min(before, chosen().length - 1);
    fillLens(chosen()[sample.selectedIndex]);
  };
  model?.addEventListener("change", fillSamples);
  sample.addEventListener("change", () => fillLens(chosen()[sample.selectedIndex]));
  fillSamples();
}

function fillLens(sample) {
  const layers = sample.top.length - 1;
  const head = sample.tokens.map((token, position) => el("th", { scope: "col" }, el("small", {}, String(position + 1)), isolated(word(token))));
  const rows = [];
  for (let layer = layers; layer >= 0; layer -= 1) {
    const cells = sample.tokens.map((_, position) => lensCell(sample, layer, position));
    rows.push(el("tr", {}, el("th", { scope: "row" }, String(layer)), ...cells));
  }
  const caption = el("caption", { class: "sr" }, `Top prediction of every layer, ${sample.title}.`);
  const table = el("table", { class: "lens" }, caption, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Layer"), ...head)), el("tbody", {}, ...rows));
  table.addEventListener("mouseover", ({ target }) => {
    const cell = target.closest("td");
    if (cell) byId("readout").replaceChildren(...described(sample, Number(cell.dataset.layer), Number(cell.dataset.position)));
  });
  byId("lens-box").replaceChildren(table);
  byId("readout").replaceChildren("Point at a cell to read its probability and the true token. Layer 0 is the embeddings.");
}

/** A prediction, shaded by its probability. */
function lensCell(sample, layer, position) {
  const [top, probability] = [sample.top[layer][position], sample.probability[layer][position]];
  const settled = sample.saturation[position] ?? Infinity;
  const shade = probability == null ? 0 : Math.round(probability / 100);
  const marks = [layer >= settled ? "stays" : "", layer === settled ? "settled" : "", top === sample.targets[position] && word(top) ? "right" : ""];
  return el("td", {
    class: marks.filter(Boolean).join(" "),
    style: `background:var(--ramp-${shade});color:var(--on-${shade})`,
    title: described(sample, layer, position).map((part) => part.textContent ?? part).join(""),
    "data-layer": layer,
    "data-position": position,
  }, isolated(word(top)));
}

/** What a layer predicts, how sure it is, what is true, and where the prediction settles. */
function described(sample, layer, position) {
  const [probability, target, settled] = [sample.probability[layer][position], word(sample.targets[position]), sample.saturation[position]];
  return [
    `Layer ${layer}, position ${position + 1}, after `, isolated(word(sample.tokens[position])), ": predicts ",
    isolated(word(sample.top[layer][position])), probability == null ? "" : ` with probability ${(probability / 1000).toFixed(3)}`,
    ...(target ? ["; the true token is ", isolated(target)] : []),
    settled == null ? "." : layer >= settled ? `. Settled since layer ${settled}.` : `. Settles at layer ${settled}.`,
  ];
}

function start() {
  for (const box of all(".switch")) box.addEventListener("change", (event) => choose(box.closest("figure"), event.target.value));
  for (const more of all("details.more")) more.addEventListener("toggle", () => more.open && more.querySelectorAll(".plot").forEach(draw));
  all(".profile-columns").forEach(startStrip);
  if (DATA.lens.length) startLens();
  loadPlotly();
  prefersDark.addEventListener("change", drawAll);
  let [width, waiting] = [innerWidth, 0];
  addEventListener("resize", () => {
    if (innerWidth === width || state.printing) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });
  onPaper.addEventListener("change", turnToPaper);
  addEventListener("beforeprint", () => turnToPaper({ matches: true }));
  addEventListener("afterprint", () => turnToPaper({ matches: false }));
}
