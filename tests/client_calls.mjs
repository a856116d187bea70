// Calls of the Vercel AI SDK, unmodified: `node client_calls.mjs URL KIND`, where `node_modules` has it.
//
// `KIND` is the provider: `openai`, which asks for responses, or `openai-compatible`, which asks for chats. Each call has
// to return what its schema says, whatever the model means.

import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const PERSON = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(99) });
const ASK = "Name a person and say how old they are.";

async function collect(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const [url, kind] = process.argv.slice(2);
const provider = {
  openai: () => createOpenAI({ baseURL: url, apiKey: "none" }),
  "openai-compatible": () => createOpenAICompatible({ name: "longctx", baseURL: url, supportsStructuredOutputs: true }),
}[kind]();
const name = (await (await fetch(`${url}/models`)).json()).data[0].id;
const settings = { model: provider(name), maxOutputTokens: 200, temperature: 0, maxRetries: 0 };

PERSON.parse((await generateObject({ ...settings, schema: PERSON, prompt: ASK })).object);
// The SDK deprecates `generateObject` in favour of this.
PERSON.parse((await generateText({ ...settings, output: Output.object({ schema: PERSON }), prompt: ASK })).output);
const streamed = streamObject({ ...settings, schema: PERSON, prompt: ASK });
const parts = await collect(streamed.partialObjectStream);
assert.deepEqual(parts.at(-1), PERSON.parse(await streamed.object));

const cities = [];
const execute = async ({ city }) => cities.push(city);
const weather = tool({ description: "Weather", inputSchema: z.object({ city: z.string().max(12) }), execute });
const question = { ...settings, tools: { weather }, toolChoice: "required", prompt: "Weather in Paris?" };
const { toolCalls } = await generateText(question);
assert.ok(toolCalls.length);
assert.deepEqual(toolCalls.map(({ toolName, input }) => [toolName, input.city]), cities.map((city) => ["weather", city]));
// The tool's result goes back to the model, which then has to answer in words.
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
const onError = ({ error }) => assert.fail(error);
const answer = streamText({ ...question, stopWhen: stepCountIs(2), prepareStep, onError });
assert.ok((await collect(answer.textStream)).length > 1);
assert.equal((await answer.steps).length, 2);

assert.ok((await embed({ model: provider.textEmbeddingModel(name), value: "hello", maxRetries: 0 })).embedding.length);
await assert.rejects(generateText({ ...settings, model: provider("absent"), prompt: ASK }), { statusCode: 404 });
