// OpenAI's own client for Node, unmodified, against a running deployment:  node client.js BASE_URL MODEL
// Prints one line of JSON for each thing it tried. The test that starts it judges them.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "-", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const report = (name, found) => console.log(JSON.stringify({ name, ...found }));

const models = await client.models.list();
report("models", { ids: models.data.map((one) => one.id) });

const chat = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, seed: 7 });
report("chat", { text: chat.choices[0].message.content, finish: chat.choices[0].finish_reason, usage: chat.usage });

let text = "";
let usage = null;
let finish = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 8, temperature: 0, seed: 7, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
report("stream", { text, finish, usage });

const completion = await client.completions.create({ model, prompt: "Hello", max_tokens: 8, temperature: 0 });
report("completion", { text: completion.choices[0].text, usage: completion.usage });

try {
  await client.chat.completions.create({ model: "gpt-4o", messages });
} catch (error) {
  report("another model", { status: error.status, code: error.code });
}

try {
  await client.chat.completions.create({ model, messages, tools: [{ type: "function", function: { name: "f" } }] });
} catch (error) {
  report("tools", { status: error.status, param: error.param });
}

const left = await client.completions.create({ model, prompt: "a long one", max_tokens: 2000, stream: true });
let seen = 0;
for await (const chunk of left) {
  seen += chunk.choices[0].text.length;
  if (seen > 3) break;
}
report("left early", { seen });
