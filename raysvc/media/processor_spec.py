"""Says where the processor of a job's media is found: what travels to servers and clients, and loads no decoder."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ProcessorSpec(BaseModel):
    """Says where a process loads the processor from."""

    model_config = ConfigDict(frozen=True)
    name: str
    revision: str | None = None
    trust_remote_code: bool = False
