// Vercel's AI SDK over its three providers: text, a stream, a tool that is called and answered, a typed object.
//
//     npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
//     node examples/clients/ai_sdk.mjs
//
// PDMESH_URL and PDMESH_API_KEY name another gateway and its key.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = (process.env.PDMESH_URL ?? "http://127.0.0.1:8000") + "/v1";
const apiKey = process.env.PDMESH_API_KEY ?? "none";
const { data } = await (await fetch(`${baseURL}/models`, { headers: { authorization: `Bearer ${apiKey}` } })).json();
const name = data[0].id;
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  "openai (responses)": openai(name),
  "openai.chat": openai.chat(name),
  "openai-compatible": createOpenAICompatible({ name: "pdmesh", baseURL, apiKey, supportsStructuredOutputs: true })(name),
  anthropic: createAnthropic({ baseURL, apiKey })(name),
};
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => `It rains in ${city}.`,
});
const city = z.object({ name: z.string().max(20), inhabitants: z.number().int().min(0).max(50000000) });

for (const [label, model] of Object.entries(models)) {
  const checks = {
    text: async () => (await generateText({ model, prompt: "Say hello.", maxOutputTokens: 40 })).text,
    stream: async () => {
      let text = "";
      for await (const piece of streamText({ model, prompt: "Say hello.", maxOutputTokens: 40 }).textStream) text += piece;
      return text;
    },
    tool: async () => {
      const { steps } = await generateText({
        model,
        prompt: "What is the weather in Oslo?",
        tools: { weather },
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
        stopWhen: stepCountIs(2),
        maxOutputTokens: 200,
      });
      return JSON.stringify(steps.flatMap((step) => step.toolResults.map((result) => result.output)));
    },
    object: async () =>
      JSON.stringify(
        (await generateObject({ model, schema: city, prompt: "Which city is the largest?", maxOutputTokens: 200 })).object,
      ),
  };
  for (const [check, run] of Object.entries(checks)) {
    try {
      console.log(`${label}, ${check}: ok: ${(await run()).slice(0, 80).replaceAll("\n", " ")}`);
    } catch (error) {
      console.log(`${label}, ${check}: FAILED: ${String(error.message ?? error).slice(0, 200)}`);
      process.exitCode = 1;
    }
  }
}
