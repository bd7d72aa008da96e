// Fills the page, and answers to the colour scheme and the printer.

function drawVerdict() {
  byId("verdict").classList.toggle("answered", Boolean(DATA.story));
  drawStory();
  drawProfile();
  byId("sentences").replaceChildren(...DATA.sentences.map((sentence) => el("p", {}, isolated(sentence))));
  const card = (one) => el("li", {}, el("span", { class: "digits" }, one.digits, el("span", { class: "unit" }, one.unit)), ...(one.error ? [el("span", { class: "error", title: "Standard error (±), or 95 % interval" }, one.error)] : []), el("span", { class: "name" }, one.name), el("span", { class: "symbol" }, one.symbol));
  const parts = DATA.cards.length ? [el("ul", { class: "cards" }, ...DATA.cards.map(card))] : [];
  byId("cards").replaceChildren(...parts, ...(DATA.models ? [scrollingTable({ title: "Models side by side", ...DATA.models }), el("p", { class: "subtitle" }, DATA.models.note || "")] : []), ...inWords(DATA.more_sentences));
  const title = DATA.step == null ? "Verdict" : `Verdict at step ${counted(DATA.step)}`;
  byId("verdict-title").textContent = title;
  drawRemarks();
}

function inWords(sentences) {
  if (!sentences.length) return [];
  const items = sentences.map((sentence) => el("li", {}, isolated(sentence)));
  return [el("details", { class: "about in-words" }, el("summary", {}, DATA.in_words), el("ul", {}, ...items))];
}

function drawRemarks() {
  const notes = [];
  const { warnings } = DATA;
  if (warnings.length) {
    const items = el("ul", {}, ...warnings.map((text) => el("li", {}, isolated(text))));
    notes.push(el("details", { class: "about" }, el("summary", {}, `Caveats (${warnings.length})`), items));
  }
  const left = new Map(DATA.left_out);
  if (left.size) {
    const items = [...left].map(([measure, reason]) => el("li", {}, isolated(measure), ": ", isolated(reason)));
    notes.push(el("details", { class: "about" }, el("summary", {}, `Left out (${left.size})`), el("ul", {}, ...items)));
  }
  byId("remarks").replaceChildren(...notes);
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
  byId("foot").textContent = `${DATA.where} Everything on this page is inside this file; it asks the network for nothing.`;
  const first = DATA.sections.filter((section) => section.first);
  const after = DATA.sections.filter((section) => section.after);
  byId("first").append(...first.map(makeSection));
  byId("sections").append(...DATA.sections.filter((section) => !after.includes(section) && !first.includes(section)).map(makeSection));
  byId("sections-after").append(...after.map(makeSection));
  drawVerdict();
  drawLens();
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
