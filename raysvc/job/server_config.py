"""The actor that plans and collates: section `server`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raysvc.job.section import PositiveInt, Section

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class ServerConfig(Section):
    """The named actor that plans and collates."""

    name: str = Field(default="default", pattern=NAME, description="Name by which a trainer attaches.")
    look_ahead_steps: int = Field(default=2, ge=0, description="Steps to fetch before they are needed.")
    lease_ttl_s: float = Field(
        default=30.0, gt=0, description="Seconds after which a lease without heartbeats ends."
    )
    collate_threads: PositiveInt = Field(default=2, description="Steps collated at the same time.")
    collators: int = Field(
        default=0,
        ge=0,
        description="Processes of the trainer, one CPU each, that make the shards of a step in place of the server: for rows with media. So many at most: those without work end, and come back.",
    )
    num_cpus: float = Field(default=0.5, ge=0, description="CPUs that Ray reserves for the server.")
    placement: Literal["any", "data", "trainer"] = Field(
        default="any",
        description="Where the server runs: any node with room; data: the node that starts it, if the cache is a folder; trainer: the node of rank 0.",
    )
    orphan_ttl_s: float = Field(
        default=900.0, gt=0, description="Seconds without a lease after which the server frees its data."
    )
    reap: bool = Field(default=False, description="Shut down after orphan_ttl_s without a lease.")
    detached: bool = Field(default=False, description="The server of `raysvc train` outlives the run.")
    share: Literal["none", "stream"] = Field(
        default="none",
        description="stream: several trainers read the same steps; each step is collated once.",
    )
    share_mb: PositiveInt = Field(
        default=256, description="MB of collated steps to keep for other ranks and readers."
    )

    @model_validator(mode="after")
    def _collators_of_one_trainer(self) -> ServerConfig:
        if self.collators and self.share == "stream":
            raise ValueError(
                "collators belong to one trainer, and share: stream makes each step once for all"
            )
        return self
