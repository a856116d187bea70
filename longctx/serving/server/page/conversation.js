// A conversation: a document, questions about it, and answers as they come. What users and models write is set as text
// (textContent) alone.

import { ApiError, answer } from "./api.js";
import { Turn } from "./turn.js";

const MAX_BYTES = 256 * 2 ** 20;

/** The id of a request, as short as /page/events shows ids. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(6));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  element;
  #page;
  #document = null; // {name, text}
  #history = []; // messages of turns that ended well
  #abort = null;

  /** `page` has: model(), settings(), example(kind), scheduler, names (of requests), refused(), closed(conversation). */
  constructor(page, title) {
    this.#page = page;
    this.element = document.getElementById("conversation").content.firstElementChild.cloneNode(true);
    this.#find("h2").textContent = title;
    this.element.setAttribute("aria-label", title);
    this.#show();
    this.#listen();
  }

  focus() {
    this.#find("textarea").focus();
  }

  /** To be called when the model becomes known. */
  refresh() {
    for (const button of this.element.querySelectorAll(".example")) {
      button.hidden = Boolean(this.#document) || !this.#page.model()?.is_builtin;
    }
  }

  #find(selector) {
    return this.element.querySelector(selector);
  }

  #listen() {
    const input = this.#find("textarea");
    this.#find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#find("form").requestSubmit();
      }
    });
    this.#find(".stop").addEventListener("click", () => this.#abort?.abort());
    this.#find(".close").addEventListener("click", () => {
      this.#abort?.abort();
      this.#page.closed(this);
    });
    this.#find(".remove").addEventListener("click", () => {
      this.#take(null);
      this.#find("input[type=file]").value = "";
      this.#find("input[type=file]").focus();
    });
    this.#find("input[type=file]").addEventListener("change", (event) => this.#open(event.target.files[0]));
    for (const button of this.element.querySelectorAll(".example")) {
      button.addEventListener("click", () => this.#openExample(button.dataset.kind));
    }
    this.element.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.element.classList.add("dragged");
    });
    this.element.addEventListener("dragleave", () => this.element.classList.remove("dragged"));
    this.element.addEventListener("drop", (event) => {
      event.preventDefault();
      this.element.classList.remove("dragged");
      this.#open(event.dataTransfer.files[0]);
    });
  }

  async #open(file) {
    if (!file) {
      return;
    }
    if (file.size > MAX_BYTES) {
      this.#say(`${file.name} has ${file.size.toLocaleString("en")} bytes, the most is ${MAX_BYTES.toLocaleString("en")}.`);
      return;
    }
    const text = await file.text();
    if (text.includes("\0")) {
      this.#say(`${file.name} is not a text file.`);
      return;
    }
    this.#take({ name: file.name, text });
  }

  async #openExample(kind) {
    try {
      const { name, text, questions } = await this.#page.example(kind);
      this.#take({ name, text }, questions);
      this.#find("textarea").value = questions[0];
      this.focus();
    } catch (error) {
      this.#say(error.message);
    }
  }

  /** Take another document, or none, which begins a new conversation. */
  #take(document, questions = []) {
    this.#document = document;
    this.#history = [];
    this.#show(questions);
  }

  #show(questions = []) {
    const document = this.#document;
    const size = document && document.text.length.toLocaleString("en");
    this.#say(document ? `${document.name}, ${size} characters` : "No document: drop a text file here, or choose one.");
    this.#find(".remove").hidden = !document;
    this.#find(".file").hidden = Boolean(document);
    const suggestions = this.#find(".suggestions");
    suggestions.hidden = questions.length === 0;
    suggestions.replaceChildren(...questions.map((question) => this.#suggestion(question)));
    this.refresh();
  }

  #suggestion(question) {
    const button = window.document.createElement("button");
    button.type = "button";
    button.textContent = question;
    button.addEventListener("click", () => {
      this.#find("textarea").value = question;
      this.focus();
    });
    return button;
  }

  #say(words) {
    this.#find(".document .name").textContent = words;
  }

  #setBusy(isBusy) {
    this.#find(".ask").disabled = isBusy;
    this.#find(".stop").hidden = !isBusy;
    this.element.setAttribute("aria-busy", String(isBusy));
  }

  async #ask() {
    const input = this.#find("textarea");
    const question = input.value.trim();
    if (!question || this.#abort) {
      return;
    }
    this.#abort = new AbortController();
    this.#setBusy(true);
    const document = this.#document;
    const id = newId();
    this.#page.names.set(id, document?.name ?? this.#find("h2").textContent);
    const turn = new Turn(question, id, this.#page.scheduler);
    this.#find(".turns").append(turn.element);
    turn.element.scrollIntoView({ block: "nearest" });
    input.value = "";
    try {
      const [path, body] = this.#request(question, document);
      for await (const piece of answer(path, body, id, this.#abort.signal)) {
        turn.take(piece);
      }
      turn.end();
      if (document === this.#document) {
        this.#history = [...(body.messages ?? []), { role: "assistant", content: turn.text }];
      }
    } catch (error) {
      const isStopped = error.name === "AbortError";
      turn.fail(isStopped ? "stopped" : error.message);
      if (error instanceof ApiError && error.status === 401) {
        this.#page.refused();
      }
    }
    this.#abort = null;
    this.#setBusy(false);
  }

  /** Path and body: a chat where the model has a template, else the text that a model continues with its answer. */
  #request(question, document) {
    const { model, hasChat, ...settings } = this.#page.settings();
    const common = { model, ...settings };
    if (!hasChat) {
      const prompt = document ? `${document.text}\nQ: ${question}\nA: ` : question;
      return ["v1/completions", { ...common, prompt }];
    }
    const isFirst = this.#history.length === 0;
    const content = document && isFirst ? `Document "${document.name}":\n\n${document.text}\n\n${question}` : question;
    return ["v1/chat/completions", { ...common, messages: [...this.#history, { role: "user", content }] }];
  }
}
