"""Who is abusing the balancer: requests are counted by user, hotspots are traced to users.

Whoever knows that a system rebalances can make it do nothing else: register queries to make a
hotspot, end them, make the next. :class:`Guard` finds the users who do so and blocks them, and
leaves crowds alone. ``gate.py`` admits and counts, ``sensor.py`` looks into hot partitions,
``features.py`` and ``detector.py`` judge, ``attack.py`` has attacks and crowds for tests.
"""

from __future__ import annotations

from roost.guard.decisions import Block, Decision, NoFinding, Release, Suspect
from roost.guard.guard import Guard
from roost.guard.sensor import LiveQueries
from roost.guard.suspicion import Settings

__all__ = [
    "Block",
    "Decision",
    "Guard",
    "LiveQueries",
    "NoFinding",
    "Release",
    "Settings",
    "Suspect",
]
