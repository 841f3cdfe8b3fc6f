"""Detector (algorithm 4): finds the users who caused the hotspots of a round, and repeat offenders.

All users start as one suspicious cluster. k-means++ splits it in two, the half with the larger ALQR
(mean x14) stays suspicious, and so on until its users were in the same hotspots with new queries:
the standard deviation of x11 is near zero. The remaining cluster must have ``beta`` times the ALQR
of all other users and must be in a hotspot of this round. A cluster found once is put on the
suspicious list for a random time; the users of a cluster found twice are blocked.

The paper leaves open: the deviation is that of normalised x11, so that "near zero" does not depend
on the total number of hotspots; ALQR uses x14 before normalisation, because ``beta`` is a ratio; a
cluster is in a hotspot if one of its users is; blocked users are excluded.

As published (:meth:`DetectorSettings.paper`), this also blocks flash crowds, newcomers and very
active users. So five more conditions apply by default: *each*, *cause*, *chance*, *moved* and
*users, not clusters*. ``docs/guard.md`` defines them, and has the reasons for them, for the similar
users that are added to a cluster, for repeated splitting and for the longer list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from roost.guard.decisions import Block, Evidence, GuardDecision, NoFinding, Release, Suspect
from roost.guard.features import X3, X6, X11, X12, X14, Features, normalise
from roost.guard.suspicion import ClusterPlace, DetectorSettings, ListedCluster, Rows

# A user with this share of the cluster's ALQR is similar to it; to be added, a user also needs this
# share of its median contribution. Attackers that share work evenly rarely have less than half.
ALIKE = 0.8
ALIKE_ADDED = 0.5


@dataclass(frozen=True, eq=False)
class Finding:
    """Result of a detection: decisions, the new list, and users to block."""

    decisions: tuple[GuardDecision, ...]
    listed: tuple[ListedCluster, ...]
    blocked: tuple[tuple[int, str], ...] = ()


def detect(
    features: Features,
    listed: tuple[ListedCluster, ...],
    number: int,
    position: int,
    random: np.random.Generator,
    settings: DetectorSettings,
) -> Finding:
    """Run the detection of round ``number`` on all users who are not blocked.

    Requests of newly blocked users are refused after ``position``. ``random`` seeds k-means++ and
    draws removal times.
    """
    current = tuple(entry for entry in listed if entry.until >= number)
    released = tuple(_release(entry, number) for entry in listed if entry.until < number)
    cluster, evidence, reason = _suspicious_cluster(features, random, settings)
    if cluster is None:
        return Finding((*released, NoFinding(number, reason, evidence)), current)
    row_of = {int(features.keys[row]): int(row) for row in cluster}
    case = _Case(features, number, position, random, settings, evidence, row_of)
    found = case.settle(current)
    return replace(found, decisions=(*released, *found.decisions))


def _release(entry: ListedCluster, number: int) -> Release:
    names = tuple(name for _, name in entry.users)
    evidence = {"found": entry.found, "until": entry.until}
    return Release(names, number, "not found again in time", evidence)


def _suspicious_cluster(
    features: Features, random: np.random.Generator, settings: DetectorSettings
) -> tuple[Rows | None, Evidence, str]:
    """Find the cluster that satisfies all conditions of a single round.

    Returns its users, or None, with the evidence and the condition that failed.
    """
    raw = features.raw
    if len(raw) < 2:
        return None, {"users": len(raw)}, "fewer than two users"
    if not raw[:, X3].any():
        return None, {"users": len(raw)}, "no hotspot in this round"
    # One thread makes sums reproducible on every host; and while a batch uses all cores, threads
    # that wait for each other take twenty times as long.
    with threadpool_limits(1):
        for _ in range(settings.tries):
            rows, splits = _split(raw, random, settings.deviation_max)
            found = _tested(features, rows, {"users": len(raw), "splits": splits}, settings)
            if found[0] is not None:
                break
    return found


def _tested(
    features: Features, rows: Rows, evidence: Evidence, settings: DetectorSettings
) -> tuple[Rows | None, Evidence, str]:
    """Apply the conditions of a single round to a cluster."""
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
    if not settings.published:
        rows = rows[raw[rows, X14] > min(normal * settings.beta, ALIKE * own)]
        added = raw[rows, X12]
        least = settings.contribution_min * float(np.median(added)) if len(added) else 0.0
        rows = _grown(features, rows[(added >= least) & (added > 0.0)], settings.beta)
        evidence["size"] = len(rows)
    evidence |= {"share": _share(raw, rows), "share_min": settings.share_min}
    if evidence["share"] < settings.share_min:
        return None, evidence, "not the cause of the hotspots"
    if not settings.published:
        recent = raw[rows, X6]
        whole = max(float(recent.sum()), 1e-9)
        rate = float(raw[rows, X12].sum()) / whole
        chance = float(recent @ features.chances[rows]) / whole
        evidence |= {"rate": rate, "chance": chance}
        if rate <= settings.beta * chance:
            return None, evidence, "in the hotspots no more than expected by chance"
    return rows, evidence, ""


def _split(
    raw: NDArray[np.float64], random: np.random.Generator, deviation_max: float
) -> tuple[Rows, list[Evidence]]:
    """Split the suspicious cluster until its users were in the same hotspots."""
    from sklearn.cluster import KMeans  # here, since every worker imports this module

    scaled = normalise(raw)
    rows = np.arange(len(raw))
    splits: list[Evidence] = []
    while True:
        points = scaled[rows]
        if (points == points[0]).all():
            return rows, splits
        seed = int(random.integers(1 << 31))
        # One start is k-means++ as published; more would only cost time.
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
    """Return the mean of x14 over a cluster."""
    return float(raw[rows, X14].mean()) if len(rows) else 0.0


def _grown(features: Features, rows: Rows, beta: float) -> Rows:
    """Add users that are similar to a cluster, until there are no more.

    Users that k-means split off raise the ALQR of the others, so ``beta`` is tested against the
    users that would remain.
    """
    raw = features.raw
    while True:
        joined = np.setdiff1d(_alike(features, rows), rows)
        joined = joined[raw[joined, X14] > beta * _alqr_without(raw, rows, joined)]
        if not len(joined):
            return rows
        rows = np.union1d(rows, joined)


def _alqr_without(raw: NDArray[np.float64], rows: Rows, joining: Rows) -> float:
    """Return the mean of x14 over all users but a cluster and those who would join it."""
    return _alqr(raw, np.setdiff1d(np.arange(len(raw)), np.union1d(rows, joining)))


def _alike(features: Features, rows: Rows, part: float = ALIKE) -> Rows:
    """Return all users similar to a cluster, with at least a share of its ALQR."""
    raw = features.raw
    place = ClusterPlace.of(features, rows)
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
    """Return the cluster's share of all recent queries in this round's hotspots."""
    whole = float(raw[:, X12].sum())
    return float(raw[rows, X12].sum()) / whole if whole > 0.0 else 0.0


@dataclass(frozen=True, eq=False)
class _Case:
    """A suspicious cluster, compared with the list."""

    features: Features
    number: int
    position: int
    random: np.random.Generator
    settings: DetectorSettings
    evidence: Evidence
    row_of: dict[int, int]  # by key of user

    def settle(self, listed: tuple[ListedCluster, ...]) -> Finding:
        """Block users found before, and add the others to the list."""
        common = {k: keys for k, e in enumerate(listed) if (keys := self._common(e))}
        least = self.settings.share_min
        found = {k: keys for k, keys in common.items() if self._share(keys) >= least}
        again = {k for k, keys in found.items() if self._again(listed[k], keys)}
        sure = {key for k in again for key in found[k]}
        sure |= self._like(sure, listed, common)
        blocked = sorted(sure | self._left_out(sure))
        known = sorted({key for common in found.values() for key in common})
        decisions: list[GuardDecision] = []
        if blocked:
            reason = "found again in hotspots of their making"
            proof = self._proof(blocked, listed)
            names = self._names(blocked)
            decisions.append(Block(names, self.number, self.position, reason, proof))
        kept = []
        for k, entry in enumerate(listed):
            if k in found and k not in again:
                entry = replace(entry, stays=True, until=self._removal())
            left = entry.without(blocked)
            if left.users:
                kept.append(left)
        rest = [key for key in self.row_of if key not in known and key not in blocked]
        if rest:
            decisions.append(self._suspect(rest, kept))
        elif not blocked:
            until = max(entry.until for entry in kept if entry.stays)
            proof = self._proof(known, listed)
            reason = "found again at the same place"
            decisions.append(Suspect(self._names(known), self.number, until, reason, proof))
        return Finding(tuple(decisions), tuple(kept), self._users(blocked))

    def _removal(self) -> int:
        """Draw the last round of a cluster on the list."""
        least, most = self.settings.removal_rounds
        return self.number + int(self.random.integers(least, most + 1))

    def _common(self, entry: ListedCluster) -> list[int]:
        """Return the users of a listed cluster that are found again."""
        earlier = [key for key, _ in entry.users]
        if self.settings.published:
            return earlier if set(earlier) == self.row_of.keys() else []
        return [key for key in earlier if key in self.row_of]

    def _rows_of(self, keys: Iterable[int]) -> Rows:
        return np.array([self.row_of[key] for key in keys], np.int64)

    def _share(self, keys: list[int]) -> float:
        return _share(self.features.raw, self._rows_of(keys))

    def _like(
        self, sure: set[int], listed: tuple[ListedCluster, ...], common: dict[int, list[int]]
    ) -> set[int]:
        """Return listed users similar to those certainly blocked.

        A group that was listed in parts, some too small to be a cause, is blocked as one.
        """
        if not sure:
            return set()
        rows = _alike(self.features, self._rows_of(sorted(sure)))
        alike = set(self.features.keys[rows].tolist())
        found: set[int] = set()
        for k, keys in common.items():
            part = [key for key in keys if key in alike]
            if part and self._again(listed[k], part):
                found.update(part)
        return found

    def _left_out(self, sure: set[int]) -> set[int]:
        """Return users who are missing from the list of the blocked users only by chance.

        Their x11 is equal: the sum of the ids of all hotspots in which a user ever had new queries.
        So they were in the same hotspots and in no others. Similar values do not suffice: after
        many hotspots, users that have just arrived have similar values.
        """
        if not sure or self.settings.published:
            return set()
        features, rows = self.features, self._rows_of(sorted(sure))
        raw = features.raw
        like = np.setdiff1d(_alike(features, rows, part=0.0), rows)
        like = like[np.isin(raw[like, X11], raw[rows, X11])]
        # The condition *each*.
        normal = self.settings.beta * _alqr_without(raw, rows, like)
        like = like[raw[like, X14] > min(normal, ALIKE * _alqr(raw, rows))]
        found = {int(features.keys[row]): int(row) for row in like}
        self.row_of.update(found)
        return set(found)

    def _again(self, entry: ListedCluster, common: list[int]) -> bool:
        """Return whether users that are found again must be blocked."""
        if self.settings.published:
            return True
        now = ClusterPlace.of(self.features, self._rows_of(common))
        return now is not None and entry.place is not None and now.apart_from(entry.place)

    def _suspect(self, keys: list[int], kept: list[ListedCluster]) -> Suspect:
        until = self._removal()
        place = ClusterPlace.of(self.features, self._rows_of(keys))
        proof = self._proof(keys, ())
        kept.append(ListedCluster(self._users(keys), self.number, until, place, False, proof))
        return Suspect(self._names(keys), self.number, until, "found for the first time", proof)

    def _proof(self, keys: list[int], listed: Iterable[ListedCluster]) -> Evidence:
        """Return the evidence as JSON data."""
        rows = self._rows_of(keys)
        place = ClusterPlace.of(self.features, rows)
        means = [float(column.mean()) for column in self.features.raw[rows].T]
        earlier = [e for e in listed if any(key in keys for key, _ in e.users)]
        return self.evidence | {
            "features": {f"x{k}": mean for k, mean in enumerate(means, 1)},
            "place": asdict(place) if place else None,
            "earlier": [
                {"round": e.found, "place": asdict(e.place) if e.place else None} for e in earlier
            ],
        }

    def _users(self, keys: list[int]) -> tuple[tuple[int, str], ...]:
        return tuple((key, self.features.names[self.row_of[key]]) for key in keys)

    def _names(self, keys: list[int]) -> tuple[str, ...]:
        return tuple(name for _, name in self._users(keys))
