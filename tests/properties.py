"""How many examples a property is checked with, by the profile that ``conftest.py`` loads."""

from __future__ import annotations

from hypothesis import settings

DEFAULT_EXAMPLES = 100  # Hypothesis' own number, for properties that set none


def examples(count: int) -> settings:
    """Check a property with many or few examples, in proportion to the profile's number."""
    return settings(max_examples=count * settings().max_examples // DEFAULT_EXAMPLES)
