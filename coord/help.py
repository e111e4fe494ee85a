"""Owns which section of docs/troubleshooting.md explains an error. Knows no HTTP and no terminal.

The one table, for both: an error has a code (those of the HTTP API), or only its words.
"""

from __future__ import annotations

PAGE = "docs/troubleshooting.md"
BY_CODE = {
    "body_timeout": "timeouts",
    "body_too_large": "prompt-too-long",
    "context_length_exceeded": "prompt-too-long",
    "deadline_exceeded": "timeouts",
    "draining": "draining",
    "invalid_api_key": "api-keys",
    "model_not_found": "wrong-model-name",
    "no_chat_template": "chat-template",
    "not_an_admin": "api-keys",
    "not_ready": "not-ready",
    "not_your_slot": "api-keys",
    "nothing_left_to_give_up": "not-cached",
    "queue_full": "queue-full",
    "ring_lost": "ring-lost",
    "rows_refused": "ring-lost",
    "shutting_down": "draining",
    "template_error": "chat-template",
    "too_many_bodies": "file-limit",
    "too_many_connections": "file-limit",
    "too_many_turns": "queue-full",
    "too_many_watchers": "file-limit",
    "tools_not_supported": "tool-calls",
    "unknown_parameter": "unsupported-parameter",
    "unsupported_parameter": "unsupported-parameter",
    "unsupported_value": "unsupported-parameter",
}
VAGUE = ("not_ready", "ring_lost")  # what is missing is in their words
# The first that a message contains.
BY_WORDS = {
    "have different weights": "different-weights",
    "not enough memory": "not-enough-memory",
    "killed by SIGKILL": "not-enough-memory",
    "Address already in use": "port-in-use",
    "set `bind` beside `address`": "wrong-address",
    "has not been heard of": "stage-not-heard-of",
    "was last heard of over": "stage-not-heard-of",
    "without keys": "keys",
    "secret_key_file of": "keys",
    "there are no API keys": "api-keys",
    "--api-key-file": "api-keys",
    "Too many open files": "file-limit",
    "this installation of torch": "torch",
    "no server at": "no-server",
    "is connected but silent": "slow-first-token",
    "it must be a model of the same family": "drafts",
    "--draft-model go together": "drafts",
    "not a GGUF file": "model-not-supported",
    "GGUF version": "model-not-supported",
    "a quantised checkpoint": "model-not-supported",
    "is not supported (supported: ": "model-not-supported",
    "rope type": "model-not-supported",
    "rope scaling": "model-not-supported",
    "could not download": "no-download",
    "from the model hub": "no-download",
}


def anchor(message: str, code: str | None = None) -> str | None:
    """The section's anchor, None where the message says all there is to say."""
    found = None if code is None else BY_CODE.get(code)
    if code is not None and code not in VAGUE:
        return found
    return next((at for words, at in BY_WORDS.items() if words in message), found)


def pointer(message: str, code: str | None = None) -> str | None:
    """Where to read on, "docs/troubleshooting.md#keys"; None without a section."""
    at = anchor(message, code)
    return None if at is None else f"{PAGE}#{at}"


def pointed(message: str, code: str | None = None) -> str:
    """The message as a terminal shows it: with its pointer behind it, if there is one."""
    where = pointer(message, code)
    return message if where is None or f"{PAGE}#" in message else f"{message} ({where})"
