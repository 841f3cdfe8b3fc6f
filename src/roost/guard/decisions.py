"""Decisions of the detector, as values with their evidence.

Evidence is JSON data (numbers, strings, lists), which operators can read in the decision log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Evidence = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Suspect:
    """Users found for the first time, or again at the same place."""

    users: tuple[str, ...]
    round: int
    until: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """Users found again: their requests after ``position`` are refused."""

    users: tuple[str, ...]
    round: int
    position: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Release:
    """Suspicious users that were not found again in time."""

    users: tuple[str, ...]
    round: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NoFinding:
    """No user was found, and the reason."""

    round: int
    reason: str
    evidence: Evidence = field(default_factory=dict)


GuardDecision = Suspect | Block | Release | NoFinding
