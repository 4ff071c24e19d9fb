"""A custom resource's OpenAPI schema as a JSON schema that refuses unknown fields, like the API server in strict mode."""

from __future__ import annotations

from typing import Any


def strict(schema: dict[str, Any], *, root: bool = False) -> dict[str, Any]:
    out = {name: value for name, value in schema.items() if name not in ("description", "format", "nullable")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if schema.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    if "properties" in out:
        out["properties"] = {name: strict(value) for name, value in out["properties"].items()}
        if root:
            out["properties"]["metadata"] = {"type": "object"}
        if "additionalProperties" not in out and not out.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
        # defaults are filled in before the server looks
        needed = [
            name for name in out.pop("required", []) if "default" not in out["properties"].get(name, {})
        ]
        if needed:
            out["required"] = needed
    for name in ("items", "additionalProperties"):
        if isinstance(out.get(name), dict):
            out[name] = strict(out[name])
    return out
