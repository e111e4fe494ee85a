"""Owns what a request may say: fields, types, ranges and defaults. Knows no token and no ring.

Strict: an unknown field, or a known parameter that is not supported with a value that would change
the answer, is an error that names it. null means unset everywhere (case 44).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from coord.actions import TurnError
from coord.http.strict import Neutral, Strict
from coord.http.toolschema import Calls, Choice, NamedChoice, Tools

MAX_PARAM = 120  # characters of a field's name that an error repeats
MAX_STOPS = 16
MAX_STOP_CHARS = 256  # what is withheld of a stream is bounded by the longest stop string
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 8
MAX_BIASES = 300
MAX_KEEP_S = 7 * 86400.0
MAX_TIMEOUT_S = 86400.0
I63 = 1 << 63

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # one error for a million bad items
Hint = Annotated[str, Field(max_length=512)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
# Parameters of this API that are not supported, with the values that change nothing.
_SHARED_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
    "prompt_logprobs": (0,),
    "priority": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
}


class StreamOptions(Strict):
    """stream_options of both APIs."""

    unsupported: ClassVar[Neutral] = {"continuous_usage_stats": (False,)}

    include_usage: bool = False
    """The stream ends with a chunk that has `usage` and no choices."""
    include_obfuscation: bool = False
    """Accepted; nothing is ever added."""


class Extra(Strict):
    """The request's `kvring` object."""

    reuse: bool = True
    """false prefills the whole prompt, for measurements."""
    keep_s: float = Field(default=0.0, ge=0.0, le=MAX_KEEP_S)
    """Seconds after the turn for which its slot is not given up while another one can be."""
    timeout_s: float = Field(default=MAX_TIMEOUT_S, gt=0.0, le=MAX_TIMEOUT_S)
    """Queued or running, the turn ends after so many seconds; the server's limits.deadline_s where
    that is less."""


class Common(Strict):
    """Parameters of both completion APIs. See docs/api.md."""

    model: str | None = None
    """A name that GET /v1/models lists [default: the first]; another one is a 404."""
    max_tokens: int | None = Field(None, ge=1)
    """At most so many tokens are generated, the stop token included [default: what the context
    length leaves]."""
    stream: bool = False
    """The answer comes as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    """0 is greedy: ties go to the lowest token id."""
    top_p: float = Field(1.0, ge=0.0, le=1.0)
    """The likeliest tokens stay until their chances add up to this; 1 is off."""
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    """So many of the likeliest tokens stay; 0 and -1 are off."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Tokens stay whose chance is at least this share of the likeliest one's; 0 is off."""
    repetition_penalty: float = Field(1.0, ge=0.1, le=10.0)
    """Of every token in prompt or reply: a positive logit is divided by it, another multiplied."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted once from the logit of every token that the reply has."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit for each time that the reply has it."""
    logit_bias: dict[str, Bias] = Field(default_factory=dict, max_length=MAX_BIASES)
    """Token ids (as strings), and what is added to their logits: -100 to 100."""
    seed: int | None = Field(None, ge=-I63, lt=I63)
    """Its low 63 bits count [default: drawn, and told in `kvring.seed`]."""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    """Choices, with the seeds seed, seed + 1, ...; the prompt is prefilled once."""
    stop: Stop | list[Stop] = Field(default_factory=list)
    """A string, or up to 16 of them, before which the answer's text ends."""
    stop_token_ids: Tokens = Field(default_factory=list, max_length=64)
    """Further ids that end the reply."""
    ignore_eos: bool = False
    """The model's own end tokens do not end the reply."""
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    """At least so many tokens come before a stop token or a stop string."""
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    """Prefixes are shared only within one salt."""
    user: Hint | None = None
    """Names the session where neither `prompt_cache_key` nor the header X-Session-ID does."""
    prompt_cache_key: Hint | None = None
    """Names the session: an edited turn may overwrite its own old branch. A resident prefix is
    found without it."""
    safety_identifier: Hint | None = None
    """Accepted; changes nothing."""
    kvring: Extra = Extra()
    """What only this server knows."""

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not (key.isascii() and key.isdecimal() and str(int(key[:10])) == key):
                raise ValueError(f"{key[:40]!r} is not a token id")
        return value

    @model_validator(mode="after")
    def _options_need_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise TurnError(
                400, "invalid_value", "stream_options is for stream: true", "stream_options"
            )
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings, however they were written."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def session(self, header: str | None) -> str | None:
        """What the client calls this session: prompt_cache_key, X-Session-ID (header) or user."""
        return self.prompt_cache_key or (header or None) or self.user

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class Part(Strict):
    """One part of a message's content; text only."""

    type: Literal["text"]
    """Text is all there is."""
    text: str
    """The text."""


class Message(Strict):
    """One message of a conversation."""

    unsupported: ClassVar[Neutral] = {
        "function_call": (),
        "refusal": ("",),
        "audio": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it; the chat template sees `developer` as `system`."""
    tool_calls: Calls = Field(default_factory=list)
    """An assistant's calls, as they were answered."""
    content: str | list[Part] | None = Field(None, validate_default=True)
    """Text, or parts that are joined by newlines; may be absent beside `tool_calls`."""
    name: Hint | None = None
    """Handed to the chat template, which may print it."""
    tool_call_id: Hint | None = None
    """Of a tool's message: the call that it answers."""

    @field_validator("content")
    @classmethod
    def _something_is_said(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return value

    @model_validator(mode="after")
    def _fields_are_the_roles(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are an assistant's")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("a tool message, and no other, has a tool_call_id")
        return self

    @property
    def text(self) -> str:
        """The content, "" where there is none."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def plain(self) -> dict[str, Any]:
        """What the chat template sees: developer is system, parts are one text."""
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        return plain


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[Neutral] = _SHARED_UNSUPPORTED | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    }

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    """The conversation so far."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """As `max_tokens`; of both, the smaller one counts."""
    logprobs: bool = False
    """Each token of the answer comes with its log probability."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """And with those of so many of the likeliest tokens; only with `logprobs`."""
    tools: Tools = Field(default_factory=list)
    """Functions that the model may call; a model whose template takes none answers 400."""
    tool_choice: Choice | NamedChoice = "auto"
    """auto: the model decides. none: calls are not looked for. required, or a named function: the
    answer begins with a call."""
    parallel_tool_calls: bool = True
    """false ends the turn behind the first call."""

    @property
    def opening(self) -> str:
        """The conversation up to its first user message: what no later turn of it changes."""
        roles = [message.role for message in self.messages]
        count = roles.index("user") + 1 if "user" in roles else 1
        return json.dumps([message.plain() for message in self.messages[:count]])

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise TurnError(
                400, "invalid_value", "top_logprobs is for logprobs: true", "top_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _a_call_needs_tools(self) -> ChatRequest:
        choice = self.tool_choice
        if choice == "required" and not self.tools:
            raise TurnError(400, "invalid_value", "tool_choice is for tools", "tool_choice")
        if isinstance(choice, NamedChoice) and choice.function.name not in self.functions:
            text = f"tool_choice: there is no function {choice.function.name!r} in tools"
            raise TurnError(400, "invalid_value", text, "tool_choice")
        return self

    @property
    def functions(self) -> list[str]:
        """The names of the functions in tools."""
        return [tool.function.name for tool in self.tools]

    @property
    def wanted_logprobs(self) -> int | None:
        """As transport.frame.Sampling.logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """The smaller of both names of the token limit, None where neither is given."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)


class CompletionRequest(Common):
    """POST /v1/completions."""

    unsupported: ClassVar[Neutral] = _SHARED_UNSUPPORTED | {
        "suffix": ("",),
        "add_special_tokens": (True,),
    }

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(fail_fast=True)]
    """Text, or token ids, which are taken as they are; or a list of exactly one of them."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """So many of the likeliest tokens are listed at each position."""

    @property
    def wanted_logprobs(self) -> int | None:
        """As transport.frame.Sampling.logprobs."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """The token limit, None where it is not given."""
        return self.max_tokens

    @property
    def single(self) -> str | list[int]:
        """The one prompt. TurnError 400 for none or several."""
        prompt = self.prompt
        if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise TurnError(
                    400, "unsupported_value", "one prompt for each request, please", "prompt"
                )
            prompt = prompt[0]
        return prompt  # type: ignore[return-value] # a list's first item tells its type


class TokenizeRequest(Strict):
    """POST /tokenize: either prompt or messages."""

    model: str | None = None
    """A name that GET /v1/models lists [default: the first]."""
    prompt: str | None = None
    """Text to encode; or give `messages`."""
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(None, min_length=1)
    """A conversation, written by the chat template with the header of an answer behind it."""
    tools: Tools = Field(default_factory=list)
    """Functions for the chat template."""
    add_special_tokens: bool = True
    """A `prompt` begins with the model's BOS token where the model expects one."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise TurnError(400, "invalid_value", "give prompt or messages, not both", "prompt")
        return self


class KeepRequest(Strict):
    """PUT /ring/slots/{slot}."""

    keep_s: float = Field(ge=0.0, le=MAX_KEEP_S)
    """For so many seconds it is not given up; 0: as any other."""


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    """A name that GET /v1/models lists [default: the first]."""
    tokens: Tokens
    """Ids; control tokens are spelled out in the answer."""


R = TypeVar("R", bound=Strict)


def parse(kind: type[R], body: bytes) -> R:
    """A request from its JSON bytes. TurnError 400 names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = _most_telling(error)
        if first["type"] == "json_invalid":
            message = f"the body is not valid JSON ({first['msg'].removeprefix('Invalid JSON: ')})"
            raise TurnError(400, "invalid_json", message) from None
        param = _param(first["loc"])
        if first["type"] == "extra_forbidden":
            raise TurnError(400, "unknown_parameter", f"{param} is not known", param) from None
        code = "missing_parameter" if first["type"] == "missing" else "invalid_value"
        where = f"{param}: " if param else ""
        message = first["msg"].removeprefix("Value error, ")
        raise TurnError(400, code, f"{where}{message}", param or None) from None


def _most_telling(error: ValidationError) -> ErrorDetails:
    """The first error's deepest neighbour: of a union, the member that got furthest."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    top = errors[0]["loc"][:1]
    return max((one for one in errors if one["loc"][:1] == top), key=lambda one: len(one["loc"]))


def _param(location: tuple[int | str, ...]) -> str:
    """Path of a field without pydantic's names for the members of a union."""
    kept = [str(part) for part in location if isinstance(part, int) or part.isidentifier()]
    path = ".".join(part for part in kept if part not in ("str", "int"))
    return path if len(path) <= MAX_PARAM else f"{path[:MAX_PARAM]}..."
