// Samples of a classifier: rows are samples with their pictures or texts, columns layers.

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
    ...describePrediction(samples[row], layer, 0, DATA.lens_texts.samples),
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
