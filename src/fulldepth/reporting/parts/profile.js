// The opening paragraph, and the strip of layers: one column a layer, with its numbers; a click leads to the figure.

function drawStory() {
  const told = DATA.story;
  byId("story").hidden = !told;
  if (!told) return;
  const { next } = told;
  const steps = next ? [el("p", { class: "next" }, el("strong", {}, "Next: "), next.why, " ", el("code", {}, ...next.command.split(/(?= )/).map((word) => el("span", {}, word))))] : [];
  byId("story").replaceChildren(el("p", {}, told.sentences.map(plain).join(" ")), ...steps);
}

function drawProfile() {
  const strips = DATA.profiles;
  byId("profile").hidden = !strips.length;
  if (!strips.length) return;
  byId("profile-box").replaceChildren(...strips.flatMap(makeProfile));
  profileKey(strips);
}

/** The strip of one stack, under its name if there are several. */
function makeProfile(strip, _, strips) {
  const names = el("div", { class: "profile-names", "aria-hidden": "true" }, el("span", {}, "Layer"), ...strip.rows.map((row) => el("span", { title: row.hint }, row.name)));
  const all = Array.from({ length: strip.layers }, (_, index) => profileColumn(strip, index));
  const columns = el("div", { class: "profile-columns", role: "group", "aria-label": `${strip.stack ? `${strip.stack}, layers` : "Layers"} 1 to ${strip.layers}` }, ...all);
  columns.addEventListener("keydown", moveInProfile);
  for (const kind of ["focusin", "mouseover"]) {
    columns.addEventListener(kind, (event) => {
      const column = event.target.closest("button");
      if (column) byId("profile-readout").replaceChildren(column.getAttribute("aria-label"));
    });
  }
  columns.addEventListener("mouseleave", () => profileKey(strips));
  return [...(strip.stack ? [el("h3", {}, isolated(strip.stack))] : []), el("div", { class: "profile-box" }, names, columns)];
}

/** What the shades mean, shown while no layer is pointed at. */
function profileKey(strips) {
  const rows = new Map(strips.flatMap((strip) => strip.rows.map((row) => [row.name, row])));
  const hints = [...rows.values()].map((row) => el("span", {}, el("b", {}, row.name), ` ${row.hint}`));
  const some = strips.find((strip) => strip.idle.length);
  const idle = some ? [el("span", {}, el("i", { class: "idle-sign" }), some.limit)] : [];
  byId("profile-readout").replaceChildren(...idle, ...hints);
}

/** One layer: its number, and one shade a row. */
function profileColumn(strip, index) {
  const layer = index + 1;
  const every = [1, 2, 5, 10, 20, 50].find((step) => strip.layers / step <= 16) || 100;
  const named = layer === 1 || layer === strip.layers || (layer % every === 0 && strip.layers - layer >= every / 2);
  const shades = strip.rows.map((row) => el("i", {
    class: row.shades[index] == null ? "none" : "",
    style: row.shades[index] == null ? "" : `background:var(--ramp-${row.shades[index]})`,
    "data-figure-name": row.figure,
  }));
  const said = `${strip.stack ? `${strip.stack}, layer` : "Layer"} ${layer}: ${strip.rows.map((row) => row.texts[index]).filter(Boolean).join(", ")}`;
  return el("button", {
    type: "button",
    class: strip.idle.includes(layer) ? "layer idle" : "layer",
    "aria-label": said,
    title: said,
    tabindex: index ? "-1" : "0",
    onclick: (event) => showLayer(event.target.dataset.figureName || strip.rows[0].figure, layer, strip.stack),
  }, el("span", { class: named ? "" : "unnamed", "aria-hidden": "true" }, String(layer)), ...shades);
}

function moveInProfile(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const all = [...event.currentTarget.children];
  const to = all[all.indexOf(event.target) + step];
  if (!step || !to) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

/** Mark a layer of a stack in every figure over its layers, and scroll to one of them. */
function showLayer(name, layer, stack) {
  state.layer = state.layer === layer && state.stack === stack ? null : layer;
  state.stack = stack;
  const plot = slots.flatMap((slot) => slot.plots).find((one) => one.name.split(":")[0] === name);
  if (plot) {
    if (stack) plot.show?.(`${name}:${stack}`);
    for (let box = plot.div.parentElement; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
    plot.div.closest("figure").scrollIntoView({ block: "nearest" });
  }
  drawAll();
}
