// Lens grid: rows are layers (deepest on top), columns positions; one tab stop, arrow keys move inside.

const lensState = { model: 0, sample: 0 };
const word = (index) => DATA.words[index];

function drawLens() {
  const grids = view().lens;
  byId("lens").hidden = !DATA.views.some((one) => one.lens.length);
  if (byId("lens").hidden) return;
  const controls = byId("lens-controls");
  controls.replaceChildren();
  lensState.model = Math.min(lensState.model, Math.max(0, grids.length - 1));
  const grid = grids[lensState.model];
  if (!grid) {
    byId("lens-box").replaceChildren(el("p", { class: "missing" }, "No lens grid at this step."));
    return;
  }
  lensState.sample = Math.min(lensState.sample, grid.samples.length - 1);
  if (grids.length > 1) controls.append(lensPicker("lens-model", "Model", grids.map((one) => one.label), "model"));
  controls.append(lensPicker("lens-sample", "Sample", grid.samples.map((sample) => sample.title), "sample"));
  fillLens(grid.samples[lensState.sample]);
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

function fillLens(sample) {
  const layers = sample.top.length - 1;
  const head = el("tr", {}, el("th", { scope: "col" }, "Layer"), ...sample.tokens.map((token, position) =>
    el("th", { scope: "col" }, el("small", {}, String(position + 1)), isolated(word(token)))));
  const rows = [];
  for (let layer = layers; layer >= 0; layer -= 1) {
    const cells = sample.top[layer].map((top, position) => lensCell(sample, layer, position, top));
    rows.push(el("tr", {}, el("th", { scope: "row" }, layer ? String(layer) : "emb"), ...cells));
  }
  const table = el("table", { class: "lens" }, el("caption", { class: "sr" }, `Top prediction of every layer, ${sample.title}. Arrow keys move between cells.`), el("thead", {}, head), el("tbody", {}, ...rows));
  table.addEventListener("keydown", moveInLens);
  for (const kind of ["focusin", "mouseover"]) {
    table.addEventListener(kind, (event) => {
      const cell = event.target.closest("td");
      if (cell) byId("readout").replaceChildren(...describeCell(sample, Number(cell.dataset.layer), Number(cell.dataset.position)));
    });
  }
  byId("lens-box").replaceChildren(table);
  byId("readout").replaceChildren("Point at a cell, or move to it with Tab and the arrow keys, to read its probability and " + DATA.lens_texts.target + ".");
}

function lensCell(sample, layer, position, top) {
  const probability = sample.probability[layer][position];
  const settled = sample.saturation[position] ?? Infinity;
  const shade = probability == null ? 0 : Math.round(probability / 100);
  const marks = [layer >= settled ? "stays" : "", layer === settled ? "settled" : "", layer === sample.exits?.[position] && layer < sample.top.length - 1 ? "exit" : "", top === sample.targets[position] && word(top) ? "right" : ""];
  const cell = el("td", {
    class: marks.filter(Boolean).join(" "),
    style: `background:var(--ramp-${shade});color:var(--on-${shade})`,
    tabindex: layer === sample.top.length - 1 && position === 0 ? "0" : "-1",
    title: describeCell(sample, layer, position).map((part) => part.textContent ?? part).join(""),
    "data-layer": layer,
    "data-position": position,
  }, isolated(word(top)));
  return cell;
}

function describeCell(sample, layer, position) {
  const probability = sample.probability[layer][position];
  const target = word(sample.targets[position]);
  const settled = sample.saturation[position];
  const exit = sample.exits?.[position];
  return [
    `${layer ? `Layer ${layer}` : "Embeddings"}, ${DATA.lens_texts.column} ${position + 1}, after `, isolated(word(sample.tokens[position])), ": predicts ",
    isolated(word(sample.top[layer][position])), probability == null ? "" : ` with probability ${(probability / 1000).toFixed(3)}`,
    ...(target ? [`; ${DATA.lens_texts.target} is `, isolated(target)] : []),
    settled == null ? "." : layer >= settled ? `. Settled since layer ${settled}.` : `. Settles at layer ${settled}.`,
    exit == null || exit === sample.top.length - 1 ? "" : ` The step leaves after layer ${exit}.`,
  ];
}

function moveInLens(event) {
  const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
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

function drawLensKey() {
  byId("lens-title").textContent = DATA.lens_texts.title;
  byId("lens-intro").textContent = DATA.lens_texts.intro;
  const shades = Array.from({ length: 11 }, (_, index) => el("i", { style: `background:var(--ramp-${index})` }));
  byId("lens-key").replaceChildren(
    el("span", {}, "Probability 0 ", ...shades, " 1"),
    el("span", {}, el("span", { class: "cell settled stays" }), "settles here"),
    el("span", {}, el("span", { class: "cell stays" }), "has settled: the top token no longer changes"),
    ...(DATA.lens_texts.exits ? [el("span", {}, el("span", { class: "cell exit" }), "the step leaves here")] : []),
    el("span", {}, el("span", { class: "token", style: "text-decoration:underline;text-underline-offset:3px" }, "token"), ` is ${DATA.lens_texts.target}`),
    el("span", {}, el("span", { class: "token" }, "·"), " space, ", el("span", { class: "token" }, "⏎"), " new line"),
  );
}
