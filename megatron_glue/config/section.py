"""What every section of a configuration is made of: its base, its kinds of numbers, and how a field is declared.

Stands under ``sections.py`` and ``model_sections.py``. It declares no field.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MAX_COUNT = 2**31 - 1
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def option(default: Any, doc: str, *, flag: str = "", values: dict[str, Any] | None = None, off_flag: str = "") -> Any:
    """Declare a field.

    Args:
        default: Default value.
        doc: What it is, with unit and off-value.
        flag: Flag name when it differs from the field name.
        values: Words the flag accepts and the value each stands for, when they differ.
        off_flag: Extra flag name (Megatron's) that sets a boolean to False.
    """
    extra: Any = {key: value for key, value in (("flag", flag), ("values", values), ("off_flag", off_flag)) if value}
    return Field(default=default, description=doc, json_schema_extra=extra or None)


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys are errors, no silent conversion of strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)
