// The table of results: filtered, by pages, and as CSV.

const PAGE_ROWS = 25;
let columns = null; // name -> column, unpacked when the table is opened
let columnNames = [];
const numbersState = { measure: "", text: "", page: 0, rows: [] };

/** The entry of a column in a row: a string, a number, or null. */
function entry(name, row) {
  const column = columns[name];
  if (Array.isArray(column)) return column[row];
  return column.codes[row] < 0 ? null : column.values[column.codes[row]];
}

function filterNumbers() {
  const wanted = numbersState.text.toLowerCase().split(/\s+/).filter(Boolean);
  const words = columnNames.filter((name) => !Array.isArray(columns[name]));
  const rows = [];
  for (let row = 0; row < DATA.table.rows; row += 1) {
    if (numbersState.measure && entry("measure", row) !== numbersState.measure) continue;
    const text = wanted.length ? [...words.map((name) => entry(name, row) ?? ""), `layer=${entry("layer", row) ?? ""}`].join(" ").toLowerCase() : "";
    if (wanted.every((part) => text.includes(part))) rows.push(row);
  }
  numbersState.rows = rows;
  numbersState.page = 0;
  drawNumbers();
}

function drawNumbers() {
  const numeric = (name) => Array.isArray(columns[name]);
  const head = el("tr", {}, ...columnNames.map((name) => el("th", { scope: "col", class: numeric(name) ? "num" : "" }, name)));
  const start = numbersState.page * PAGE_ROWS;
  const body = numbersState.rows.slice(start, start + PAGE_ROWS).map((row) =>
    el("tr", {}, ...columnNames.map((name) => {
      const value = entry(name, row);
      const shown = typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : value == null ? "" : String(value);
      return el("td", { class: numeric(name) ? "num" : "" }, numeric(name) ? shown : isolated(shown));
    })));
  byId("numbers-box").replaceChildren(el("table", { class: "data" }, el("caption", { class: "sr" }, "Results"), el("thead", {}, head), el("tbody", {}, ...body)));
  const last = Math.max(0, Math.ceil(numbersState.rows.length / PAGE_ROWS) - 1);
  const turn = (by) => () => {
    numbersState.page = Math.min(last, Math.max(0, numbersState.page + by));
    drawNumbers();
  };
  const end = Math.min(start + PAGE_ROWS, numbersState.rows.length);
  byId("pager").replaceChildren(
    el("button", { type: "button", onclick: turn(-1), disabled: numbersState.page === 0 }, "Previous"),
    el("button", { type: "button", onclick: turn(1), disabled: numbersState.page >= last }, "Next"),
    el("span", { role: "status" }, numbersState.rows.length ? `Rows ${counted(start + 1)} to ${counted(end)} of ${counted(numbersState.rows.length)}` : "No row matches."),
  );
}

/** RFC 4180. Text that a spreadsheet would run as a formula gets an apostrophe in front. */
function csvCell(value) {
  if (value == null) return "";
  if (typeof value === "number") return String(value);
  const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

function csv() {
  const lines = [columnNames.map(csvCell).join(",")];
  for (let row = 0; row < DATA.table.rows; row += 1) lines.push(columnNames.map((name) => csvCell(entry(name, row))).join(","));
  return `${lines.join("\r\n")}\r\n`;
}

function download() {
  const address = URL.createObjectURL(new Blob([csv()], { type: "text/csv;charset=utf-8" }));
  el("a", { href: address, download: "results.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

async function fillTable() {
  if (columns || !byId("numbers-fold").open) return;
  columns = JSON.parse(await unpacked("table"));
  columnNames = Object.keys(columns);
  filterNumbers();
}

function startNumbers() {
  const { rows, total, left_out: leftOut, where } = DATA.table;
  const part = rows < total ? ` of ${counted(total)}. ${leftOut}` : ".";
  byId("numbers-intro").textContent = `This page holds ${counted(rows)} rows${part} ${where || "The file results.parquet beside it holds all of them."}`;
  const measures = ["All measures", ...DATA.measures];
  byId("numbers-controls").replaceChildren(
    el("button", { type: "button", id: "download", onclick: download }, "Download CSV"),
    picker("numbers-measure", "Measure", measures, (index) => {
      numbersState.measure = index ? measures[index] : "";
      filterNumbers();
    }),
    el("span", { class: "field" }, el("label", { for: "numbers-text" }, "Filter"), el("input", {
      id: "numbers-text", type: "search", placeholder: "for example: p95 layer=12",
      oninput: (event) => {
        numbersState.text = event.target.value;
        filterNumbers();
      },
    })),
  );
  byId("numbers-fold").addEventListener("toggle", fillTable);
}
