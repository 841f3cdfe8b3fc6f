"""Index versions: the segment files that hold the queries of a log position."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from roost.storage.files import Files
from roost.storage.store import Fact, Store, View

TABLE = "versions"
SEGMENTS = "segments"


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A segment file and, if queries have terminated since, the file that lists them."""

    file: str
    ended: str | None
    size: int


@dataclass(frozen=True, slots=True)
class IndexVersion:
    """Segments that hold the queries of a log position.

    ``rows`` counts requests up to the position. ``refused`` has the requests refused since the
    previous version, as fields of dead-letter records.
    """

    position: int
    rows: int
    segments: tuple[SegmentRef, ...]
    refused: tuple[tuple[Any, ...], ...] = ()

    def fact(self) -> Fact:
        """Return the row that records this version."""
        return Fact(TABLE, self.position, asdict(self))

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> IndexVersion:
        """Rebuild a version from its row."""
        return cls(
            body["position"],
            body["rows"],
            tuple(SegmentRef(**ref) for ref in body["segments"]),
            tuple(tuple(row) for row in body["refused"]),
        )


def segment_files(store: Store) -> Files:
    """Return the segment files of a state directory."""
    return store.files(SEGMENTS)


def version_at(view: View, position: int | None = None) -> IndexVersion | None:
    """Return the newest version that is not beyond a position, if any."""
    found = view.last(TABLE, position)
    return None if found is None else IndexVersion.from_json(found[1])


def versions_between(view: View, after: int, upto: int) -> list[IndexVersion]:
    """Return the versions in ``(after, upto]``, in order."""
    return [IndexVersion.from_json(body) for _, body in view.items(TABLE, after, upto)]


def drop_versions(store: Store, before: int) -> None:
    """Delete versions that no batch from this position on requires, and their files."""
    oldest = version_at(store, before)
    if oldest is None:
        return
    old = store.items(TABLE, upto=oldest.position - 1)
    store.record(*(Fact(TABLE, position, None) for position, _ in old))
    listed: set[str] = set()
    for _, body in store.items(TABLE):
        for ref in IndexVersion.from_json(body).segments:
            listed.update(name for name in (ref.file, ref.ended) if name)
    segment_files(store).delete("", listed)
