"""Cases of the guard's benchmarks: a cluster under attack, and crowds that are not attacks.

Sizes are the dissertation's (section 6.4) times ``scale``: a million queries, 100 normal users with
600 queries per second, attacks of 10 users with 100 thousand queries; 22 machines, balancing rounds
of 15 seconds, four of them in a round of detection. Three natural hotspots cause rebalancing
without an attack.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from roost.sim.attack import Attack, Crowd, Leaver, Mover, Newcomer, Normal, Party
from roost.sim.scenario import Scenario
from roost.sim.workloads import CellHotspot, LoadSpec

QUERIES = 1_000_000
RATES = (150, 300, 600, 1200)
USERS = (2, 5, 10, 20, 50)
ROUNDS_PER_MINUTE = 4
ATTACK_MINUTE = 5
SCALE = 0.1
UTILISATION = 0.85
_START = ATTACK_MINUTE * ROUNDS_PER_MINUTE
_SPOTS = 31


def cluster(
    seed: int, minutes: int = 30, strategy: str = "global", utilisation: float = UTILISATION
) -> Scenario:
    """Return the cluster and its points.

    With a ``utilisation`` above one, the load exceeds the capacity, which then limits throughput.
    """
    random = np.random.default_rng([seed, _SPOTS])
    rounds = minutes * ROUNDS_PER_MINUTE
    starts = random.integers(ROUNDS_PER_MINUTE, rounds, 3)
    spots = tuple(
        CellHotspot(tuple(random.random(2).tolist()), int(start), int(start) + 20, share=0.08)
        for start in starts
    )
    load = LoadSpec(queries=int(QUERIES * SCALE), query_side=0.0016, hotspots=spots)
    return Scenario(strategy=strategy, rounds=rounds, seed=seed, load=load, utilisation=utilisation)


def normal_users(scale: float = SCALE, extra: float = 0.0) -> list[Party]:
    """Return normal users only, who have all the queries and may move more of them per second."""
    return [Normal(queries=QUERIES, rate=Normal.rate + extra).scaled(scale)]


def attacked(attack: Attack, scale: float = SCALE) -> list[Party]:
    """Return normal users and an attack."""
    rest = Normal(queries=QUERIES - attack.queries)
    return [rest.scaled(scale), attack.scaled(scale)]


def departed() -> list[Party]:
    """Return normal users, and users who terminate their queries when an attack would begin."""
    leaver = Leaver(start=_START)
    rest = Normal(queries=QUERIES - leaver.queries)
    return [rest.scaled(SCALE), leaver.scaled(SCALE)]


def paper_attacks() -> dict[str, Attack]:
    """Return the dissertation's attacks: by rate, and by number of users."""
    by_rate = {f"{rate}/s": Attack(rate=rate, start=_START) for rate in RATES}
    by_users = {f"{users} users": Attack(users=users, start=_START) for users in USERS}
    return by_rate | by_users


def other_attacks() -> dict[str, Attack]:
    """Return attacks that try to evade detection."""
    return {
        "one user": Attack(users=1, start=_START),
        "staggered": Attack(rate=1200, start=_START, stagger=3),
        "half normal": Attack(rate=1200, start=_START, normal_part=0.5),
        "slow": Attack(rate=1200, start=_START, pause=6 * ROUNDS_PER_MINUTE),
    }


def crowds() -> dict[str, list[Party]]:
    """Return parties that look like attacks but are not, each with normal users."""
    parties: dict[str, Party] = {
        "flash crowd": Crowd(queries_each=100, start=_START),
        "long flash crowd": Crowd(users=1000, queries_each=100, start=_START, stop=110, rise=40),
        "newcomer in a town": Newcomer(start=_START),
        "newcomer everywhere": Newcomer(start=_START, town=1.0, rate=600),
        "mover": Mover(start=_START),
    }
    return {name: [*normal_users(), party.scaled(SCALE)] for name, party in parties.items()}


def case_seed(name: str, seed: int) -> int:
    """Return the seed of a case's users: cases that share a cluster have different users."""
    return crc32(f"{name} {seed}".encode())
