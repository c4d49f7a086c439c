// The official `openai` package, its helpers included. Prints one JSON object.
import OpenAI from "openai";
import { zodResponseFormat, zodFunction } from "openai/helpers/zod";
import { z } from "zod";

const { QUIRE_URL, QUIRE_KEY: apiKey, QUIRE_MODEL: model, QUIRE_TALK } = process.env;
const baseURL = `${QUIRE_URL}/v1`;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const ask = [{ role: "user", content: "What is the capital of France? Answer in one word." }];
const long = { model, messages: ask, max_tokens: 1500, ignore_eos: true };
const out = {};

out.models = (await client.models.list()).data.map((m) => m.id);

const plain = { model, messages: ask, max_tokens: 16, temperature: 0 };
const whole = await client.chat.completions.create(plain);
out.whole = { text: whole.choices[0].message.content, finish: whole.choices[0].finish_reason, usage: whole.usage };
const stream = await client.chat.completions.create({ ...plain, stream: true, stream_options: { include_usage: true } });
out.stream = { text: "" };
for await (const chunk of stream) {
  out.stream.text += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) out.stream.usage = chunk.usage;
}

// The package's own loop: it calls the function, sends the result and goes on until there is an answer.
const asked = [];
const run = () => ({
  model,
  messages: JSON.parse(QUIRE_TALK),
  temperature: 0,
  max_tokens: 60,
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather in a city.",
        parse: JSON.parse,
        function: ({ city }) => (asked.push(city), "21 degrees"),
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
});
out.loop = { told: await client.chat.completions.runTools(run()).finalContent(), asked: [...asked] };
asked.length = 0;
const streamed = client.chat.completions.runTools({ ...run(), stream: true });
out.streamedLoop = { told: await streamed.finalContent(), asked: [...asked] };

const City = z.object({ name: z.enum(["Paris", "Rome"]), population: z.number().int().min(1).max(99) });
const parsed = await client.chat.completions.parse({
  model,
  messages: ask,
  temperature: 0,
  max_tokens: 300,
  response_format: zodResponseFormat(City, "city"),
});
out.parsed = parsed.choices[0].message.parsed;
const strict = await client.chat.completions.parse({
  model,
  messages: ask,
  temperature: 0,
  max_tokens: 300,
  tools: [zodFunction({ name: "city", parameters: City })],
  tool_choice: "required",
  parallel_tool_calls: false,
});
out.strict = strict.choices[0].message.tool_calls[0].function.parsed_arguments;

const response = await client.responses.create({ model, input: ask[0].content, temperature: 0, max_output_tokens: 16 });
out.response = response.output_text;
const events = client.responses.stream({ model, input: ask[0].content, temperature: 0, max_output_tokens: 16 });
out.responseStream = (await events.finalResponse()).output_text;

const error = async (work) => {
  try {
    await work();
  } catch (e) {
    return { name: e.constructor.name, status: e.status, code: e.code, param: e.param, message: e.message, id: e.requestID };
  }
};
out.errors = {
  model: await error(() => client.chat.completions.create({ ...plain, model: "nobody" })),
  field: await error(() => client.chat.completions.create({ ...plain, temperature: -1 })),
  key: await error(() => new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list()),
  timeout: await error(() => client.chat.completions.create(long, { timeout: 400 })),
};

const given = await client.chat.completions.create({ ...long, stream: true });
let chunks = 0;
for await (const _ of given) if (++chunks === 3) given.controller.abort();
out.aborted = chunks;

console.log(JSON.stringify(out));
