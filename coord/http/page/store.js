// Owns the conversations: what they hold, and keeping them in localStorage, one entry each.
//
// A conversation: {id, title, colour, used, system, messages, turns, sessions}. A message: {role,
// content}, an assistant's with `turn`, `note` or `error` as well. A turn: what one reply cost.
// sessions: the server's names for it, by which its slots are known (a fork may have another).

const PREFIX = "kvring-conversation-";
const SETTINGS = "kvring-settings";
const COLOURS = 8;
const KEPT_SESSIONS = 16;

export function loadAll() {
  const found = [];
  for (let index = 0; index < localStorage.length; index++) {
    const name = localStorage.key(index);
    if (!name.startsWith(PREFIX)) continue;
    try {
      found.push(JSON.parse(localStorage.getItem(name)));
    } catch {
      localStorage.removeItem(name); // half a write of a browser that was killed
    }
  }
  return found.sort((one, other) => other.used - one.used);
}

// False when the browser has no room for it.
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

// A new one, in the colour that the others use least.
export function create(others) {
  const uses = Array(COLOURS).fill(0);
  for (const other of others) uses[other.colour] += 1;
  return {
    id: randomName(),
    title: "New conversation",
    colour: uses.indexOf(Math.min(...uses)),
    used: Date.now(),
    system: "",
    messages: [],
    turns: [],
    sessions: [],
  };
}

export function noteSession(conversation, session) {
  if (!session || conversation.sessions.includes(session)) return;
  conversation.sessions = [...conversation.sessions, session].slice(-KEPT_SESSIONS);
}

export function settings() {
  const plain = { temperature: 0.7, longest: 512 };
  try {
    return { ...plain, ...JSON.parse(localStorage.getItem(SETTINGS)) };
  } catch {
    return plain;
  }
}

export function saveSettings(chosen) {
  localStorage.setItem(SETTINGS, JSON.stringify(chosen));
}

// crypto.randomUUID is only there on https and localhost.
function randomName() {
  return [...crypto.getRandomValues(new Uint8Array(12))]
    .map((byte) => byte.toString(16).padStart(2, "0"))
    .join("");
}
