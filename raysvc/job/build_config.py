"""Sections `workers` and `cache` of a job: who tokenizes, and where what was made lies."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from raysvc.job.section import PositiveInt, Section


class CacheConfig(Section):
    """Finished entries live here."""

    root: str | None = Field(
        default=None,
        description="Folder or fsspec URL. Default: RAYSVC_CACHE_DIR, else .raysvc/cache.",
    )
    enabled: bool = Field(
        default=True, description="false: build into a private entry that nobody else finds."
    )
    force: bool = Field(default=False, description="Build again even if the entry exists.")
    unsafe_store: bool = Field(default=False, description="Allow a store without create-if-absent.")
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False, description="Passed to fsspec.")


class PoolConfig(Section):
    """CPU workers that tokenize."""

    min: PositiveInt = Field(default=1, description="Workers to keep while a build runs.")
    max: PositiveInt | None = Field(default=None, description="None: as many as there are slices.")
    slice_mb: float | None = Field(
        default=None, gt=0, description="Source MB per slice; None: a 64th of the source, between 4 and 32."
    )
    num_cpus: float = Field(default=1.0, gt=0, description="CPUs that Ray reserves for each worker.")
    memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory in GB that Ray reserves for each worker; None: none is reserved.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom resources of Ray that each worker holds, like {data_node: 0.01}.",
    )
    label_selector: dict[str, str] = Field(
        default={"raysvc-pool": "!gpu"},
        description="Labels of the nodes that may tokenize; by default all nodes but those labelled as the GPU pool.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> PoolConfig:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max ({self.max}) is below min ({self.min})")
        return self
