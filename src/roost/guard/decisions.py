"""What the detector may decide, as values with their evidence.

Evidence is plain data (numbers, texts, lists), so that it can be logged as it is and an operator
can see why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Evidence = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Suspect:
    """Users found for the first time, or again where they were found before."""

    users: tuple[str, ...]
    round: int
    until: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """Users found again: what they send after ``position`` is refused."""

    users: tuple[str, ...]
    round: int
    position: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Release:
    """Users who were suspicious, and were not found again in time."""

    users: tuple[str, ...]
    round: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NoFinding:
    """Nobody, and why."""

    round: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


Decision = Suspect | Block | Release | NoFinding
