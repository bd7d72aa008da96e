// Lens grid: a table of predictions with one tab stop, in which arrow keys move. Of tokens, rows are layers (deepest on
// top) and columns positions; samples.js has rows of samples and columns of layers.

const lensState = { model: 0, sample: 0, score: 1 };
const word = (index) => DATA.words[index];
const layerNamed = (layer) => (layer ? `Layer ${layer}` : "Embeddings");

function drawLens() {
  const grids = DATA.lens;
  byId("lens").hidden = !grids.length;
  if (byId("lens").hidden) return;
  const controls = byId("lens-controls");
  controls.replaceChildren();
  const grid = grids[lensState.model];
  const { of } = grid;
  byId("lens-title").textContent = DATA.lens_texts[of].title;
  byId("lens-intro").textContent = DATA.lens_texts[of].intro;
  byId("lens-key").replaceChildren(...lensKey(of));
  if (grids.length > 1) controls.append(lensPicker("lens-model", "Model", grids.map((one) => one.label), "model"));
  if (of === "samples") fillSamples(grid.samples);
  else {
    lensState.sample = Math.min(lensState.sample, grid.samples.length - 1);
    controls.append(lensPicker("lens-sample", "Sample", grid.samples.map((sample) => sample.title), "sample"));
    fillLens(grid.samples[lensState.sample]);
  }
}

function lensPicker(id, label, choices, field) {
  const made = picker(id, label, choices, (index) => {
    lensState[field] = index;
    drawLens();
    byId(id).focus();
  });
  made.querySelector("select").selectedIndex = lensState[field];
  return made;
}

/** Show a table of cells. `describe` gives the sentence on the cell of a layer and a place (position or row). */
function showLens(table, describe, hint) {
  table.addEventListener("keydown", moveInLens);
  for (const kind of ["focusin", "mouseover"]) {
    table.addEventListener(kind, (event) => {
      const cell = event.target.closest("td[data-layer]");
      if (cell) byId("readout").replaceChildren(...describe(Number(cell.dataset.layer), Number(cell.dataset.position)));
    });
  }
  byId("lens-box").replaceChildren(table);
  byId("readout").replaceChildren(hint);
}

function fillLens(sample) {
  const layers = sample.top.length - 1;
  const head = el("tr", {}, el("th", { scope: "col" }, "Layer"), ...sample.tokens.map((token, position) =>
    el("th", { scope: "col" }, el("small", {}, String(position + 1)), isolated(word(token)))));
  const rows = [];
  const describe = (layer, position) => describeToken(sample, layer, position);
  for (let layer = layers; layer >= 0; layer -= 1) {
    const cells = sample.top[layer].map((top, position) => lensCell(sample, layer, position, describe, [isolated(word(top))], layer === layers && !position));
    rows.push(el("tr", {}, el("th", { scope: "row" }, layer ? String(layer) : "emb"), ...cells));
  }
  const table = el("table", { class: "lens" }, el("caption", { class: "sr" }, `Top prediction of every layer, ${sample.title}. Arrow keys move between cells.`), el("thead", {}, head), el("tbody", {}, ...rows));
  showLens(table, describe, `Point at a cell, or move to it with Tab and the arrow keys, to read its probability and ${DATA.lens_texts.tokens.target}.`);
}

/** A prediction, shaded by its probability. `place` is its position, or its row where a sample has one position only. */
function lensCell(sample, layer, place, describe, children, first) {
  const position = sample.tokens.length > 1 ? place : 0;
  const probability = sample.probability[layer][position];
  const settled = sample.saturation[position] ?? Infinity;
  const shade = probability == null ? 0 : Math.round(probability / 100);
  const marks = [layer >= settled ? "stays" : "", layer === settled ? "settled" : "", sample.top[layer][position] === sample.targets[position] && word(sample.targets[position]) ? "right" : ""];
  return el("td", {
    class: marks.filter(Boolean).join(" "),
    style: `background:var(--ramp-${shade});color:var(--on-${shade})`,
    tabindex: first ? "0" : "-1",
    title: describe(layer, place).map((part) => part.textContent ?? part).join(""),
    "data-layer": layer,
    "data-position": place,
  }, ...children);
}

function describeToken(sample, layer, position) {
  const texts = DATA.lens_texts.tokens;
  return [
    `${layerNamed(layer)}, ${texts.column} ${position + 1}, after `, isolated(word(sample.tokens[position])), ": ",
    ...describePrediction(sample, layer, position, texts),
  ];
}

/** What a layer predicts, how sure it is, what is true, and where the prediction settles. */
function describePrediction(sample, layer, position, texts) {
  const probability = sample.probability[layer][position];
  const target = word(sample.targets[position]);
  const settled = sample.saturation[position];
  return [
    "predicts ", isolated(word(sample.top[layer][position])), probability == null ? "" : ` with probability ${(probability / 1000).toFixed(3)}`,
    ...(target ? [`; ${texts.target} is `, isolated(target)] : []),
    settled == null ? "." : layer >= settled ? `. Settled since layer ${settled}.` : `. Settles at layer ${settled}.`,
  ];
}

function moveInLens(event) {
  const turned = event.currentTarget.classList.contains("turned");
  const keys = turned ? ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"] : ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"];
  const step = [[1, 0], [-1, 0], [0, -1], [0, 1]][keys.indexOf(event.key)];
  const from = event.target.closest("td");
  if (!step || !from) return;
  event.preventDefault();
  const at = `td[data-layer="${Number(from.dataset.layer) + step[0]}"][data-position="${Number(from.dataset.position) + step[1]}"]`;
  const to = event.currentTarget.querySelector(at);
  if (!to) return;
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

function lensKey(of) {
  const texts = DATA.lens_texts[of];
  const tokens = of === "tokens";
  const shades = Array.from({ length: 11 }, (_, index) => el("i", { style: `background:var(--ramp-${index})` }));
  const sign = (name, words) => el("span", {}, el("span", { class: `cell ${name}` }), words);
  return [
    el("span", {}, "Probability 0 ", ...shades, " 1"),
    sign("settled stays", "settles here"),
    sign("stays", `has settled: the ${tokens ? "top token" : "predicted class"} no longer changes`),
    el("span", {}, el("span", { class: "token", style: "text-decoration:underline;text-underline-offset:3px" }, tokens ? "token" : "class"), ` is ${texts.target}`),
    ...(tokens ? [el("span", {}, el("span", { class: "token" }, "·"), " space, ", el("span", { class: "token" }, "⏎"), " new line")] : [sign("wrong", "another class")]),
  ];
}
