// One question and its answer: how far its prompt has been read, the answer as it comes, and figures at the end.

import { seconds } from "./charts.js";

const now = () => performance.now() / 1000;
const count = (value) => value.toLocaleString("en");

export class Turn {
  element;
  text = "";
  #id;
  #scheduler;
  #start = now();
  #first = null;
  #usage = null;
  #finishReason = null;
  #update = () => this.#showProgress();

  constructor(question, id, scheduler) {
    this.element = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    this.#id = id;
    this.#scheduler = scheduler;
    this.#find(".question").textContent = question;
    this.#say("sent");
    scheduler.addEventListener("change", this.#update);
  }

  /** A piece of an answer, as `answer` yields them. */
  take({ text, usage, finishReason }) {
    if (usage) {
      this.#usage = usage;
      return;
    }
    if (this.#first === null) {
      this.#first = now();
      this.#stopWatching();
      this.#say("answering");
    }
    this.#finishReason = finishReason ?? this.#finishReason;
    this.text += text;
    this.#find(".answer").append(text); // a string: it becomes a text node
  }

  end() {
    this.#stopWatching();
    this.#say(this.text.trim() ? "" : "the model answered nothing");
    const figures = [];
    if (this.#first !== null) {
      figures.push(`first token after ${seconds(this.#first - this.#start)}`);
    }
    if (this.#usage) {
      const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = this.#usage;
      figures.push(`prompt ${count(prompt)} tokens, ${count(details?.cached_tokens ?? 0)} of them cached`);
      figures.push(`answer ${count(output)}${this.#finishReason === "length" ? ", cut at the longest answer" : ""}`);
    }
    this.#find(".figures").textContent = figures.join(" · ");
  }

  fail(words) {
    this.#stopWatching();
    this.#say(words);
    this.element.classList.add("failed");
  }

  #find(selector) {
    return this.element.querySelector(selector);
  }

  #say(words) {
    this.#find(".state span").textContent = words;
  }

  #stopWatching() {
    this.#scheduler.removeEventListener("change", this.#update);
    this.#find("progress").hidden = true;
  }

  #showProgress() {
    const progress = this.#scheduler.progress(this.#id);
    const waiting = this.#scheduler.load.waiting;
    const bar = this.#find("progress");
    bar.hidden = !progress;
    if (progress) {
      const { done, total, left } = progress;
      bar.max = total;
      bar.value = done;
      const rest = left === null ? "" : `, ${seconds(left)} left`;
      this.#say(`read ${count(done)} of ${count(total)} tokens${rest}`);
    } else {
      this.#say(waiting ? `in the queue of ${count(waiting)}` : "sent");
    }
  }
}
