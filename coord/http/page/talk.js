// Owns one turn: sends a conversation, takes the reply into it as it comes, and can be stopped.

import * as api from "./api.js";
import { noteSession } from "./store.js";

const STOP_S = 2; // for the server to end the stream with its numbers; then it is cut

export class Turn {
  // kind: "new", "edited" or "again"; changed: called whenever the conversation has changed.
  constructor(conversation, kind, options, changed) {
    this._conversation = conversation;
    this._kind = kind;
    this._options = options;
    this._changed = changed;
    this._abort = new AbortController();
    this._id = null;
    this.stopped = false;
    this.message = { role: "assistant", content: "" };
  }

  // Resolves when it is over, however it ended; the message says how.
  async run() {
    const { _conversation: conversation, message } = this;
    const body = this._body();
    conversation.messages.push(message);
    this._changed();
    try {
      await this._read(body);
      if (this.stopped) message.note = "Stopped.";
    } catch (error) {
      if (this.stopped) message.note = "Stopped.";
      else message.error = error.message;
    }
    this._changed();
  }

  async _read(body) {
    try {
      for await (const part of api.chat(body, this._abort.signal)) this._take(part);
    } catch (error) {
      // A long conversation leaves less room than the longest reply that was asked for.
      if (error.code !== "context_length_exceeded" || error.param !== "max_tokens") throw error;
      const { max_tokens: _, ...rest } = body;
      for await (const part of api.chat(rest, this._abort.signal)) this._take(part);
    }
  }

  _body() {
    const { messages, system, id } = this._conversation;
    const said = messages
      .filter((message) => message.content)
      .map(({ role, content }) => ({ role, content }));
    if (system.trim()) said.unshift({ role: "system", content: system });
    return { ...this._options, messages: said, prompt_cache_key: id };
  }

  _take(part) {
    if ("id" in part) {
      this._id = part.id;
      noteSession(this._conversation, part.session);
      if (this.stopped) this.stop();
    } else if (part.text) {
      this.message.content += part.text;
    } else {
      this._account(part);
    }
    this._changed();
  }

  _account({ report, usage, finish }) {
    const turn = {
      number: this._conversation.turns.length + 1,
      kind: this._kind,
      cached: usage.prompt_tokens_details.cached_tokens,
      prefilled: report.prefilled,
      tokens: usage.completion_tokens,
      ttft_ms: report.ttft_ms,
      queue_ms: report.queue_ms,
      cold_ms: report.cold_ms,
      tokens_per_s: report.tokens_per_s,
      accepted: report.drafts_accepted,
      rejected: report.drafts_rejected,
      ring: report.ring,
      slot: report.slot,
      miss: report.miss && { position: report.miss.position, reason: report.miss.reason },
      ended_by: report.ended_by,
    };
    this._conversation.turns.push(turn);
    this.message.turn = turn;
    if (finish === "length") this.message.note = "Cut off at the longest reply.";
  }

  // The server keeps what was computed, and says what the turn cost.
  stop() {
    this.stopped = true;
    if (this._id === null) {
      this._abort.abort(); // nothing runs yet, or it waits for its first chance to say so
      return;
    }
    api.cancel(this._id).catch(() => this._abort.abort());
    setTimeout(() => this._abort.abort(), STOP_S * 1000);
  }
}
