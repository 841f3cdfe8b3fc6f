"""Guard: finds and blocks users who attack the load balancer.

An attacker can force a balancing system to rebalance all the time: register queries to create a
hotspot, terminate them, create the next one. :class:`Guard` counts requests by user, traces
hotspots to users, and blocks the attackers but not flash crowds. ``gate.py`` admits and counts
requests, ``sensor.py`` inspects hot partitions, ``features.py`` and ``detector.py`` classify users.
"""

from __future__ import annotations

from roost.guard.decisions import Block, GuardDecision, NoFinding, Release, Suspect
from roost.guard.guard import Guard
from roost.guard.sensor import LiveQueries
from roost.guard.suspicion import DetectorSettings

__all__ = [
    "Block",
    "DetectorSettings",
    "Guard",
    "GuardDecision",
    "LiveQueries",
    "NoFinding",
    "Release",
    "Suspect",
]
