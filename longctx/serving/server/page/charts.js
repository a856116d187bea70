// The charts beside the chat: from what the scheduler said to shapes.

import { bars, lines, lying } from "./svg.js";

const STEPS = 120;
const SECONDS = 60;
const REQUESTS = 40;
const COLOURS = 7;

const count = (value) => Math.round(value).toLocaleString("en");
export function seconds(value) {
  if (value === 0) {
    return "0";
  }
  if (value < 0.0995) {
    return `${(value * 1000).toPrecision(2)} ms`;
  }
  return value < 99.5 ? `${Number(value.toPrecision(2))} s` : `${Math.round(value / 60)} min`;
}

/** Colours of prompts: the same for one request as long as it is seen. */
class Colours {
  #given = new Map();
  #next = 0;

  of(id) {
    if (!this.#given.has(id)) {
      this.#given.set(id, this.#next++ % COLOURS);
    }
    return `prompt-${this.#given.get(id)}`;
  }

  keep(ids) {
    for (const id of this.#given.keys()) {
      if (!ids.has(id)) {
        this.#given.delete(id);
      }
    }
  }
}

/** Draws all charts of a scheduler, at most once a frame; `names` gives the page's own requests names. */
export class Charts {
  #scheduler;
  #names;
  #colours = new Colours();
  #isDue = false;

  constructor(scheduler, names) {
    this.#scheduler = scheduler;
    this.#names = names;
    scheduler.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(document.getElementById("scheduler"));
  }

  draw() {
    if (!this.#isDue) {
      this.#isDue = true;
      requestAnimationFrame(() => {
        this.#isDue = false;
        if (this.#scheduler.load) {
          this.#rows();
          this.#chunk();
          this.#queue();
          this.#times("ttft", "time to first token");
          this.#times("tpot", "time per output token");
          this.#pages();
        }
      });
    }
  }

  #rows() {
    const steps = this.#scheduler.steps;
    const ids = new Set(steps.flatMap((step) => step.prompts.map(([id]) => id)));
    this.#colours.keep(ids);
    const data = steps.map((step) => ({
      title: describe(step, this.#names),
      parts: [[step.decodes, "decodes"], ...step.prompts.map(([id, rows]) => [rows, this.#colours.of(id)])],
    }));
    const last = steps.at(-1);
    const words = last ? describe(last, this.#names) : "no step yet";
    this.#plot("rows", words, (plot) => bars(plot, data, { slots: STEPS, words, below: ["earlier", "now"] }));
    const items = [["decodes", "decodes"], ...[...ids].map((id) => [this.#colours.of(id), nameOf(id, this.#names)])];
    const list = document.querySelector("#rows .legend");
    const shown = items.slice(0, 1 + 2 * COLOURS);
    list.replaceChildren(...shown.map(([name, label]) => legend(name, label)));
  }

  #chunk() {
    const steps = this.#scheduler.steps;
    const points = steps.map((step) => [step.number, Math.max(0, ...step.prompts.map(([, rows]) => rows))]);
    const [from, to] = [(points.at(-1)?.[0] ?? 0) - STEPS, points.at(-1)?.[0] ?? 0];
    const last = points.at(-1)?.[1] ?? 0;
    const words = last ? `${count(last)} tokens in ${seconds(steps.at(-1).seconds)}` : "no prompt is being read";
    const series = [{ name: "chunks", points: points.filter(([x]) => x >= from) }];
    this.#plot("chunk", words, (plot) => lines(plot, series, { from, to, words, below: ["earlier steps", "now"] }));
  }

  #queue() {
    const { loads, load } = this.#scheduler;
    const [from, to] = [load.time - SECONDS, load.time];
    const series = ["running", "waiting"].map((name) => ({ name, points: loads.map((one) => [one.time, one[name]]) }));
    const words = `${load.running} running, ${load.waiting} waiting`;
    this.#plot("queue", words, (plot) => lines(plot, series, { from, to, words, below: [`${SECONDS} s ago`, "now"] }));
  }

  #times(name, what) {
    const ended = this.#scheduler.ended.filter((output) => output[name] !== null);
    const data = ended.map((output) => ({
      title: `${nameOf(output.id, this.#names)}: ${seconds(output[name])}, prompt of ${count(output.prompt_tokens)} ` +
        `tokens, ${count(output.cached_tokens)} of them cached`,
      parts: [[output[name], this.#names.has(output.id) ? "own" : "others"]],
    }));
    const last = ended.at(-1);
    const words = last ? `${seconds(last[name])}, ${nameOf(last.id, this.#names)}` : `no ${what} yet`;
    const options = { slots: REQUESTS, words, format: seconds, below: ["earlier requests", "last"] };
    this.#plot(name, words, (plot) => bars(plot, data, options));
  }

  #pages() {
    const { load, instances } = this.#scheduler;
    const most = load.pages / load.held.length;
    const name = (rank) => instances[rank]?.name ?? `rank ${rank}`;
    const ranks = load.held.map((value, rank) => ({
      label: name(rank),
      value,
      title: `${name(rank)} holds ${count(value)} of ${count(most)} pages`,
    }));
    const held = load.held.reduce((sum, value) => sum + value, 0);
    const words = `${count(held)} of ${count(load.pages)} held, ${count(load.cached)} more cached`;
    const plot = document.querySelector("#pages .plot");
    plot.classList.add("ranks");
    this.#plot("pages", words, () => lying(plot, ranks, { most, words }));
  }

  #plot(id, words, draw) {
    document.querySelector(`#${id} .value`).textContent = words;
    draw(document.querySelector(`#${id} .plot`));
  }
}

const nameOf = (id, names) => names.get(id) ?? id;

function describe(step, names) {
  const parts = step.prompts.map(([id, rows]) => `${count(rows)} of ${nameOf(id, names)}`);
  const all = [step.decodes ? `${step.decodes} decode${step.decodes > 1 ? "s" : ""}` : "", ...parts].filter(Boolean).join(", ");
  return `step ${count(step.number)}: ${all || "nothing"}, ${seconds(step.seconds)}`;
}

function legend(name, label) {
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = `swatch ${name}`;
  item.append(swatch, label);
  return item;
}
