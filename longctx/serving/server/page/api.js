// Requests to this server. The API key lives in this module's memory and nowhere else.

const BASE = new URL("../../", import.meta.url);
let key = "";

export function setKey(value) {
  key = value;
}

/** An answer that is not 2xx, or an error in a stream, with the server's own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch a path of this server; throws ApiError. */
async function request(path, { headers = {}, ...options } = {}) {
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(new URL(path, BASE), { ...options, headers: { ...headers, ...authorization } });
  if (!response.ok) {
    throw new ApiError(response.status, await explain(response));
  }
  return response;
}

async function explain(response) {
  const text = await response.text();
  try {
    const answer = JSON.parse(text);
    return String(answer.error?.message ?? answer.detail ?? text);
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

export async function getJson(path) {
  return (await request(path)).json();
}

/** Yield the data of each server-sent event of a GET, or of a POST of `body` as JSON. */
export async function* events(path, { body, headers = {}, signal } = {}) {
  const post = { method: "POST", body: JSON.stringify(body), headers: { ...headers, "content-type": "application/json" } };
  const response = await request(path, { ...(body ? post : { headers }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream may have failed already
  }
}

/** Yield {text} pieces and one {usage} of an answer; throws ApiError, and AbortError where `signal` aborts. */
export async function* answer(path, body, requestId, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  for await (const data of events(path, { body: asked, headers: { "x-request-id": requestId }, signal })) {
    if (data === "[DONE]") {
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ApiError(Number(chunk.error.code) || 500, String(chunk.error.message));
    }
    for (const choice of chunk.choices) {
      const text = choice.delta?.content ?? choice.text;
      if (text || choice.finish_reason) {
        yield { text: text ?? "", finishReason: choice.finish_reason };
      }
    }
    if (chunk.usage) {
      yield { usage: chunk.usage };
    }
  }
}
