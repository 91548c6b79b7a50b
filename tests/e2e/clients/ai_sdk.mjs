// Runs the AI SDK against a server, and prints what it got as one line of JSON: node ai_sdk.mjs URL
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const provider = createOpenAICompatible({
  name: 'engine',
  baseURL: `${process.argv[2]}/v1`,
  apiKey: 'unused',
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const options = { model: provider('any'), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const schema = z.object({
  name: z.string().max(20),
  age: z.number().int().min(0).max(120),
  color: z.enum(['red', 'green', 'blue']),
});
const prompt = 'Invent a person. Answer with name, age and color.';
const getWeather = tool({
  description: 'Get the weather of a city.',
  inputSchema: z.object({ city: z.string().max(20) }),
  strict: true,
  execute: async ({ city }) => `18 degrees in ${city}`,
});
const weather = { ...options, prompt: 'What is the weather in Paris?', tools: { getWeather } };

const found = {};

const object = await generateObject({ ...options, schema, prompt });
found.object = { value: object.object, reason: object.finishReason, warnings: object.warnings ?? [] };

const partial = streamObject({ ...options, schema, prompt });
let numParts = 0;
for await (const _ of partial.partialObjectStream) numParts += 1;
found.streamedObject = { value: await partial.object, numParts };

const output = await generateText({ ...options, prompt, output: Output.object({ schema }) });
found.output = output.output;

const forced = await generateText({ ...weather, toolChoice: { type: 'tool', toolName: 'getWeather' } });
found.forced = {
  calls: forced.toolCalls.map(({ toolName, input }) => ({ toolName, input })),
  results: forced.toolResults.map(({ output }) => output),
  reason: forced.finishReason,
};

// The first step must call; the results go back, and the second step answers.
const steps = await generateText({
  ...weather,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
});
found.steps = steps.steps.map((step) => ({ reason: step.finishReason, numCalls: step.toolCalls.length }));
found.answer = steps.text;

const calls = streamText({ ...weather, toolChoice: { type: 'tool', toolName: 'getWeather' } });
const kinds = new Set();
let input = '';
for await (const part of calls.fullStream) {
  if (part.type === 'error') throw part.error;
  if (part.type === 'tool-input-delta') input += part.delta;
  kinds.add(part.type);
}
found.streamedCalls = {
  kinds: [...kinds],
  input,
  calls: (await calls.toolCalls).map(({ toolName, input }) => ({ toolName, input })),
  reason: await calls.finishReason,
};

const whole = await generateText({ ...options, prompt });
const stream = streamText({ ...options, prompt });
let text = '';
for await (const piece of stream.textStream) text += piece;
found.text = {
  whole: whole.text,
  streamed: text,
  reasons: [whole.finishReason, await stream.finishReason],
  usages: [whole.usage, await stream.usage].map(({ inputTokens, outputTokens }) => ({ inputTokens, outputTokens })),
};

try {
  await generateText({ ...options, prompt, maxOutputTokens: 100000000 });
} catch (error) {
  found.error = { status: error.statusCode, message: error.message };
}
console.log(JSON.stringify(found));
