"""The JSON schema of a job.yaml, for editors.

Always true:
- it follows from the config models; what they take in a shorter form (a bare tokenizer, one path) it takes too;
- what it refuses, `load_job` refuses. Rules between fields are checked by `load_job` alone.
"""

from __future__ import annotations

import json
from typing import Any

from raysvc.job.config import JobConfig

FILE = "job.schema.json"
NAMES = {"items": {"type": "string"}, "type": "array"}
SHORT_FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JobConfig", "tokenizer", {"type": "string"}),
    ("SourceConfig", "path", {"type": "string"}),
    ("SourceConfig", "carry", NAMES),
    ("PlanConfig", "skip_rows", {"type": "string"}),
    ("RowsConfig", "include", {"type": "string"}),
    ("RowsConfig", "exclude", {"type": "string"}),
)


def job_schema() -> dict[str, Any]:
    """The schema, as JSON schema draft 2020-12."""
    schema = JobConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "raysvc job.yaml"
    schema["required"] = ["tokenizer"]
    schema["anyOf"] = [{"required": ["source"]}, {"required": ["mixture"]}]
    for model, name, short in SHORT_FORMS:
        properties = schema["properties"] if model == "JobConfig" else schema["$defs"][model]["properties"]
        known = properties[name]
        told = {key: known.pop(key) for key in ("description", "default", "title") if key in known}
        properties[name] = {**told, "anyOf": [short, known]}
    return schema


def schema_text() -> str:
    """The schema as a file."""
    return json.dumps(job_schema(), indent=1) + "\n"
