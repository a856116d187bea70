// The instances behind a router: a table, drawn anew with each message.

const COLUMNS = [
  ["instance", (one) => one.name],
  ["role", (one) => one.role],
  ["state", (one) => one.state],
  ["queue, s", (one) => one.estimates?.queue_seconds.toFixed(2) ?? ""],
  ["decoding", (one) => one.estimates?.decoding ?? 0],
  ["requests", (one) => one.estimates?.open_requests ?? 0],
  ["pages held", (one) => (one.pages ? `${count(Math.round(one.token_usage * one.pages))} of ${count(one.pages)}` : "")],
  ["blocks cached", (one) => Object.values(one.blocks).filter((blocks, i) => i === 0 || blocks).map(count).join(" + ")],
];

const count = (value) => value.toLocaleString("en");

function cell(kind, words, title = "") {
  const made = document.createElement(kind);
  made.textContent = words;
  if (title) {
    made.title = title;
  }
  return made;
}

function row(cells) {
  const made = document.createElement("tr");
  made.append(...cells);
  return made;
}

/** Shows a scheduler's instances in place of the charts of steps. */
export class Cluster {
  #scheduler;
  #figure = document.getElementById("instances");

  constructor(scheduler) {
    this.#scheduler = scheduler;
    this.#figure.hidden = false;
    for (const id of ["rows", "chunk"]) {
      document.getElementById(id).hidden = true;
    }
    document.querySelector("#pages h2").textContent = "Pages held by instance";
    scheduler.addEventListener("change", () => this.draw());
  }

  draw() {
    const { instances, pools } = this.#scheduler;
    const loads = Object.entries(pools).map(([pool, load]) => `${pool} ${load === null ? "nobody" : load.toFixed(2)}`);
    this.#figure.querySelector(".value").textContent = loads.length ? `load: ${loads.join(", ")}` : "";
    const head = document.createElement("thead");
    head.append(row(COLUMNS.map(([name]) => cell("th", name))));
    const body = document.createElement("tbody");
    for (const one of instances) {
      const shown = row(COLUMNS.map(([, value]) => cell("td", value(one), one.reason ?? "")));
      shown.className = one.state;
      body.append(shown);
    }
    this.#figure.querySelector("table").replaceChildren(head, body);
  }
}
