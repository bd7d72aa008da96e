// Boxes of a detector: rows are images, columns the true objects and the boxes of every decoder layer.

const SCORES = [0.3, 0.5, 0.7, 0.9];
const OVERLAP = 500; // thousandths from which a box is called right
const NAMED = 12; // characters of a class beside its box

const drawn = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

function fillBoxes(images, controls) {
  controls.append(lensPicker("lens-score", "Boxes with a score of at least", SCORES.map(String), "score"));
  const layers = images[0].top.length - 1;
  const columns = ["Image", "True objects", ...Array.from({ length: layers }, (_, index) => `Layer ${index + 1}`)];
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)));
  const describe = (layer, row) => describeBoxes(images[row], layer);
  const rows = images.map((image, row) => {
    const cells = image.top.map((_, layer) => el("td", {
      tabindex: row || layer ? "-1" : "0",
      "data-layer": layer,
      "data-position": row,
      "aria-label": describe(layer, row).map((part) => part.textContent ?? part).join(""),
    }, boxesIn(image, layer)));
    return el("tr", {}, el("th", { scope: "row" }, isolated(image.title)), ...cells);
  });
  const caption = el("caption", { class: "sr" }, "Boxes of every layer. Arrow keys move between images.");
  const side = Math.min(12, Math.max(7.5, 48 / (layers + 1))); // rem
  showLens(el("table", { class: "lens turned pictures", style: `--side:${side}rem` }, caption, el("thead", {}, head), el("tbody", {}, ...rows)), describe, "Point at a picture, or move to it with Tab and the arrow keys, to read its boxes.");
}

/** What is drawn at a layer, 0 = the true objects: [class, edges, score, overlap with a true object of that class]. */
function seen(image, layer) {
  if (!layer) return (image.objects || []).map(([name, ...edges]) => [name, edges, null, null]);
  const boxes = image.boxes[layer].map((box, query) => box && [image.top[layer][query], box.slice(0, 4), image.probability[layer][query], image.objects && box[4]]);
  return boxes.filter((box) => box && box[2] >= 1000 * SCORES[lensState.score]).sort((a, b) => a[2] - b[2]);
}

/** The picture with its boxes; the size of the image gives the shape of the frame, with or without a picture. */
function boxesIn(image, layer) {
  const [width, height] = (image.size || [1, 1]).map(Number);
  const share = Math.min(3, Math.max(1 / 3, width / height || 1));
  const boxes = seen(image, layer);
  const frames = boxes.flatMap(([, [left, top, right, bottom], , overlap]) => {
    const place = { x: percent(left), y: percent(top), width: percent(right - left), height: percent(bottom - top) };
    const kind = !layer ? "truth" : overlap != null && overlap < OVERLAP ? "missed" : "hit";
    return [drawn("rect", { ...place, class: "halo" }), drawn("rect", { ...place, class: kind })];
  });
  const overlay = drawn("svg", { "aria-hidden": "true" }, ...frames, ...labels(boxes));
  return el("div", { class: "boxes", style: `aspect-ratio:${share}` }, ...(image.picture == null ? [] : [thumbnail(image.picture)]), overlay);
}

const percent = (thousandths) => `${thousandths / 10}%`;

/** Classes and scores above their boxes, the surest first; one that would cover another is left to the sentence. */
function labels(boxes) {
  const placed = [];
  for (const [name, [left, top, right], score] of [...boxes].reverse()) {
    const at = left > 450 ? { x: Math.max(right, 550), anchor: "end" } : { x: left, anchor: "start" };
    const y = Math.max(top, 90);
    if (placed.some((other) => Math.abs(other.y - y) < 90 && Math.abs(other.left - left) < 500)) continue;
    const text = word(name);
    const short = text.length > NAMED ? `${text.slice(0, NAMED - 1)}…` : text;
    const said = score == null ? short : `${short} ${(score / 1000).toFixed(2)}`;
    placed.push({ y, left, node: drawn("text", { x: percent(at.x), y: percent(y), dy: -2, "text-anchor": at.anchor }, said) });
  }
  return placed.map(({ node }) => node);
}

function describeBoxes(image, layer) {
  const all = seen(image, layer).reverse();
  if (!layer) return image.objects ? [`${image.title}, true objects: `, ...listed(all.map(([name]) => [isolated(word(name))])), "."] : [`${image.title}; its objects are not known.`];
  if (!all.length) return [`${image.title}, layer ${layer}: no box with a score of at least ${SCORES[lensState.score]}.`];
  const told = all.map(([name, , score, overlap]) => [isolated(word(name)), ` ${(score / 1000).toFixed(2)}`, overlap == null ? "" : overlap ? ` (overlap with a true one ${(overlap / 1000).toFixed(2)})` : " (none there)"]);
  return [`${image.title}, layer ${layer}: `, ...listed(told), "."];
}

const listed = (items) => items.flatMap((item, index) => (index ? [", ", ...item] : item));

function boxesKey() {
  const sign = (name, words) => el("span", {}, drawn("svg", { class: "boxes-sign", width: 22, height: 14 }, drawn("rect", { x: 2, y: 2, width: 18, height: 10, class: "halo" }), drawn("rect", { x: 2, y: 2, width: 18, height: 10, class: name })), words);
  return [sign("truth", "true object"), sign("hit", "overlaps a true object of its class by at least half"), sign("missed", "does not")];
}
