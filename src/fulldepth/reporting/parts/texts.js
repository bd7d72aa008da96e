// Prompts and the texts that continue them.

function makeTexts({ title, items, note }) {
  const texts = items.map(([prompt, text]) => el("li", {}, isolated(prompt, { class: "prompt" }), isolated(text)));
  const under = note ? [el("p", { class: "subtitle" }, note)] : [];
  return el("div", { class: "titled" }, ...(title ? [el("h3", {}, title)] : []), ...under, el("ol", { class: "texts" }, ...texts));
}
