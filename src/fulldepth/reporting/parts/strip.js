// The model's depth as a strip of layers: what stayed, what went and when, and the loss that each removal added.

const BRANCHES = { attention: "Attention", mlp: "MLP" };

/** One layer: its number, its two branches from the input on, and what removing one of them added. */
function stripCell(layer, granularity, gone) {
  const [, order, added, exact] = gone || [];
  const nth = gone ? el("span", { "aria-hidden": "true" }, String(order)) : "";
  const branch = (name) => {
    const missing = gone && granularity === name;
    return el("span", { class: `part ${name}${missing ? " gone" : ""}` }, missing ? nth : "");
  };
  const parts = gone && granularity === "layer" ? [el("span", { class: "part whole gone" }, nth)] : Object.keys(BRANCHES).map(branch);
  const lost = granularity === "layer" ? "removed" : `${BRANCHES[granularity] || granularity} removed`;
  const said = gone ? `Layer ${layer}: ${lost} as number ${order}${exact ? `, ${exact} nats` : ""}` : `Layer ${layer}`;
  return el("li", { title: said }, el("span", { class: "sr" }, said), el("span", { class: "at", "aria-hidden": "true" }, String(layer)), ...parts, el("span", { class: "added", "aria-hidden": "true" }, added || ""));
}

function makeStrip({ title, note, granularity, layers, cells }) {
  const gone = new Map(cells.map((cell) => [cell[0], cell]));
  const all = Array.from({ length: layers }, (_, index) => stripCell(index + 1, granularity, gone.get(index + 1)));
  const sign = (name, words, text = "") => el("span", {}, el("i", { class: name }, text), words);
  const key = el("div", { class: "strip-key", "aria-hidden": "true" }, sign("attention", "Attention"), sign("mlp", "MLP"), sign("gone", "removed, the first to go; below it the nats that it added", "1"));
  return el("div", { class: "titled" }, el("h3", {}, isolated(title)), el("p", { class: "subtitle" }, note), key, el("ol", { class: "strip", "aria-label": `Layers 1 to ${layers}` }, ...all));
}
