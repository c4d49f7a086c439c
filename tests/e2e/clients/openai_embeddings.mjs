// Embeddings with the official `openai` package (it asks for base64) and with the AI SDK. Prints one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany } from "ai";
import OpenAI from "openai";

const { QUIRE_URL, QUIRE_KEY: apiKey, QUIRE_MODEL: model } = process.env;
const baseURL = `${QUIRE_URL}/v1`;
const values = ["a cat", "a kitten", "the stock market"];
const made = await new OpenAI({ baseURL, apiKey, maxRetries: 0 }).embeddings.create({ model, input: values });
const quire = createOpenAICompatible({ name: "quire", baseURL, apiKey });
const same = await embedMany({ model: quire.embeddingModel(model), values, maxRetries: 0 });
console.log(JSON.stringify({ openai: made.data.map((d) => d.embedding), ai: same.embeddings, usage: made.usage }));
