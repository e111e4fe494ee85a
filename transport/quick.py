"""Owns `quick`: instances of a frozen, slotted dataclass are made in half the time.

The generated `__init__` sets each field through object.__setattr__, which looks the field up by its
name. Here it goes to the field's slot itself. A frame is made at every hop, so that this was a
twelfth of what the cores and the simulator spent. Nothing else about the class changes.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def quick(made: _Class) -> _Class:
    """Decorate the dataclass: frozen, with slots; no factories, no __post_init__."""
    known: tuple[Field[Any], ...] = fields(made)
    names = [each.name for each in known]
    assert all(each.init and each.default_factory is MISSING for each in known), made
    assert not hasattr(made, "__post_init__"), made
    space: dict[str, Any] = {f"_{name}": vars(made)[name].__set__ for name in names}
    body = "".join([f"\n _{name}(self, {name})" for name in names])
    exec(f"def __init__(self, {', '.join(names)}):{body}", space)  # as dataclass makes its own
    init = space["__init__"]
    init.__defaults__ = tuple([each.default for each in known if each.default is not MISSING])
    init.__qualname__ = f"{made.__qualname__}.__init__"
    init.__annotations__ = vars(made)["__init__"].__annotations__
    type.__setattr__(made, "__init__", init)
    return made
