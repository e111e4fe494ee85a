// Owns talking to the server: the API key, errors in one shape, a chat's stream, the live ring.

import { events } from "./sse.js";

const KEY = "kvring-key"; // of sessionStorage: gone with the tab, and never in an address

export class ApiError extends Error {
  constructor(status, body) {
    const said = body && body.error ? body.error : {};
    super(said.message || `the server answered with status ${status}`);
    this.status = status;
    this.code = said.code || "";
    this.param = said.param || "";
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function useKey(key) {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

// What to do about a 401: resolves once there is a key to try again with.
let askForKey = async () => {};

export function onMissingKey(ask) {
  askForKey = ask;
}

// fetch with the key; ApiError for every answer that is none of success.
export async function request(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key !== null) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const answer = await fetch(path, {
      method,
      headers,
      signal,
      body: body && JSON.stringify(body),
    });
    if (answer.ok) return answer;
    const error = new ApiError(answer.status, await answer.json().catch(() => null));
    if (error.status !== 401) throw error;
    // another request may have asked meanwhile
    if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
  }
}

export async function models() {
  return (await (await request("/v1/models")).json()).data;
}

export async function cancel(id) {
  await request(`/v1/cancel/${encodeURIComponent(id)}`, { method: "POST" });
}

// A chat's reply as it comes: first {id, session}, then {text}, last {report, usage, finish}.
export async function* chat(body, signal) {
  const wanted = { ...body, stream: true, stream_options: { include_usage: true } };
  const answer = await request("/v1/chat/completions", { method: "POST", body: wanted, signal });
  yield { id: answer.headers.get("x-request-id"), session: answer.headers.get("x-kvring-session") };
  let finish = null;
  for await (const event of events(answer.body)) {
    if (event.data === "[DONE]") return;
    const chunk = JSON.parse(event.data);
    if (event.name === "error") throw new ApiError(503, chunk);
    const choice = chunk.choices[0];
    if (choice && choice.delta.content) yield { text: choice.delta.content };
    if (choice && choice.finish_reason) finish = choice.finish_reason;
    if (chunk.usage) yield { report: chunk.kvring, usage: chunk.usage, finish };
  }
  throw new Error("the connection was lost before the reply was complete");
}

// What GET /ring says, each time it changes.
export async function* ring(signal) {
  const answer = await request("/ring/events", { signal });
  let seen = null;
  for await (const event of events(answer.body)) {
    const said = JSON.parse(event.data);
    if (event.name === "ring") seen = said;
    else for (const [path, value] of said.set) put(seen, path, value);
    yield seen;
  }
}

function put(document, path, value) {
  let place = document;
  for (const key of path.slice(0, -1)) place = place[key];
  place[path[path.length - 1]] = value;
}
