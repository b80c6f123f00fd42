// The tool promptfoo: an evaluation of three prompts, one with a required tool, one with a schema.

import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { CITIES, QUESTION, check, runCalls, server } from "./run_calls.mjs";

const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const schema = {
  type: "json_schema",
  json_schema: { name: "weather", schema: parameters, strict: true },
};

function evaluated(more, assertion, kind = "chat") {
  const config = { apiBaseUrl: server.url, apiKey: server.key, max_tokens: 60, seed: 5, ...more };
  const evaluation = {
    prompts: ["{{question}}"],
    providers: [{ id: `openai:${kind}:${server.model}`, config }],
    tests: [{ vars: { question: QUESTION }, assert: [assertion] }],
  };
  mkdirSync("promptfoo", { recursive: true });
  writeFileSync("promptfooconfig.json", JSON.stringify(evaluation));
  const program = new URL("node_modules/promptfoo/dist/src/entrypoint.js", import.meta.url);
  const words = ["eval", "-c", "promptfooconfig.json", "-o", "results.json", "--no-cache"];
  const env = {
    ...process.env,
    PROMPTFOO_DISABLE_TELEMETRY: "1",
    PROMPTFOO_DISABLE_UPDATE: "1",
    PROMPTFOO_CONFIG_DIR: "promptfoo",
  };
  try {
    execFileSync("node", [program.pathname, ...words, "--no-share"], { env, stdio: "pipe" });
  } catch (error) {
    throw new Error(`${error.stdout}`.slice(-800) + `${error.stderr}`.slice(-800));
  }
  const { results } = JSON.parse(readFileSync("results.json", "utf8"));
  check(results.stats.successes === 1, JSON.stringify(results.stats));
  return JSON.stringify(results.results[0].response.output);
}

const chat = () => evaluated({}, { type: "javascript", value: "output.length > 0" });
const required_tool = () =>
  evaluated({ tools, tool_choice: "required" }, { type: "is-valid-openai-tools-call" });
const json_schema = () => evaluated({ response_format: schema }, { type: "is-json" });

const responses = () =>
  evaluated({ max_output_tokens: 60 }, { type: "javascript", value: "output.length > 0" }, "responses");

await runCalls("promptfoo", [chat, required_tool, json_schema, responses]);
