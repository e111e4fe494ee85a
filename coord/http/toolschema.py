"""Owns what a request may say about tools: their definitions, the choice, and calls in messages.

A definition is checked and then kept as it came: the chat template prints it, and the order of its
keys is the client's (case 12).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from coord.arguments import read_arguments
from coord.http.strict import Neutral, Strict

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")]


class Function(Strict):
    """A function that the model may call."""

    unsupported: ClassVar[Neutral] = {"strict": (False,)}

    name: Name
    """What a call names."""
    description: str | None = None
    """For the model to read."""
    parameters: dict[str, Any] | None = None
    """A JSON Schema, for the model to read; nothing holds its calls to it."""


class Tool(Strict):
    """One entry of tools."""

    type: Literal["function"]
    """Functions are all there is."""
    function: Function
    """The function."""
    _came: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(data)
        tool._came = data
        return tool

    def plain(self) -> dict[str, Any]:
        """What the chat template sees."""
        return self._came


Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class FunctionName(Strict):
    """Names a function of the request's tools."""

    name: Name
    """One of `tools`."""


class NamedChoice(Strict):
    """A tool_choice: this function, and no other answer."""

    type: Literal["function"]
    """Functions are all there is."""
    function: FunctionName
    """The function that is called."""


Choice: TypeAlias = Literal["none", "auto", "required"]


class CalledFunction(Strict):
    """What an assistant called."""

    name: str = Field(min_length=1, max_length=512)
    """Any text: the model may have made it up."""
    arguments: str
    """The text of the arguments, as it was answered."""


class ToolCall(Strict):
    """A call of an assistant's message."""

    id: str = Field(max_length=512)
    """What the result's `tool_call_id` names."""
    type: Literal["function"] = "function"
    """Functions are all there is."""
    function: CalledFunction
    """Whom it called, with what."""
    index: int | None = None
    """A stream's field that some clients send back; ignored."""

    def plain(self) -> dict[str, Any]:
        """What the chat template sees."""
        name, arguments = self.function.name, read_arguments(self.function.arguments)
        function = {"name": name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


Calls: TypeAlias = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]
