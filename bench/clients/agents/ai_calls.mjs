// The npm package `ai` with `@ai-sdk/openai-compatible` and with the default model of `@ai-sdk/openai`,
// which speaks Responses: text, tools in two steps, streams, objects.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { CITIES, QUESTION, check, runCalls, server } from "./run_calls.mjs";

const provider = createOpenAICompatible({
  name: "mooncake",
  baseURL: server.url,
  apiKey: server.key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = {
  model: provider(server.model),
  prompt: QUESTION,
  maxOutputTokens: 60,
  seed: 5,
  maxRetries: 0,
};
const schema = z.object({ city: z.enum(CITIES), days: z.number().int().min(1).max(9) });

function withTools(called) {
  const weather = tool({
    description: "The weather of a city",
    inputSchema: schema,
    execute: async ({ city }) => {
      called.push(city);
      return "sunny";
    },
  });
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
  return { ...asked, tools: { weather }, stopWhen: stepCountIs(2), prepareStep };
}

async function generate_text() {
  const { text, usage } = await generateText(asked);
  check(text && usage.totalTokens > 0, "no text or no usage");
  return `${JSON.stringify(text)}, ${usage.inputTokens} + ${usage.outputTokens} tokens`;
}

async function generate_text_with_tools() {
  const called = [];
  const { steps, text } = await generateText(withTools(called));
  check(called.length >= 1 && steps.length === 2, `${called.length} calls, ${steps.length} steps`);
  return `called with ${called}, then ${JSON.stringify(text)}`;
}

async function stream_text() {
  const stream = streamText({ ...asked, onError: () => {} });
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  const usage = await stream.usage;
  check(text && usage.totalTokens > 0, "no text or no usage");
  return `${JSON.stringify(text)}, ${usage.inputTokens} + ${usage.outputTokens} tokens`;
}

async function stream_text_with_tools() {
  const called = [];
  const kinds = new Set();
  const stream = streamText({ ...withTools(called), onError: () => {} });
  for await (const part of stream.fullStream) kinds.add(part.type);
  check(called.length >= 1 && kinds.has("tool-result"), `parts: ${[...kinds]}`);
  return `called with ${called}; parts: ${[...kinds]}`;
}

async function generate_object() {
  const { object } = await generateObject({ ...asked, schema });
  schema.parse(object);
  return JSON.stringify(object);
}

async function stream_object() {
  const stream = streamObject({ ...asked, schema, onError: () => {} });
  let last;
  for await (const partial of stream.partialObjectStream) last = partial;
  return JSON.stringify(schema.parse(last));
}

const responses = createOpenAI({ baseURL: server.url, apiKey: server.key });
// It would refer to items of stored responses, which this server keeps on request only.
const providerOptions = { openai: { store: false } };
const asked_responses = { model: responses(server.model), providerOptions };

async function responses_text() {
  const { text, usage } = await generateText({ ...asked, ...asked_responses });
  check(text && usage.totalTokens > 0, "no text or no usage");
  return `${JSON.stringify(text)}, ${usage.inputTokens} + ${usage.outputTokens} tokens`;
}

async function responses_tools_streamed() {
  const called = [];
  const kinds = new Set();
  const stream = streamText({ ...withTools(called), ...asked_responses, onError: () => {} });
  for await (const part of stream.fullStream) kinds.add(part.type);
  check(called.length >= 1 && kinds.has("tool-result"), `parts: ${[...kinds]}`);
  check(!kinds.has("error"), `parts: ${[...kinds]}`);
  return `called with ${called}; parts: ${[...kinds]}`;
}

async function responses_object() {
  const { object } = await generateObject({ ...asked, ...asked_responses, schema });
  return JSON.stringify(schema.parse(object));
}

const of_responses = [responses_text, responses_tools_streamed, responses_object];
const texts = [generate_text, generate_text_with_tools, stream_text, stream_text_with_tools];
await runCalls("ai", [...texts, generate_object, stream_object, ...of_responses]);
