"""Owns how strict a request object is: the base of all of them. See coord.http.schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, model_validator

from coord.actions import TurnError

Neutral: TypeAlias = Mapping[str, tuple[object, ...]]  # values that change nothing


class Strict(BaseModel):
    """Base of every request object. See the module."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,  # each field's words in GET /openapi.json
    )
    unsupported: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.unsupported:
                neutral = cls.unsupported[name]
                if value is not None and not any(_same(value, other) for other in neutral):
                    raise TurnError(
                        400,
                        "unsupported_parameter",
                        f"{name} is not supported with this value"
                        + (f" (only {json.dumps(neutral[0])} is)" if neutral else ""),
                        name,
                    )
            elif value is not None or name not in cls.model_fields:
                kept[name] = value
        return kept


def _same(value: object, other: object) -> bool:
    """Equal as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
