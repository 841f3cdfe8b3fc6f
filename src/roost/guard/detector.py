"""Algorithm 4: which users made the hotspots of a round, and whether they did so before.

All users are one suspicious cluster at first. k-means++ splits it in two, the half with the larger
ALQR (mean x14) stays suspicious, and so on until its users have been in the same hotspots with
new queries: the standard deviation of x11 is near zero. What is left must have ``beta`` times
the ALQR of everybody else and must be in a hotspot of this round. Found once, a cluster is put on
the suspicious list with a random time to leave it; found twice, its users are blocked.

Where the paper leaves a choice: the deviation is that of normalised x11, so that "near zero" does
not depend on how many hotspots there ever were; ALQR is taken of x14 before normalisation, because
``beta`` is a ratio; a cluster is in a hotspot if one of its users is; blocked users take no part.

As published (``suspicion.py: Settings.paper``), this blocks flash crowds and newcomers: their
queries are all new, all in the same hotspots, and a hotspot that grows is rebalanced more than
once. Splitting also always ends with somebody, be it one user with three queries that all fell
into the hot partition. And a very active user, far from all others, falls into the attackers' half
for that.
By default five more things are asked for, all of them with numbers that are there anyway:

* *Each.* Whoever is within ``beta`` by himself and clearly below the cluster's ALQR, or adds less
  than ``hanger_on`` of the cluster's median to its hotspots, is not of the cluster.
* *Cause.* The cluster's share of all recent queries in the hot partitions (by x12) is at least
  ``share_min``: with less, the hotspot would be there without it.
* *Chance.* The part of its recent queries that the cluster has in the hot partitions is ``beta``
  times what anybody has there: the part of a user's old queries, on average, added up over the hot
  partitions that the cluster is in. In a crowd of hundreds who are in no hotspot yet, the ALQR of
  everybody else is next to nothing, and half of the normal users are beyond ``beta`` of it.
* *Moved.* The second finding is at another place than the first: the middles of the cluster's
  recent queries in hotspots lie twice as far apart as they spread. Load that stays in one place is
  balanced once, however heavy it is; to do harm again and again an attack has to move.
* *Users, not clusters,* are found again: those who were on the list before, if they are cause
  enough by themselves or like those who are. One more or one fewer in the cluster than the last
  time is no way out.

k-means may cut through the middle of a group. So whoever is like the cluster belongs to it: beyond
``beta``, with about its ALQR, at its place, and with about as many queries in its hotspots. And
when a group is blocked, users who were not on the list go with it if they are at its place, pass
*each*, and have been in exactly its hotspots with new queries, since they were first heard of.

Splitting is a matter of luck: two attackers among a hundred users may end up in the half with the
lower mean, and are gone. So it is tried a few times.

And the list is longer. The paper's 5 to 30 rounds can be over before a slow attack has moved its
queries to the next place. Being on the list costs nothing, as long as one stays where one is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from roost.guard.decisions import Block, Decision, Evidence, NoFinding, Release, Suspect
from roost.guard.features import X3, X6, X11, X12, X14, Features, normalise
from roost.guard.suspicion import Listed, Place, Rows, Settings

# A user with this part of the cluster's ALQR is like the rest of it; if he is not in it yet, he
# must also add this part of its median. Whoever shares the work evenly rarely adds less than half.
ALIKE = 0.8
ALIKE_ADDED = 0.5


@dataclass(frozen=True, eq=False)
class Finding:
    """What a detection came to: decisions, the list after it, and whom to block."""

    decisions: tuple[Decision, ...]
    listed: tuple[Listed, ...]
    blocked: tuple[tuple[int, str], ...] = ()


def detect(
    features: Features,
    listed: Iterable[Listed],
    number: int,
    position: int,
    random: np.random.Generator,
    settings: Settings = Settings(),  # noqa: B008 - immutable
) -> Finding:
    """Judge one round.

    Parameters
    ----------
    features
        Of all users who are not blocked.
    listed
        The suspicious list.
    number
        The round.
    position
        Log position from which on blocked users are refused.
    random
        Seeds k-means++ and draws removal times.
    settings
        How to judge.
    """
    kept, released = _expire(tuple(listed), number)
    cluster, evidence, reason = suspicious_cluster(features, random, settings)
    if cluster is None:
        return Finding((*released, NoFinding(number, reason, evidence)), kept)
    case = _Case(features, cluster, number, position, settings, evidence)
    decisions, kept, blocked = case.settle(kept, random)
    return Finding((*released, *decisions), kept, blocked)


def _expire(
    listed: tuple[Listed, ...], number: int
) -> tuple[tuple[Listed, ...], tuple[Release, ...]]:
    """Take from the list whoever was not found again in time."""
    over = [entry for entry in listed if entry.until < number]
    releases = tuple(
        Release(
            tuple(name for _, name in entry.users),
            number,
            "not found again in time",
            {"found": entry.found, "until": entry.until},
        )
        for entry in over
    )
    return tuple(entry for entry in listed if entry.until >= number), releases


def suspicious_cluster(
    features: Features, random: np.random.Generator, settings: Settings
) -> tuple[Rows | None, Evidence, str]:
    """Find the cluster that passes every test of a single round.

    Returns
    -------
    rows, evidence, reason
        Its users, or None with the test that it failed.
    """
    raw = features.raw
    if len(raw) < 2:
        return None, {"users": len(raw)}, "fewer than two users"
    if not raw[:, X3].any():
        return None, {"users": len(raw)}, "no hotspot in this round"
    # One thread: sums come out the same on every machine, and where the cores are busy with a
    # batch, threads that wait for each other take twenty times as long.
    with threadpool_limits(1):
        for _ in range(settings.tries):
            rows, splits = _split(raw, random, settings.deviation_max)
            found = _tested(features, rows, {"users": len(raw), "splits": splits}, settings)
            if found[0] is not None:
                break
    return found


def _tested(
    features: Features, rows: Rows, evidence: Evidence, settings: Settings
) -> tuple[Rows | None, Evidence, str]:
    """Put what splitting left to the tests of a single round."""
    raw = features.raw
    others = np.ones(len(raw), np.bool_)
    others[rows] = False
    own = _alqr(raw, rows)
    normal = _alqr(raw, np.flatnonzero(others))
    evidence |= {"size": len(rows), "alqr": own, "alqr_others": normal, "beta": settings.beta}
    if not own > normal * settings.beta:
        return None, evidence, "within beta of normal users"
    if not raw[rows, X3].any():
        return None, evidence, "in no hotspot of this round"
    if settings.each:
        rows = rows[raw[rows, X14] > min(normal * settings.beta, ALIKE * own)]
        rows = _without_hangers_on(raw, rows, settings.hanger_on)
        rows = _grown(features, rows, settings.beta)
        evidence["size"] = len(rows)
    evidence |= {"share": _share(raw, rows), "share_min": settings.share_min}
    if evidence["share"] < settings.share_min:
        return None, evidence, "not the cause of the hotspots"
    if settings.chance:
        recent = raw[rows, X6]
        whole = max(float(recent.sum()), 1e-9)
        rate = float(raw[rows, X12].sum()) / whole
        chance = float(recent @ features.chances[rows]) / whole
        evidence |= {"rate": rate, "chance": chance}
        if rate <= settings.beta * chance:
            return None, evidence, "no more in the hotspots than chance has it"
    return rows, evidence, ""


def _split(
    raw: NDArray[np.float64], random: np.random.Generator, deviation_max: float
) -> tuple[Rows, list[Evidence]]:
    """Split the suspicious cluster until its users have been in the same hotspots."""
    scaled = normalise(raw)
    rows = np.arange(len(raw))
    splits: list[Evidence] = []
    while True:
        points = scaled[rows]
        if (points == points[0]).all():
            return rows, splits
        seed = int(random.integers(1 << 31))
        # One start is k-means++ as published; more of them would cost a detection for nothing.
        labels = KMeans(2, init="k-means++", n_init=1, random_state=seed).fit_predict(points)
        halves = (rows[labels == 0], rows[labels == 1])
        rates = [_alqr(raw, half) for half in halves]
        rows = halves[0] if rates[0] > rates[1] else halves[1]
        deviation = float(scaled[rows, X11].std())
        sizes = [len(half) for half in halves]
        splits.append({"sizes": sizes, "alqr": rates, "deviation": deviation})
        if deviation <= deviation_max:
            return rows, splits


def _alqr(raw: NDArray[np.float64], rows: Rows) -> float:
    """Average of x14 over a cluster."""
    return float(raw[rows, X14].mean()) if len(rows) else 0.0


def _without_hangers_on(raw: NDArray[np.float64], rows: Rows, part: float) -> Rows:
    added = raw[rows, X12]
    least = part * float(np.median(added)) if len(added) else 0.0
    kept: Rows = rows[(added >= least) & (added > 0.0)]
    return kept


def _grown(features: Features, rows: Rows, beta: float) -> Rows:
    """Add users who are like a cluster, until there are no more.

    What k-means cut off counts as everybody else at first, and hides itself behind its own ALQR;
    so ``beta`` is asked of those who would join, against those who would then be left.
    """
    raw = features.raw
    while True:
        joined = np.setdiff1d(_alike(features, rows), rows)
        joined = joined[raw[joined, X14] > beta * _alqr_without(raw, rows, joined)]
        if not len(joined):
            return rows
        rows = np.union1d(rows, joined)


def _alqr_without(raw: NDArray[np.float64], rows: Rows, joining: Rows) -> float:
    """Average of x14 over everybody but a cluster and those who would join it."""
    return _alqr(raw, np.setdiff1d(np.arange(len(raw)), np.union1d(rows, joining)))


def _alike(features: Features, rows: Rows, part: float = ALIKE) -> Rows:
    """Find all users who are like a cluster, with at least a part of its ALQR."""
    raw = features.raw
    place = Place.of(features, rows)
    if place is None:
        return rows
    rate = part * _alqr(raw, rows)
    added = ALIKE_ADDED * float(np.median(raw[rows, X12]))
    able = np.flatnonzero((raw[:, X14] > rate) & (raw[:, X12] > 0.0) & (raw[:, X12] >= added))
    weight, *sums = features.places[able].T
    x, y, square = (values / weight for values in sums)
    spread = np.sqrt(np.maximum(square - x * x - y * y, 0.0))
    found: Rows = able[np.hypot(x - place.x, y - place.y) <= place.spread + spread]
    return found


def _share(raw: NDArray[np.float64], rows: Rows) -> float:
    """Part of all recent queries in this round's hotspots that are a cluster's."""
    whole = float(raw[:, X12].sum())
    return float(raw[rows, X12].sum()) / whole if whole > 0.0 else 0.0


class _Case:
    """A cluster that passed, held against the list."""

    def __init__(
        self,
        features: Features,
        rows: Rows,
        number: int,
        position: int,
        settings: Settings,
        evidence: Evidence,
    ) -> None:
        self._features = features
        self._rows = rows
        self._number = number
        self._position = position
        self._settings = settings
        self._evidence = evidence
        self._row_of = {int(features.keys[row]): int(row) for row in rows}

    def settle(
        self, listed: tuple[Listed, ...], random: np.random.Generator
    ) -> tuple[list[Decision], tuple[Listed, ...], tuple[tuple[int, str], ...]]:
        """Block who was found before, and put the rest on the list."""
        common = {k: keys for k, e in enumerate(listed) if (keys := self._common(e))}
        found = {k: keys for k, keys in common.items() if self._enough(keys)}
        again = {k for k, keys in found.items() if self._again(listed[k], keys)}
        sure = {key for k in again for key in found[k]}
        sure |= self._like(sure, listed, common)
        blocked = sorted(sure | self._left_out(sure))
        known = sorted({key for common in found.values() for key in common})
        decisions: list[Decision] = []
        if blocked:
            reason = "found again in hotspots of their making"
            proof = self._proof(blocked, listed)
            names = self._names(blocked)
            decisions.append(Block(names, self._number, self._position, reason, proof))
        kept = []
        for k, entry in enumerate(listed):
            if k in found and k not in again:
                entry = replace(entry, stays=True, until=self._removal(random))
            left = entry.without(blocked)
            if left.users:
                kept.append(left)
        rest = [key for key in self._row_of if key not in known and key not in blocked]
        if rest:
            decisions.append(self._suspect(rest, random, kept))
        elif not blocked:
            until = max(entry.until for entry in kept if entry.stays)
            proof = self._proof(known, listed)
            reason = "found again at the same place"
            decisions.append(Suspect(self._names(known), self._number, until, reason, proof))
        return decisions, tuple(kept), tuple((key, self._name(key)) for key in blocked)

    def _removal(self, random: np.random.Generator) -> int:
        """Draw the last round in which a cluster is on the list."""
        least, most = self._settings.removal_rounds
        return self._number + int(random.integers(least, most + 1))

    def _common(self, entry: Listed) -> list[int]:
        """Users of a listed cluster that are found again."""
        earlier = [key for key, _ in entry.users]
        if self._settings.exact:
            return earlier if set(earlier) == self._row_of.keys() else []
        return [key for key in earlier if key in self._row_of]

    def _rows_of(self, keys: Iterable[int]) -> Rows:
        return np.array([self._row_of[key] for key in keys], np.int64)

    def _enough(self, keys: list[int]) -> bool:
        """Whether users are cause enough by themselves."""
        return _share(self._features.raw, self._rows_of(keys)) >= self._settings.share_min

    def _like(
        self, sure: set[int], listed: tuple[Listed, ...], common: dict[int, list[int]]
    ) -> set[int]:
        """Find listed users like those who are blocked for sure.

        A group that was listed in parts, some of them too small to be a cause, is blocked as one.
        """
        if not sure:
            return set()
        rows = _alike(self._features, self._rows_of(sorted(sure)))
        alike = set(self._features.keys[rows].tolist())
        found: set[int] = set()
        for k, keys in common.items():
            part = [key for key in keys if key in alike]
            if part and self._again(listed[k], part):
                found.update(part)
        return found

    def _left_out(self, sure: set[int]) -> set[int]:
        """Find users whom only luck kept from the list on which those who are blocked were.

        Their x11 is the same: a sum of the ids of all hotspots in which a user ever had new
        queries. So they were where the others were found first, and in nothing else. "About the
        same" would not do: with many hotspots behind, that is also who came just now.
        """
        if not sure or self._settings.exact:
            return set()
        features, rows = self._features, self._rows_of(sorted(sure))
        raw = features.raw
        like = np.setdiff1d(_alike(features, rows, part=0.0), rows)
        like = like[np.isin(raw[like, X11], raw[rows, X11])]
        # As of each of a cluster.
        normal = self._settings.beta * _alqr_without(raw, rows, like)
        like = like[raw[like, X14] > min(normal, ALIKE * _alqr(raw, rows))]
        found = {int(features.keys[row]): int(row) for row in like}
        self._row_of |= found
        return set(found)

    def _again(self, entry: Listed, common: list[int]) -> bool:
        """Whether users that are found again are to be blocked."""
        if not self._settings.moved:
            return True
        rows = self._rows_of(common)
        now = Place.of(self._features, rows)
        return now is not None and entry.place is not None and now.apart_from(entry.place)

    def _suspect(self, keys: list[int], random: np.random.Generator, kept: list[Listed]) -> Suspect:
        until = self._removal(random)
        rows = self._rows_of(keys)
        place = Place.of(self._features, rows)
        users = tuple((key, self._name(key)) for key in keys)
        proof = self._proof(keys, ())
        kept.append(Listed(users, self._number, until, place, False, proof))
        return Suspect(self._names(keys), self._number, until, "found for the first time", proof)

    def _proof(self, keys: Iterable[int], listed: Iterable[Listed]) -> Evidence:
        """Everything that led here, as plain data."""
        keys = list(keys)
        rows = self._rows_of(keys)
        place = Place.of(self._features, rows)
        values = {f"x{k + 1}": self._features.raw[rows, k].mean() for k in range(14)}
        earlier = [e for e in listed if any(key in keys for key, _ in e.users)]
        return self._evidence | {
            "features": {name: float(value) for name, value in values.items()},
            "place": asdict(place) if place else None,
            "earlier": [
                {"round": e.found, "place": asdict(e.place) if e.place else None} for e in earlier
            ],
        }

    def _name(self, key: int) -> str:
        return self._features.names[self._row_of[key]]

    def _names(self, keys: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._name(key) for key in keys)
