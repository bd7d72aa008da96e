// Lens grid: a table of predictions with one tab stop, in which arrow keys move. Of tokens, rows are layers (deepest on
// top) and columns positions; of samples of a classifier, rows are samples and columns layers.

const lensState = { model: 0, sample: 0 };
const lensTexts = () => DATA.lens_texts[DATA.lens[lensState.model].of];
const word = (index) => DATA.words[index];
const layerNamed = (layer) => (layer ? `Layer ${layer}` : "Embeddings");

function drawLens() {
  const grids = DATA.lens;
  byId("lens").hidden = !grids.length;
  if (byId("lens").hidden) return;
  const controls = byId("lens-controls");
  controls.replaceChildren();
  const grid = grids[lensState.model];
  byId("lens-title").textContent = lensTexts().title;
  byId("lens-intro").textContent = lensTexts().intro;
  byId("lens-key").replaceChildren(...lensKey(grid.of));
  if (grids.length > 1) controls.append(lensPicker("lens-model", "Model", grids.map((one) => one.label), "model"));
  if (grid.of === "samples") fillSamples(grid.samples);
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
  showLens(table, describe, `Point at a cell, or move to it with Tab and the arrow keys, to read its probability and ${lensTexts().target}.`);
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
  const texts = lensTexts();
  return [
    `${layerNamed(layer)}, ${texts.column} ${position + 1}, after `, isolated(word(sample.tokens[position])), ": ",
    ...describePrediction(sample, layer, position),
  ];
}

/** What a layer predicts, how sure it is, what is true, and where the prediction settles. */
function describePrediction(sample, layer, position) {
  const probability = sample.probability[layer][position];
  const target = word(sample.targets[position]);
  const settled = sample.saturation[position];
  return [
    "predicts ", isolated(word(sample.top[layer][position])), probability == null ? "" : ` with probability ${(probability / 1000).toFixed(3)}`,
    ...(target ? [`; ${lensTexts().target} is `, isolated(target)] : []),
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
  const tokens = of !== "samples";
  const shades = Array.from({ length: 11 }, (_, index) => el("i", { style: `background:var(--ramp-${index})` }));
  const sign = (name, words) => el("span", {}, el("span", { class: `cell ${name}` }), words);
  return [
    el("span", {}, "Probability 0 ", ...shades, " 1"),
    sign("settled stays", "settles here"),
    sign("stays", `has settled: the ${tokens ? "top token" : "predicted class"} no longer changes`),
    el("span", {}, el("span", { class: "token", style: "text-decoration:underline;text-underline-offset:3px" }, tokens ? "token" : "class"), ` is ${lensTexts().target}`),
    ...(tokens ? [el("span", {}, el("span", { class: "token" }, "·"), " space, ", el("span", { class: "token" }, "⏎"), " new line")] : [sign("wrong", "another class")]),
  ];
}

const CRISP = 32; // pixels up to which an enlarged picture shows its pixels

/** A thumbnail; the words beside it say what it shows. */
function thumbnail(index) {
  const sharpen = ({ target }) => target.classList.toggle("crisp", Math.max(target.naturalWidth, target.naturalHeight) <= CRISP);
  return el("img", { src: DATA.pictures[index], alt: "", onload: sharpen });
}

function fillSamples(samples) {
  const layers = samples[0].top.length - 1;
  const numbers = Array.from({ length: layers + 1 }, (_, layer) => el("th", { scope: "col" }, layer ? String(layer) : "emb"));
  const describe = (layer, row) => [
    `${samples[row].title}, ${layerNamed(layer).toLowerCase()}: `,
    ...describePrediction(samples[row], layer, 0),
  ];
  const bodies = [];
  samples.forEach((sample, row) => {
    if (!row || sample.group !== samples[row - 1].group) {
      const heading = el("th", { scope: "rowgroup", colspan: layers + 2 }, el("span", {}, isolated(sample.group)));
      bodies.push(el("tbody", {}, ...(sample.group ? [el("tr", { class: "group" }, heading)] : [])));
    }
    bodies.at(-1).append(sampleRow(sample, row, describe));
  });
  const caption = el("caption", { class: "sr" }, "Predicted class of every layer. Arrow keys move between cells.");
  const table = el("table", { class: "lens turned" }, caption, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Layer"), ...numbers)), ...bodies);
  showLens(table, describe, "Point at a cell, or move to it with Tab and the arrow keys, to read its probability and the true class.");
}

function sampleRow(sample, row, describe) {
  const name = isolated(word(sample.tokens[0]), { class: "name" });
  const about = el("span", { class: "words" }, isolated(word(sample.targets[0]), { class: "true" }), name);
  const head = el("th", { scope: "row" }, el("span", { class: "sample" }, ...(sample.picture == null ? [] : [thumbnail(sample.picture)]), about));
  const cells = sample.top.map(([top], layer) => {
    const probability = sample.probability[layer][0];
    const digits = el("small", {}, probability == null ? "" : (probability / 1000).toFixed(2));
    const cell = lensCell(sample, layer, row, describe, [isolated(word(top)), digits], !row && layer === 0);
    cell.classList.toggle("wrong", top !== sample.targets[0]);
    return cell;
  });
  return el("tr", {}, head, ...cells);
}
