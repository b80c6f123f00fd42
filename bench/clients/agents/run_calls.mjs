// As run_calls of call_matrix.py: a JSON line with the client, then one for each call.

import { readFileSync } from "node:fs";

export const server = JSON.parse(process.env.CALLED_SERVER);
export const CITIES = ["Paris", "Rome", "Oslo"];
export const QUESTION = "What is the weather in Rome?";

export function check(holds, message) {
  if (!holds) throw new Error(message);
}

export async function runCalls(name, calls) {
  const packages = new URL(`node_modules/${name}/package.json`, import.meta.url);
  const version = JSON.parse(readFileSync(packages, "utf8")).version;
  console.log(`{"client": ${JSON.stringify(`npm ${name} ${version}`)}}`);
  for (const call of calls) {
    let came = "";
    let failure = "";
    try {
      came = await call();
    } catch (error) {
      failure = `${error.stack ?? error}`;
    }
    const said = [call.name, came, failure].map((each) => JSON.stringify(each));
    console.log(`{"call": ${said[0]}, "came": ${said[1]}, "failure": ${said[2]}, "left_out": ""}`);
  }
}
