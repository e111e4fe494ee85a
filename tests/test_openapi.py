"""The API against its own description: whatever follows it, or just does not, gets what it says.

schemathesis makes the requests from GET /openapi.json, itself made of the classes that check them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coord.http.openapi import document
from coord.http.schema import ChatRequest, CompletionRequest
from tests.fake_engine import FakeEngine, says
from tests.test_gateway import EOS, app_of

EXAMPLES = 25  # for each of 14 operations, and as many that break its description
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def make_app() -> FastAPI:
    return app_of(FakeEngine(says("Hel", "lo", stop=EOS, logprobs=True)))


schema = schemathesis.openapi.from_asgi("/openapi.json", make_app())


ENDLESS = "GET /ring/events"  # its answer has no end to wait for; see tests/test_live.py
OPERATIONS: list[Any] = [
    operation
    for found in schema.get_all_operations()
    if (operation := found.ok()).label != ENDLESS  # type: ignore[union-attr]
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_requests_made_of_the_description(operation: Any, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "no request follows the description"


def test_every_route_is_described_and_nothing_else() -> None:
    routes = {
        (getattr(route, "path", "").replace("{reply}", "{id}").replace(":path", ""), method.lower())
        for route in make_app().routes
        for method in getattr(route, "methods", ())
        if method != "HEAD"
    }
    described = {(path, method) for path, ways in document()["paths"].items() for method in ways}
    assert routes - {("/openapi.json", "get")} == described


def test_requests_are_described_by_the_classes_that_check_them() -> None:
    schemas = document()["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
        assert schemas[kind.__name__]["additionalProperties"] is False


def test_the_description_is_served() -> None:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/openapi.json")

    assert asyncio.run(main()).json() == document()
