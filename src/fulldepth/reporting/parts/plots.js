// Figures: one slot each, with a switch between readings; redrawn when the colours or the paper change.

const FINE = matchMedia("(pointer: fine)").matches; // a mouse drags to zoom; a finger scrolls the page
const PRINT_WIDTH = 320; // half of a sheet, A4 or Letter
const slots = []; // { plots: [{ div, name, alt, box }] }
let round = 0;

/** Run plotly.js, which the page holds compressed, and draw; `unpacking` is the promise of its source. */
async function loadPlotly(unpacking) {
  document.documentElement.dataset.ready = "no";
  try {
    const script = el("script", {}, await unpacking);
    document.head.append(script);
    script.remove();
  } catch {
    byId("no-figures").textContent = `This browser cannot unpack the figures: they take Chrome 80, Firefox 113 or Safari 16.4. Their numbers are below them; ${DATA.where}`;
    byId("no-figures").hidden = false;
    document.documentElement.dataset.ready = "yes";
    return;
  }
  drawAll();
}

/** Mode bar: zoom, pan, reset, and downloads that carry the figure's title. */
function config(name) {
  const save = (format) => (div) => {
    const title = { text: plain(DATA.figures[name].about.title), x: 0.02, xanchor: "left" };
    const layout = { ...div.layout, title, margin: { ...div.layout.margin, t: 60 + (div.layout.showlegend ? 20 : 0) } };
    Plotly.downloadImage({ data: div.data, layout }, { format, scale: format === "png" ? 2 : 1, width: div.layout.width, height: div.layout.height + 50, filename: name.replace(/[^\w.-]+/g, "_") });
  };
  const button = (format) => ({ name: `Download as ${format.toUpperCase()}`, icon: Plotly.Icons[format === "png" ? "camera" : "disk"], click: save(format) });
  return {
    displaylogo: false,
    responsive: false,
    displayModeBar: paper() ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"], [button("png"), button("svg")]],
    doubleClick: "reset",
  };
}

/** A copy of a figure's part with every colour of the light page replaced by its dark counterpart. */
function recoloured(part) {
  if (typeof part === "string") return dark() ? own(DATA.dark, part) || part : part;
  if (Array.isArray(part)) return part.map(recoloured);
  if (part && typeof part === "object") return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, recoloured(value)]));
  return part;
}

function layoutFor(name, div, data) {
  const base = recoloured(DATA.figures[name].layout);
  const isMap = data.some((trace) => trace.type === "heatmap");
  const width = paper() ? PRINT_WIDTH : div.clientWidth;
  if (width < 400) thinTicks(isMap ? [base.xaxis, base.yaxis] : [base.xaxis]);
  if (base.xaxis.title?.text === "Layer" && !isMap && state.layer && `${name.split(":")[1]} `.startsWith(state.stack ? `${state.stack} ` : "")) base.shapes = [...(base.shapes || []), layerBand()];
  for (const axis of [base.xaxis, base.yaxis]) axis.fixedrange = !FINE;
  const height = isMap ? Math.max(240, Math.min(width, 500) * 0.88) : Math.min(base.height, paper() ? 260 : base.height) + legendHeight(base, data, width);
  return {
    ...base,
    template: recoloured(DATA.template),
    height,
    width,
    autosize: false,
    dragmode: FINE ? "zoom" : false,
    margin: { l: width < 480 ? 46 : 56, r: 12, t: isMap ? 8 : 20, b: 44 },
  };
}

/** What a legend of several lines takes, so that it does not take it from the figure. */
function legendHeight(layout, data, width) {
  if (!layout.showlegend) return 0;
  const names = data.filter((trace) => trace.showlegend !== false).map((trace) => plain(trace.name || "").length);
  const columns = Math.max(1, Math.floor((width - 60) / (Math.max(...names) * 6.4 + 46)));
  return (Math.ceil(names.length / columns) - 1) * 20 + (width < 360 ? 30 : 0); // narrow: the axis labels take more, too
}

/** Fewer tick labels where there is no room for all. */
function thinTicks(axes) {
  for (const axis of axes) {
    if (axis.nticks) axis.nticks = 4;
    if (!axis.tickvals || axis.tickvals.length <= 8) continue;
    const kept = (_, index, all) => (all.length - 1 - index) % 2 === 0; // the last layer stays named
    axis.tickvals = axis.tickvals.filter(kept);
    axis.ticktext = axis.ticktext.filter(kept);
  }
}

/** The chosen layer in a figure over layers. */
function layerBand() {
  return { type: "rect", xref: "x", yref: "paper", x0: state.layer - 0.5, x1: state.layer + 0.5, y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: recoloured(DATA.template.layout.yaxis.gridcolor) };
}

function draw(plot) {
  if (!window.Plotly || (!paper() && plot.div.closest("details.more:not([open])"))) return; // drawn when it is opened
  const { data, about } = DATA.figures[plot.name];
  plot.alt.textContent = plain(about.alt);
  plot.div.setAttribute("aria-label", `${plain(about.title)}. ${plain(about.alt)}`);
  Plotly.react(plot.div, recoloured(data), layoutFor(plot.name, plot.div, data), config(plot.name));
  if (plot.table.open) fillNumbers(plot);
}

/** Redraw every figure, those in sight first, a few milliseconds at a time. */
function drawAll() {
  if (!window.Plotly) return;
  const mine = ++round;
  document.documentElement.dataset.ready = "no";
  const away = (plot) => {
    const box = plot.div.parentElement.getBoundingClientRect();
    return box.bottom < 0 ? -box.bottom : Math.max(0, box.top - innerHeight);
  };
  const queue = slots.flatMap((slot) => slot.plots).map((plot) => [away(plot), plot]).sort((a, b) => a[0] - b[0]);
  const next = () => {
    if (mine !== round) return;
    const until = performance.now() + 24;
    while (queue.length && performance.now() < until) draw(queue.shift()[1]);
    if (queue.length) setTimeout(next);
    else document.documentElement.dataset.ready = "yes";
  };
  next();
}

function drawAtOnce() {
  round += 1;
  slots.forEach((slot) => slot.plots.forEach(draw));
  document.documentElement.dataset.ready = "yes";
}

/** The same numbers as a table, for those who would rather read than look. */
function fillNumbers(plot) {
  const traces = DATA.figures[plot.name].data.filter((trace) => (trace.y || []).length && trace.hoverinfo !== "skip");
  const matrix = traces.length === 1 && traces[0].z;
  const across = matrix ? traces[0].x : traces.map((trace) => plain(trace.name || "Value"));
  const down = matrix ? traces[0].y : [...new Set(traces.flatMap((trace) => trace.x))];
  if (!matrix && down.every((at) => typeof at === "number")) down.sort((a, b) => a - b);
  const columns = matrix ? null : traces.map((trace) => new Map(trace.x.map((at, index) => [at, trace.fill === "tonexty" ? [trace.y[index], ...trace.customdata[index]] : trace.y[index]])));
  const cell = (at, row) => (matrix ? traces[0].z[row] : columns.map((column) => column.get(at)));
  const head = el("tr", {}, el("th", { scope: "col" }, plain(DATA.figures[plot.name].layout.xaxis.title.text)), ...across.map((name) => el("th", { scope: "col", class: "num" }, String(name))));
  const body = down.map((at, row) => el("tr", {}, el("th", { scope: "row" }, readable(at)), ...cell(at, row).map((value) => el("td", { class: "num" }, [value].flat().map(readable).join(" to ")))));
  plot.table.lastElementChild.replaceChildren(el("table", { class: "data" }, el("thead", {}, head), el("tbody", {}, ...body)));
}

function makePlot(name) {
  const div = el("div", { class: "plot", role: "img", "data-figure": name });
  const alt = el("p", { class: "alt" });
  const table = el("details", { class: "as-table" }, el("summary", {}, "Numbers"), el("div", { tabindex: "0", role: "region", "aria-label": "Numbers of the figure" }));
  const plot = { div, name, alt, table };
  table.addEventListener("toggle", () => table.open && fillNumbers(plot));
  return plot;
}

/** A slot: figures side by side (models), or one figure with a switch (readings). */
function makeSlot(names, number) {
  const { title, subtitle, beside } = DATA.figures[names[0]].about;
  const heading = el("h3", {}, plain(title));
  const below = el("p", { class: "subtitle" }, plain(subtitle));
  const caption = el("figcaption", {}, heading, below);
  if (beside) {
    const plots = names.map(makePlot);
    const boxes = plots.map((plot) => el("div", {}, el("h4", {}, isolated(plain(DATA.figures[plot.name].about.variant))), plot.div, plot.alt, plot.table));
    slots.push({ plots });
    return el("figure", { class: "several" }, caption, el("div", { class: "beside" }, ...boxes));
  }
  const plot = makePlot(names[0]);
  slots.push({ plots: [plot] });
  const choose = (index) => {
    plot.name = names[index];
    plot.div.dataset.figure = plot.name;
    below.textContent = plain(DATA.figures[plot.name].about.subtitle);
    draw(plot);
  };
  const choices = names.map((name) => plain(DATA.figures[name].about.variant || "Default"));
  const switcher = names.length > 1 ? readings(choices, number, title, choose) : el("div");
  plot.show = (wanted) => {
    const index = names.indexOf(wanted);
    if (index < 0) return;
    for (const radio of switcher.querySelectorAll(`input[value="${index}"]`)) radio.checked = true;
    for (const select of switcher.querySelectorAll("select")) select.selectedIndex = index;
    choose(index);
  };
  const box = el("div", {}, plot.div, plot.alt, plot.table);
  if (names.length === 1 && choices[0] !== "Default") below.append(` · ${choices[0]}`);
  return el("figure", {}, caption, switcher, box);
}

function readings(choices, number, title, choose) {
  if (choices.length > 4) return el("div", { class: "switch" }, picker(`reading-${number}`, el("span", { class: "sr" }, `Reading of: ${plain(title)}`), choices, choose));
  const radio = (choice, index) =>
    el("label", {}, el("input", { type: "radio", name: `reading-${number}`, value: index, checked: index === 0, onchange: () => choose(index) }), el("span", {}, choice));
  return el("fieldset", { class: "switch" }, el("legend", { class: "sr" }, `Reading of: ${plain(title)}`), ...choices.map(radio));
}

/** Figures that are secondary, behind their titles. */
function folded(figures, slotsOfThem) {
  const titles = figures.map((figure) => figure.querySelector("h3").textContent).join(" · ");
  const more = el("details", { class: "more" }, el("summary", {}, "More: ", isolated(titles)), el("div", { class: "figures" }, ...figures));
  more.addEventListener("toggle", () => more.open && slotsOfThem.forEach((slot) => slot.plots.forEach(draw)));
  return more;
}

function makeSection(section) {
  const first = slots.length;
  const figures = section.slots.map((names, index) => makeSlot(names, `${first}-${index}`));
  const secondary = figures.filter((_, index) => section.secondary.includes(section.slots[index][0]));
  const primary = figures.filter((figure) => !secondary.includes(figure));
  const intro = section.intro ? [el("p", { class: "intro" }, section.intro)] : [];
  const heading = el("h2", { id: `${section.id}-title` }, section.title);
  const drawn = primary.length ? [el("div", { class: `figures of-${primary.length}` }, ...primary)] : [];
  if (secondary.length) drawn.push(folded(secondary, slots.slice(first).filter((_, index) => secondary.includes(figures[index]))));
  return el("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, heading, ...intro, ...section.tables.map((table) => (table.strip ? makeStrip(table) : table.texts ? makeTexts(table) : titledTable(table))), ...drawn);
}
