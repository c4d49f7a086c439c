// The Vercel AI SDK, over chat completions (@ai-sdk/openai-compatible) and over Responses (@ai-sdk/openai). Prints one JSON object.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const { QUIRE_URL, QUIRE_KEY: apiKey, QUIRE_MODEL: name, QUIRE_TALK } = process.env;
const baseURL = `${QUIRE_URL}/v1`;
const chat = createOpenAICompatible({ name: "quire", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const responses = createOpenAI({ baseURL, apiKey });
const prompt = "What is the capital of France? Answer in one word.";
const plain = { temperature: 0, maxOutputTokens: 16, maxRetries: 0 };

// OpenAI's messages as the SDK has them.
const messages = JSON.parse(QUIRE_TALK).map((m) => {
  if (m.role === "tool") {
    const output = { type: "text", value: m.content };
    return { role: "tool", content: [{ type: "tool-result", toolCallId: m.tool_call_id, toolName: "get_weather", output }] };
  }
  if (!m.tool_calls) return m;
  const content = m.tool_calls.map((c) => ({
    type: "tool-call",
    toolCallId: c.id,
    toolName: c.function.name,
    input: JSON.parse(c.function.arguments),
  }));
  return { role: "assistant", content };
});

const drive = async (model) => {
  const out = {};
  const whole = await generateText({ model, prompt, ...plain });
  out.whole = { text: whole.text, finish: whole.finishReason, tokens: whole.usage.outputTokens };
  const stream = streamText({ model, prompt, ...plain });
  out.stream = { text: "" };
  for await (const text of stream.textStream) out.stream.text += text;
  out.stream.finish = await stream.finishReason;
  out.stream.tokens = (await stream.usage).outputTokens;

  const asked = [];
  const get_weather = tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
    execute: async ({ city }) => (asked.push(city), "21 degrees"),
  });
  const loop = { model, messages, tools: { get_weather }, stopWhen: stepCountIs(3), ...plain, maxOutputTokens: 60 };
  const looped = await generateText(loop);
  out.loop = { told: looped.text, steps: looped.steps.length, asked: [...asked] };
  asked.length = 0;
  const streamed = streamText(loop);
  await streamed.consumeStream();
  out.streamedLoop = { told: await streamed.text, steps: (await streamed.steps).length, asked: [...asked] };

  const City = z.object({ name: z.enum(["Paris", "Rome"]), rank: z.number().int().min(1).max(9) });
  const forced = await generateText({
    model,
    prompt,
    ...plain,
    maxOutputTokens: 300,
    tools: { get_weather, note: tool({ inputSchema: City, strict: true }) },
    toolChoice: { type: "tool", toolName: "note" },
  });
  out.forced = forced.toolCalls.map((c) => [c.toolName, c.input]);
  const output = Output.object({ schema: City });
  out.object = (await generateText({ model, prompt, ...plain, maxOutputTokens: 300, output })).output;
  const partial = streamText({ model, prompt, ...plain, maxOutputTokens: 300, output });
  out.partials = 0;
  for await (const _ of partial.partialOutputStream) out.partials++;
  out.streamedObject = await partial.output;

  const error = async (work) => {
    try {
      await work();
    } catch (e) {
      return { name: e.name, status: e.statusCode, message: e.message };
    }
  };
  // A text that may not end before anybody has lost patience.
  const story = Output.object({ schema: z.object({ text: z.string().min(9000) }) });
  const endless = { model, prompt: "Tell a story.", maxRetries: 0, maxOutputTokens: 1500, output: story };
  out.errors = {
    setting: await error(() => generateText({ model, prompt, ...plain, temperature: -1 })),
    timeout: await error(() => generateText({ ...endless, abortSignal: AbortSignal.timeout(400) })),
  };
  const stop = new AbortController();
  const counting = streamText({ ...endless, abortSignal: stop.signal, onError() {} });
  setTimeout(() => stop.abort(), 500); // not by what comes: the SDK holds back an object's text until a field is whole
  for await (const part of counting.fullStream) out.aborted = part.type;
  return { out, error };
};

const { out: first, error } = await drive(chat(name));
first.errors.model = await error(() => generateText({ model: chat("nobody"), prompt, ...plain }));
const stranger = createOpenAICompatible({ name: "quire", baseURL, apiKey: "wrong" });
first.errors.key = await error(() => generateText({ model: stranger(name), prompt, ...plain }));
const providerOptions = { quire: { chat_template_kwargs: { enable_thinking: true } } };
const thought = await generateText({ model: chat(name), prompt, ...plain, providerOptions });
first.thought = { reasoning: thought.reasoningText ?? "", text: thought.text };
const thinking = streamText({ model: chat(name), prompt, ...plain, providerOptions });
await thinking.consumeStream();
first.streamedThought = { reasoning: (await thinking.reasoningText) ?? "", text: await thinking.text };

const { out: second } = await drive(responses(name));
console.log(JSON.stringify({ chat: first, responses: second }));
