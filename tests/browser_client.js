// The official client in a page, `?url=URL`: an element for each call has its result or its error, as JSON.

import OpenAI from "openai";

const url = new URLSearchParams(location.search).get("url");
const client = new OpenAI({ baseURL: url, apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0 });
const request = { messages: [{ role: "user", content: "Name a colour." }], max_tokens: 9, temperature: 0 };

const calls = {
  models: async () => (request.model = (await client.models.list()).data[0].id),
  chat: async () => (await client.chat.completions.create(request)).choices[0].message.content,
  stream: async () => {
    let text = "";
    for await (const { choices } of await client.chat.completions.create({ ...request, stream: true })) {
      text += choices[0]?.delta.content ?? "";
    }
    return text;
  },
  refused: async () => await client.chat.completions.create({ ...request, max_tokens: -1 }),
};

for (const [id, call] of Object.entries(calls)) {
  const result = await call().catch((error) => ({
    kind: error.constructor.name,
    status: error.status,
    message: error.message,
    request: error.requestID,
  }));
  document.body.append(Object.assign(document.createElement("pre"), { id, textContent: JSON.stringify(result) }));
}
