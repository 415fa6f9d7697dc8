// What a page does: each function is called by test_pages_in_chromium.py, with the address of a server, and returns what it read.

import {InvokeEndpointCommand, InvokeEndpointWithResponseStreamCommand, SageMakerRuntimeClient} from "@aws-sdk/client-sagemaker-runtime";
import {ChatOpenAI} from "@langchain/openai";
import OpenAI4 from "openai-4";
import OpenAI5 from "openai-5";

const MESSAGES = [{role: "user", content: "hello"}];
const decoder = new TextDecoder();

const openai = OpenAI => async (base, model) => {
  const headers = {"X-Client-Request-Id": "of-a-page"};
  const client = new OpenAI({apiKey: "none", baseURL: `${base}/v1`, dangerouslyAllowBrowser: true, maxRetries: 0, defaultHeaders: headers});
  const told = await client.chat.completions.create({model, messages: MESSAGES}).withResponse();
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({model, messages: MESSAGES, stream: true})) streamed += chunk.choices[0]?.delta?.content || "";
  return {text: told.data.choices[0].message.content, streamed, id: told.request_id, own: told.response.headers.get("x-client-request-id")};
};

const aws = async (base, model) => {
  const credentials = {accessKeyId: "none", secretAccessKey: "none"};
  const client = new SageMakerRuntimeClient({region: "us-east-1", endpoint: base, credentials, maxAttempts: 1});
  const call = {EndpointName: model, ContentType: "application/json", CustomAttributes: "a=1", Body: JSON.stringify({inputs: "hello"})};
  const whole = await client.send(new InvokeEndpointCommand(call));
  const parts = await client.send(new InvokeEndpointWithResponseStreamCommand({...call, Body: JSON.stringify({inputs: "hello", stream: true})}));
  let streamed = "";
  for await (const event of parts.Body) streamed += decoder.decode(event.PayloadPart.Bytes);
  return {text: decoder.decode(whole.Body), streamed, id: whole.$metadata.requestId};
};

const langchain = async (base, model) => {
  const chat = new ChatOpenAI({model, apiKey: "none", maxRetries: 0, configuration: {baseURL: `${base}/v1`, dangerouslyAllowBrowser: true}});
  let streamed = "";
  for await (const chunk of await chat.stream("hello")) streamed += chunk.content;
  return {text: (await chat.invoke("hello")).content, streamed};
};

const plain = async (base, model) => {
  const headers = {"Content-Type": "application/json", "X-My-Own": "1", "X-Request-Id": "of-a-page"};
  const answer = await fetch(`${base}/v1/chat/completions`, {method: "POST", headers, body: JSON.stringify({model, messages: MESSAGES})});
  const {choices} = await answer.json();
  return {text: choices[0].message.content, id: answer.headers.get("x-request-id"), own: answer.headers.get("x-client-request-id")};
};

const CLIENTS = {openai4: openai(OpenAI4), openai5: openai(OpenAI5), aws, langchain, fetch: plain};

// The result of a client, or the error that its page sees.
globalThis.call = async (name, base, model) => {
  try {
    return await CLIENTS[name](base, model);
  } catch (error) {
    return {error: error.name, status: error.status ?? error.$metadata?.httpStatusCode ?? null, message: String(error.message)};
  }
};

// The status and the text of a request, or null where the browser lets its page read nothing.
globalThis.refused = async (url, method, headers, size) => {
  const large = size ? {"X-Large": "x".repeat(size)} : {};
  try {
    const answer = await fetch(url, {method, headers: {"Content-Type": "application/json", ...headers, ...large}, body: method === "GET" ? undefined : "{}"});
    return [answer.status, await answer.text()];
  } catch {
    return null;
  }
};

// What a WebSocket sends back; null where it is not opened.
globalThis.socket = url => new Promise(resolve => {
  const opened = new WebSocket(url);
  opened.onopen = () => opened.send("hello");
  opened.onmessage = event => {
    opened.close();
    resolve(event.data);
  };
  opened.onerror = () => resolve(null);
});
