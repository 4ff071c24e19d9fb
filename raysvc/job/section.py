"""Defines what all sections of a job share.

Always true:
- a section is frozen, and checked when it is made;
- an unknown key is an error;
- `None` means "no limit" or "derive it", never -1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"  # of the user: package.module:name
PositiveInt = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Frozen, closed base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
