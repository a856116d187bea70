// The page: conversations on one side, what the scheduler does on the other.

import { ApiError, getJson, setKey } from "./api.js";
import { Charts } from "./charts.js";
import { Cluster } from "./cluster.js";
import { Conversation } from "./conversation.js";
import { Scheduler } from "./scheduler.js";

const find = (id) => document.getElementById(id);

const conversations = new Set();
let model = null;
let cluster = null;
let numConversations = 0;

const page = {
  scheduler: new Scheduler(),
  names: new Map(), // of this page's requests, by their ids
  model: () => model,
  settings: () => ({
    model: model?.name,
    hasChat: model?.has_chat ?? true,
    max_tokens: find("max-tokens").valueAsNumber || 256,
    temperature: find("temperature").valueAsNumber || 0,
  }),
  example: (kind) => getJson(`page/example?kind=${encodeURIComponent(kind)}`),
  refused: () => {
    find("settings").open = true;
    find("key").focus();
  },
  closed: (conversation) => {
    conversations.delete(conversation);
    conversation.element.remove();
    const [left] = conversations;
    (left ?? add()).focus();
  },
};

function add() {
  numConversations += 1;
  const conversation = new Conversation(page, `Conversation ${numConversations}`);
  conversations.add(conversation);
  find("conversations").append(conversation.element);
  return conversation;
}

async function loadModel() {
  try {
    model = await getJson("page/model");
    find("model").textContent = `${model.name}, context of ${model.max_length.toLocaleString("en")} tokens`;
    if (model.is_cluster && !cluster) {
      cluster = new Cluster(page.scheduler);
    }
    for (const conversation of conversations) {
      conversation.refresh();
    }
  } catch (error) {
    find("model").textContent = error.message;
    if (error instanceof ApiError && error.status === 401) {
      page.refused();
    }
  }
}

page.scheduler.addEventListener("state", () => {
  find("connection").textContent = page.scheduler.state;
  find("connection").classList.toggle("live", page.scheduler.state === "live");
});
find("settings").addEventListener("submit", (event) => event.preventDefault());
find("add").addEventListener("click", () => add().focus());
find("key").addEventListener("change", () => {
  setKey(find("key").value.trim());
  page.scheduler.restart();
  loadModel();
});

add();
new Charts(page.scheduler, page.names);
loadModel();
page.scheduler.run();
