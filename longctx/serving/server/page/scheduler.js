// What the scheduler does: messages of /page/events, kept as far back as the charts show.

import { ApiError, events } from "./api.js";

const STEPS = 120;
const SECONDS = 60;
const ENDED = 40;
const RATE_SECONDS = 6; // of reading, from which the seconds left are estimated
const MAX_PAUSE = 10; // seconds between attempts to connect

/** Fires "change" after each message, and "state" when the connection comes or goes. */
export class Scheduler extends EventTarget {
  steps = [];
  loads = [];
  ended = [];
  reading = new Map(); // id -> {done, total, samples}
  load = null;
  instances = []; // behind a router
  pools = {}; // loads of a router's pools
  state = "connecting";
  #abort = null;

  /** Connect, and connect again whenever the connection ends. */
  async run() {
    let pause = 1;
    for (;;) {
      this.#abort = new AbortController();
      let restart = false;
      let isFirst = true;
      try {
        for await (const data of events("page/events", { signal: this.#abort.signal })) {
          pause = 1;
          this.#take(JSON.parse(data), isFirst);
          isFirst = false;
          this.#tell("live");
        }
        this.#tell("the server has closed the connection");
      } catch (error) {
        restart = error.name === "AbortError";
        const refused = error instanceof ApiError;
        this.#tell(refused ? `no charts: ${error.message}` : "no connection to the server");
      }
      if (!restart) {
        await new Promise((resolve) => setTimeout(resolve, pause * 1000));
        pause = Math.min(2 * pause, MAX_PAUSE);
      }
    }
  }

  /** Connect again at once, with the key as it is now. */
  restart() {
    this.#abort?.abort();
  }

  /** How far the prompt of a request has been read: {done, total, seconds left or null}; null if it isn't being read. */
  progress(id) {
    const entry = this.reading.get(id);
    if (!entry) {
      return null;
    }
    const [first] = entry.samples;
    const rate = (entry.done - first.done) / (entry.time - first.time);
    return { done: entry.done, total: entry.total, left: rate > 0 ? (entry.total - entry.done) / rate : null };
  }

  #tell(state) {
    if (state !== this.state) {
      this.state = state;
      this.dispatchEvent(new Event("state"));
    }
  }

  #take(message, isFirst) {
    if (isFirst) {
      // It holds what was before, perhaps of another engine, which counts from 0.
      [this.steps, this.loads, this.ended] = [[], [], []];
    }
    const isNew = (last) => (one) => one.number > (last?.number ?? -1);
    const steps = message.steps.filter(isNew(this.steps.at(-1)));
    this.steps = [...this.steps, ...steps].slice(-STEPS);
    this.load = message.load;
    this.instances = message.instances ?? [];
    this.pools = message.pools ?? {};
    const since = message.load.time - SECONDS;
    this.loads = [...this.loads, ...steps, message.load].filter((load) => load.time >= since);
    this.ended = [...this.ended, ...message.ended.filter(isNew(this.ended.at(-1)))].slice(-ENDED);
    this.#read(message.reading);
    this.dispatchEvent(new Event("change"));
  }

  #read(reading) {
    const time = performance.now() / 1000;
    const before = this.reading;
    this.reading = new Map();
    for (const [id, done, total] of reading) {
      const samples = before.get(id)?.samples ?? [];
      if (samples.at(-1)?.done !== done) {
        samples.push({ time, done });
      }
      while (samples.length > 2 && samples[0].time < time - RATE_SECONDS) {
        samples.shift();
      }
      this.reading.set(id, { done, total, time: samples.at(-1).time, samples });
    }
  }
}
