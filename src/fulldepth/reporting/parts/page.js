// Fills the page, and answers to the step slider, the colour scheme and the printer.

function drawVerdict() {
  const now = view();
  byId("verdict").classList.toggle("answered", Boolean(now.story));
  drawStory();
  drawProfile();
  byId("sentences").replaceChildren(...now.sentences.map((sentence) => el("p", {}, isolated(sentence))));
  const card = (one) => el("li", {}, el("span", { class: "digits" }, one.digits, el("span", { class: "unit" }, one.unit)), ...(one.error ? [el("span", { class: "error", title: "Standard error (±), or 95 % interval" }, one.error)] : []), el("span", { class: "name" }, one.name), el("span", { class: "symbol" }, one.symbol));
  const parts = now.cards.length ? [el("ul", { class: "cards" }, ...now.cards.map(card))] : [];
  byId("cards").replaceChildren(...parts, ...(DATA.models ? [scrollingTable({ title: "Models side by side", ...DATA.models }), el("p", { class: "subtitle" }, DATA.models.note || "")] : []), ...inWords(now.more_sentences));
  const title = now.step == null ? "Verdict" : `Verdict at step ${counted(now.step)}`;
  byId("verdict-title").textContent = title;
  drawRemarks(now);
}

function inWords(sentences) {
  if (!sentences.length) return [];
  const items = sentences.map((sentence) => el("li", {}, isolated(sentence)));
  return [el("details", { class: "about in-words" }, el("summary", {}, DATA.in_words), el("ul", {}, ...items))];
}

function drawRemarks(now) {
  const notes = [];
  const { warnings } = DATA.remarks;
  if (warnings.length) {
    const items = el("ul", {}, ...warnings.map((text) => el("li", {}, isolated(text))));
    notes.push(el("details", { class: "about" }, el("summary", {}, `Mind when reading (${warnings.length})`), items));
  }
  const left = new Map([...DATA.remarks.left_out, ...now.left_out]);
  if (left.size) {
    const items = [...left].map(([measure, reason]) => el("li", {}, isolated(measure), ": ", isolated(reason)));
    notes.push(el("details", { class: "about" }, el("summary", {}, `Left out (${left.size})`), el("ul", {}, ...items)));
  }
  byId("remarks").replaceChildren(...notes);
}

function startStepper() {
  if (DATA.views.length < 2) return;
  const slider = byId("step");
  slider.max = DATA.views.length - 1;
  slider.value = state.view;
  byId("stepper").hidden = false;
  const tell = () => {
    const { step } = view();
    byId("step-name").textContent = counted(step);
    slider.setAttribute("aria-valuetext", `Step ${counted(step)}, checkpoint ${state.view + 1} of ${DATA.views.length}`);
  };
  slider.addEventListener("input", () => {
    state.view = Number(slider.value);
    tell();
    drawVerdict();
    drawLens();
    drawAll();
  });
  tell();
}

function startContents() {
  const links = [...document.querySelectorAll("main section:not([hidden])")].map((section) => el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent.replace(/ at step .*/, "")));
  byId("contents").append(...links);
}

/** On paper the colours are light, the figures fit the sheet, and the notes are open. */
function turnToPaper({ matches }) {
  if (matches === state.printing) return;
  state.printing = matches;
  for (const note of document.querySelectorAll(".method, .about, .more")) {
    if (matches) note.dataset.was = note.open ? "open" : "closed";
    note.open = matches || note.dataset.was === "open";
  }
  drawAtOnce();
}

function start() {
  const plotly = unpacked("plotly"); // while the rest of the page is made
  document.title = `${DATA.title} – fulldepth`;
  byId("kind").textContent = `· ${DATA.kind_name}`;
  byId("title").append(isolated(DATA.title));
  byId("byline").append(isolated(DATA.byline));
  byId("about").append(...DATA.about.flatMap(([what, text]) => [el("dt", {}, isolated(what)), el("dd", {}, isolated(text))]));
  byId("about-title").textContent = DATA.about_title;
  byId("about-box").hidden = !DATA.about.length;
  const shown = DATA.views.length;
  byId("foot").textContent = "Everything on this page is inside this file; it asks the network for nothing." + (DATA.checkpoints > shown ? ` The slider has ${shown} of ${DATA.checkpoints} checkpoints, the curves over training have all.` : "");
  const first = DATA.sections.filter((section) => section.first);
  const after = DATA.sections.filter((section) => section.after);
  byId("first").append(...first.map(makeSection));
  byId("sections").append(...DATA.sections.filter((section) => !after.includes(section) && !first.includes(section)).map(makeSection));
  byId("sections-after").append(...after.map(makeSection));
  for (const note of document.querySelectorAll("[data-measures]")) note.hidden = !note.dataset.measures.split(" ").some((name) => DATA.measures.includes(name));
  startStepper();
  drawVerdict();
  drawLens();
  startNumbers();
  startContents();
  loadPlotly(plotly);
  prefersDark.addEventListener("change", drawAll);
  let width = innerWidth;
  let waiting = 0;
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

start();
