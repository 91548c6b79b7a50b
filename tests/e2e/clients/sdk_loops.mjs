// Runs a tool loop of the AI SDK with each of three providers, in their default settings, and prints one line of JSON:
// node sdk_loops.mjs URL. The first step must call a tool; the result goes back, and the second step answers.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const apiKey = 'unused';
const baseURL = `${process.argv[2]}/v1`;
const models = {
  openai: createOpenAI({ baseURL, apiKey })('gpt-4o'), // Responses, with item_reference
  openaiChat: createOpenAI({ baseURL, apiKey }).chat('gpt-4o'),
  anthropic: createAnthropic({ baseURL, apiKey })('claude-sonnet-4-5'),
  compatible: createOpenAICompatible({ name: 'engine', baseURL, apiKey })('any'),
};
const list_files = tool({
  description: 'List the files of a folder.',
  inputSchema: z.object({ folder: z.string() }),
  execute: async () => 'needle-x7',
});
const found = {};
for (const [name, model] of Object.entries(models)) {
  const options = { model, prompt: 'List the files.', tools: { list_files }, stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(options);
  const stream = streamText(options);
  let text = '';
  for await (const part of stream.fullStream) {
    if (part.type === 'error') throw part.error;
    if (part.type === 'text-delta') text += part.text ?? part.delta;
  }
  // A later turn: the whole history of the first one goes back.
  const later = await generateText({
    ...options,
    prompt: undefined,
    messages: [{ role: 'user', content: 'List.' }, ...whole.response.messages, { role: 'user', content: 'Again.' }],
  });
  found[name] = {
    steps: whole.steps.map((step) => step.toolCalls.length),
    text: whole.text,
    streamed: text,
    later: later.text,
  };
}
console.log(JSON.stringify(found));
