// Lens grid: rows are layers (deepest on top), columns positions; one tab stop, in which arrow keys move.

const word = (index) => DATA.words[index];

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
    rows.push(el("tr", {}, el("th", { scope: "row" }, layer ? String(layer) : "emb"), ...cells));
  }
  rows[0].querySelector("td").tabIndex = 0;
  const caption = el("caption", { class: "sr" }, `Top prediction of every layer, ${sample.title}. Arrow keys move between cells.`);
  const table = el("table", { class: "lens" }, caption, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Layer"), ...head)), el("tbody", {}, ...rows));
  table.addEventListener("keydown", moveInLens);
  for (const kind of ["focusin", "mouseover"]) {
    table.addEventListener(kind, ({ target }) => {
      const cell = target.closest("td");
      if (cell) byId("readout").replaceChildren(...described(sample, Number(cell.dataset.layer), Number(cell.dataset.position)));
    });
  }
  byId("lens-box").replaceChildren(table);
  byId("readout").replaceChildren("Point at a cell, or move to it with Tab and the arrow keys, to read its probability and the true token.");
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
    tabindex: "-1",
    title: described(sample, layer, position).map((part) => part.textContent ?? part).join(""),
    "data-layer": layer,
    "data-position": position,
  }, isolated(word(top)));
}

/** What a layer predicts, how sure it is, what is true, and where the prediction settles. */
function described(sample, layer, position) {
  const [probability, target, settled] = [sample.probability[layer][position], word(sample.targets[position]), sample.saturation[position]];
  return [
    `${layer ? `Layer ${layer}` : "Embeddings"}, position ${position + 1}, after `, isolated(word(sample.tokens[position])), ": predicts ",
    isolated(word(sample.top[layer][position])), probability == null ? "" : ` with probability ${(probability / 1000).toFixed(3)}`,
    ...(target ? ["; the true token is ", isolated(target)] : []),
    settled == null ? "." : layer >= settled ? `. Settled since layer ${settled}.` : `. Settles at layer ${settled}.`,
  ];
}

function moveInLens(event) {
  const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const from = event.target.closest("td");
  if (!step || !from) return;
  const [layer, position] = [Number(from.dataset.layer) + step[0], Number(from.dataset.position) + step[1]];
  moveFocus(event, event.currentTarget.querySelector(`td[data-layer="${layer}"][data-position="${position}"]`));
}
