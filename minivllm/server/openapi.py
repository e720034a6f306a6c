"""The OpenAPI document, as far as FastAPI can't see it: bodies are read, and answers made, by hand."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

JSON, EVENTS = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{model}"
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": {"type": "integer"},
            },
        }
    },
}
ERRORS = {
    400: "A field is wrong, or not supported",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    413: "The body is too long",
    415: "The body is no JSON",
    500: "The request failed",
    503: "The engine has broken down, or hangs",
}
ANY_ERROR = tuple(ERRORS)


def answered(media_types: Sequence[str] = (JSON,), errors: Sequence[int] = ()) -> dict[int | str, dict[str, Any]]:
    """What may come back: `responses` of a route."""
    content = {JSON: {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    good: dict[str, Any] = {"description": "Successful Response", "content": {name: {} for name in media_types}}
    return {200: good, **{code: {"description": ERRORS[code], "content": content} for code in errors}}


def asked(kind: type[BaseModel]) -> dict[str, Any]:
    """What is sent: `openapi_extra` of a route."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def add_schemas(app: FastAPI, kinds: Sequence[type[BaseModel]]) -> None:
    """Puts into the document what the routes' descriptions refer to."""
    schemas = {"Error": ERROR}
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=REFERENCE)
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = schema
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
