// Owns the page as a whole: which conversation is shown, what runs, and the live connection.

import * as api from "./api.js";
import { announce, byId, make } from "./dom.js";
import { askForKey } from "./keys.js";
import { Messages } from "./messages.js";
import { showPlot } from "./plot.js";
import { RingPanel } from "./ring.js";
import * as store from "./store.js";
import { Turn } from "./talk.js";
import { showTurns } from "./turns.js";
import * as words from "./words.js";

const SAVE_MS = 1000; // while a reply is written
const RETRY_MS = [500, 8000];

const conversations = store.loadAll();
const panel = new RingPanel();
const messages = new Messages({ edit, again });
let current = conversations[0] ?? store.create(conversations);
let running = null; // {turn, conversation}
let drawing = false;
let savedAt = 0;
let seen = null;

// ---- what is shown ----

function draw() {
  if (drawing) return;
  drawing = true;
  const now = () => {
    drawing = false;
    const mine = running && running.conversation === current ? running.turn.message : null;
    messages.show(current, mine);
    byId("send").hidden = running !== null;
    byId("stop").hidden = running === null;
    byId("send").disabled = !ready();
  };
  if (document.hidden)
    setTimeout(now, 100); // frames are not painted in a tab behind others
  else requestAnimationFrame(now);
}

function drawAll() {
  draw();
  drawList();
  showPlot(byId("plot"), current.turns, current.colour);
  showTurns(byId("turns"), current.turns);
  panel.show(seen, conversations, current);
  byId("system").value = current.system;
  document.body.dataset.colour = current.colour;
}

function drawList() {
  const entry = (conversation) => {
    const open = make("button", {
      type: "button",
      class: `entry c${conversation.colour}`,
      text: conversation.title,
      "aria-current": conversation === current ? "true" : null,
      on: { click: () => show(conversation) },
    });
    const gone = make("button", {
      type: "button",
      class: "quiet",
      text: "×",
      "aria-label": `Delete ${conversation.title}`,
      on: { click: () => forget(conversation) },
    });
    return make("li", {}, open, gone);
  };
  byId("conversations").replaceChildren(...conversations.map(entry));
}

function show(conversation) {
  current = conversation;
  view("chat");
  drawAll();
  byId("prompt").focus();
}

function view(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === name));
  }
}

function forget(conversation) {
  if (running && running.conversation === conversation) running.turn.stop();
  store.remove(conversation);
  conversations.splice(conversations.indexOf(conversation), 1);
  if (conversation === current) current = conversations[0] ?? store.create(conversations);
  drawAll();
  byId("new").focus();
  announce(`${conversation.title} is deleted.`);
}

// ---- talking ----

async function say(kind) {
  const conversation = current;
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  conversation.used = Date.now();
  const { temperature, longest } = store.settings();
  const turn = new Turn(conversation, kind, { temperature, max_tokens: longest }, () =>
    changed(conversation),
  );
  running = { turn, conversation };
  const over = turn.run();
  drawAll();
  await over;
  running = null;
  takeBack(turn, conversation);
  keep(conversation);
  drawAll();
  announce(ending(turn.message));
}

// A turn that was stopped before it said anything leaves nothing but its question, to be changed.
function takeBack(turn, conversation) {
  if (!turn.stopped || turn.message.content || conversation.messages.at(-1) !== turn.message)
    return;
  conversation.messages.pop();
  const asked = conversation.messages.pop();
  if (conversation === current && !byId("prompt").value) {
    byId("prompt").value = asked.content;
    grow();
  }
}

function ending(message) {
  if (message.error) return `The reply failed: ${message.error}`;
  if (!message.turn) return message.note ?? "";
  const { cached, prefilled, ttft_ms: first } = message.turn;
  return `Reply complete. ${cached} tokens cached, ${prefilled} prefilled, first token after ${words.milliseconds(first)}.`;
}

function changed(conversation) {
  if (conversation === current) draw();
  if (performance.now() > savedAt + SAVE_MS) keep(conversation);
}

function keep(conversation) {
  savedAt = performance.now();
  if (!conversations.includes(conversation)) return; // deleted meanwhile
  if (!store.save(conversation))
    announce("The browser has no room left: this conversation will be lost when you leave.");
}

// Also where nothing was told of the ring: then a turn may well succeed.
function ready() {
  return seen === null || seen.rings.some((ring) => ring.state === "ready");
}

function send() {
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  if (!ready()) {
    announce("The ring is not ready yet.");
    return;
  }
  if (!current.messages.length) current.title = text.replace(/\s+/g, " ").slice(0, 60);
  byId("prompt").value = "";
  grow();
  current.messages.push({ role: "user", content: text });
  say("new");
}

function edit(index, text) {
  if (running) return;
  current.messages.splice(index, Infinity, { role: "user", content: text });
  if (index === 0) current.title = text.replace(/\s+/g, " ").slice(0, 60);
  say("edited");
}

function again(index) {
  if (running) return;
  current.messages.splice(index, Infinity);
  say("again");
}

function grow() {
  const box = byId("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, 220)}px`;
}

// ---- the live ring ----

async function watch() {
  let wait = RETRY_MS[0];
  for (;;) {
    if (document.hidden)
      await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
    const abort = new AbortController();
    const pause = () => {
      if (document.hidden) abort.abort();
    };
    document.addEventListener("visibilitychange", pause);
    try {
      for await (const said of api.ring(abort.signal)) {
        wait = RETRY_MS[0];
        seen = said;
        panel.show(seen, conversations, current);
        state(...standing(seen));
        byId("send").disabled = !ready();
      }
    } catch (error) {
      if (!document.hidden)
        state("bad", error instanceof api.ApiError ? error.message : "not connected");
    } finally {
      document.removeEventListener("visibilitychange", pause);
    }
    await new Promise((go) => setTimeout(go, wait));
    wait = Math.min(2 * wait, RETRY_MS[1]);
  }
}

function standing({ rings, turns }) {
  const ready = rings.filter((ring) => ring.state === "ready");
  if (!ready.length) {
    const stages = rings.flatMap((ring) => ring.stages);
    const share =
      stages.reduce((sum, stage) => sum + stage.progress, 0) / Math.max(1, stages.length);
    return share < 1
      ? ["busy", `loading, ${words.percent(share)}`]
      : ["busy", "the ring is forming"];
  }
  const waiting = turns.waiting ? `, ${turns.waiting} waiting` : "";
  return turns.running ? ["good", `${turns.running} running${waiting}`] : ["good", "ready"];
}

function state(kind, text) {
  const place = byId("state");
  place.dataset.kind = kind;
  const said = place.querySelector(".words");
  if (said.textContent !== text) said.textContent = text;
}

// ---- the start ----

function connectControls() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("input", grow);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => running?.turn.stop());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !byId("key-dialog").open) running.turn.stop();
  });
  byId("new").addEventListener("click", () => show(store.create(conversations)));
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => view(button.dataset.show));
  }
  byId("system").addEventListener("change", () => {
    current.system = byId("system").value;
    keep(current);
  });
  for (const name of ["temperature", "longest"]) {
    const field = byId(name);
    field.value = store.settings()[name];
    field.addEventListener("change", () => {
      if (field.checkValidity() && field.value)
        store.saveSettings({ ...store.settings(), [name]: Number(field.value) });
      else field.value = store.settings()[name];
    });
  }
  byId("forget-key").addEventListener("click", () => {
    api.useKey(null);
    location.reload();
  });
  addEventListener("pagehide", () => {
    if (running) keep(running.conversation);
  });
}

async function start() {
  connectControls();
  drawAll();
  api.onMissingKey(askForKey);
  if (document.body.dataset.key === "needed" && !api.hasKey()) await askForKey(false);
  byId("forget-key").hidden = !api.hasKey();
  watch();
  try {
    const [model] = await api.models();
    byId("model").textContent = `${model.id}, ${words.count(model.max_model_len)} tokens a slot`;
  } catch (error) {
    state("bad", error.message);
  }
}

start();
