// The official `ollama` package. Prints one JSON object.
import { Ollama } from "ollama";

const { QUIRE_URL: host, QUIRE_KEY, QUIRE_MODEL: model, QUIRE_TALK } = process.env;
const headers = { Authorization: `Bearer ${QUIRE_KEY}` };
const client = new Ollama({ host, headers });
const messages = [{ role: "user", content: "What is the capital of France? Answer in one word." }];
const options = { temperature: 0, num_predict: 16 };
const out = {};

out.models = (await client.list()).models.map((m) => m.name);
out.shown = (await client.show({ model })).capabilities;
out.running = (await client.ps()).models.map((m) => m.name);

const whole = await client.chat({ model, messages, options });
out.whole = { text: whole.message.content, done: whole.done, reason: whole.done_reason, count: whole.eval_count };
out.stream = { text: "" };
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  out.stream.text += part.message.content;
  if (part.done) Object.assign(out.stream, { done: part.done, reason: part.done_reason, count: part.eval_count });
}
out.generated = (await client.generate({ model, prompt: messages[0].content, options })).response;

const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const talk = JSON.parse(QUIRE_TALK).map(({ tool_call_id, tool_calls, ...message }) => ({
  ...message,
  ...(tool_call_id && { tool_name: "get_weather" }),
  ...(tool_calls && {
    tool_calls: tool_calls.map(({ function: f }) => ({ function: { name: f.name, arguments: JSON.parse(f.arguments) } })),
  }),
}));
const loop = async (stream) => {
  const said = [...talk];
  const calls = [];
  for (let round = 0; round < 3; round++) {
    const message = { role: "assistant", content: "", tool_calls: [] };
    const answer = await client.chat({ model, messages: said, tools, options: { temperature: 0, num_predict: 60 }, stream });
    for await (const part of stream ? answer : [answer]) {
      message.content += part.message.content;
      message.tool_calls.push(...(part.message.tool_calls ?? []));
    }
    if (!message.tool_calls.length) return { told: message.content, calls };
    said.push(message);
    for (const call of message.tool_calls) {
      calls.push([call.function.name, call.function.arguments]);
      said.push({ role: "tool", tool_name: call.function.name, content: "21 degrees" });
    }
  }
};
out.loop = await loop(false);
out.streamedLoop = await loop(true);

const format = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, rank: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "rank"],
  additionalProperties: false,
};
out.format = JSON.parse((await client.chat({ model, messages, format, options: { ...options, num_predict: 300 } })).message.content);
const thought = await client.chat({ model, messages, think: true, options });
out.thought = { thinking: thought.message.thinking ?? "", text: thought.message.content };

const error = async (work) => {
  try {
    await work();
  } catch (e) {
    return { name: e.name, status: e.status_code, message: e.message };
  }
};
out.errors = {
  model: await error(() => client.chat({ model: "nobody", messages })),
  option: await error(() => client.chat({ model, messages, options: { temperature: -1 } })),
  key: await error(() => new Ollama({ host }).chat({ model, messages })),
};

// Counting goes on for as long as it may.
const counting = { model, prompt: "1, 2, 3, 4, 5, 6, 7,", raw: true, options: { temperature: 0, num_predict: 1500 } };
const endless = await client.generate({ ...counting, stream: true });
let parts = 0;
const aborted = await error(async () => {
  for await (const _ of endless) if (++parts === 3) client.abort();
});
const impatient = new Ollama({ host, headers, fetch: (url, init) => fetch(url, { ...init, signal: AbortSignal.timeout(400) }) });
out.errors.timeout = await error(() => impatient.generate(counting));
out.aborted = { parts, ...aborted };

console.log(JSON.stringify(out));
