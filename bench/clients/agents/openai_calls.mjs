// The npm package `openai`: a chat, its stream, and its loop of tools.

import OpenAI from "openai";
import { CITIES, QUESTION, check, runCalls, server } from "./run_calls.mjs";

const client = new OpenAI({ baseURL: server.url, apiKey: server.key, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const asked = { model: server.model, messages, max_tokens: 60, seed: 5 };

function weather(called) {
  return {
    type: "function",
    function: {
      name: "weather",
      description: "The weather of a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string", enum: CITIES } },
        required: ["city"],
        additionalProperties: false,
      },
      parse: JSON.parse,
      function: (given) => {
        called.push(given.city);
        return "sunny";
      },
    },
  };
}

async function chat() {
  const answer = await client.chat.completions.create(asked);
  check(answer.choices[0].message.content, "no text");
  return JSON.stringify(answer.choices[0].message.content);
}

async function chat_streamed() {
  const whole = (await client.chat.completions.create(asked)).choices[0].message.content;
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  check(text === whole, `streamed ${JSON.stringify(text)}, whole ${JSON.stringify(whole)}`);
  return JSON.stringify(text);
}

async function tools_run(choice, stream, maxChatCompletions) {
  const called = [];
  const tools = [weather(called)];
  const more = { ...asked, tools, tool_choice: choice, parallel_tool_calls: false, stream };
  const runner = client.chat.completions.runTools(more, { maxChatCompletions });
  await runner.done();
  check(called.length && called.every((city) => CITIES.includes(city)), `called with ${called}`);
  return `${called.length} calls: ${called}; ${runner.messages.map((each) => each.role)}`;
}

const named = { type: "function", function: { name: "weather" } };
const run_tools_named = () => tools_run(named, false);
const run_tools_named_streamed = () => tools_run(named, true);
const run_tools_required = () => tools_run("required", false, 2);

async function response() {
  const more = { model: server.model, input: QUESTION, max_output_tokens: 60, temperature: 0 };
  const whole = await client.responses.create(more);
  const stream = client.responses.stream(more);
  const kinds = new Set();
  let streamed = "";
  for await (const event of stream) {
    kinds.add(event.type);
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  check(whole.output_text && streamed === whole.output_text, streamed);
  return `${JSON.stringify(whole.output_text)}; ${[...kinds].join(" ")}`;
}

async function response_parsed() {
  const schema = weather([]).function.parameters;
  const format = { type: "json_schema", name: "weather", schema, strict: true };
  const more = { model: server.model, input: QUESTION, max_output_tokens: 60 };
  const { output_text } = await client.responses.parse({ ...more, text: { format } });
  check(CITIES.includes(JSON.parse(output_text).city), output_text);
  return output_text;
}

const calls = [response, response_parsed, chat, chat_streamed, run_tools_named, run_tools_named_streamed];
await runCalls("openai", [...calls, run_tools_required]);
