"""The one error for everything a user can set wrong. Entry points print it as a single line and exit with code 2."""

from __future__ import annotations


class ConfigError(ValueError):
    """A wrong field, value or combination, with its reason and a remedy.

    Args:
        field: Name of the flag, YAML key or file, as the user wrote it.
        value: The offending value; an empty text when there is none to show.
        reason: Why it cannot be used.
        remedy: What to do instead.
    """

    def __init__(self, field: str, value: object, reason: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.reason = reason
        self.remedy = remedy
        subject = field if value == "" else f"{field}={value}"
        super().__init__(f"{subject}: {reason}; {remedy}")
