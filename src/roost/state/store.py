"""The driver's own small state, in one SQLite file: what happened, and what must be repeated.

Six kinds of facts. *Index versions*: which segments hold the queries of a log position, and the
requests refused on the way there. *Plans* by epoch. *Rounds*: what was decided, and why. *Batches*:
the intent (written before any work) and the commit (written after all of it). *The window*: the
files of its batches, changed with each commit. *The guard* has a book of its own
(``guard_book.py``). Each is one row, or one transaction, so each is there or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roost.errors import StateError
from roost.state.guard_book import GuardBook, GuardChange
from roost.state.private import connect, private_folder, state_folder

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Intent:
    """What a batch is about to do; a batch that runs again does the same.

    Parameters
    ----------
    batch_id
        Number of the batch.
    epoch
        Plan that routes it.
    position
        Query-log position that it is matched against.
    offsets
        Which points it takes, in the source's own words (empty where Spark keeps them).
    """

    batch_id: int
    epoch: int
    position: int
    offsets: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commit:
    """What a batch left behind: staged files with their final names, and its figures."""

    batch_id: int
    files: tuple[tuple[str, str], ...]
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WindowChange:
    """What a commit changes of the window: a batch that came, batches that went, what is left."""

    batch_id: int
    row: dict[str, Any]
    gone: tuple[int, ...]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A segment file and, where queries have ended since, the file that says which."""

    file: str
    ended: str | None
    size: int


@dataclass(frozen=True, slots=True)
class IndexVersion:
    """Segments that hold the queries of a log position.

    ``rows`` counts requests up to the position; ``refused`` are those refused since the previous
    version, as lists of the fields of a dead letter.
    """

    position: int
    rows: int
    segments: tuple[SegmentRef, ...]
    refused: tuple[tuple[Any, ...], ...] = ()


class Store:
    """Facts of one state directory."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        """Open the facts; who only looks need not wait for the disk at every pin."""
        # In this journal mode, "normal" may lose the last pins with the host, and nothing else.
        self.folder = folder.absolute()  # workers may have another working directory
        state_folder(folder)
        private_folder(self.segment_folder)
        self._db = connect(folder / "state.db")
        self._db.execute(f"pragma synchronous = {'full' if durable else 'normal'}")
        self._db.executescript(
            "begin immediate;"
            "create table if not exists meta (key text primary key, value text);"
            "create table if not exists versions (position integer primary key, body text);"
            "create table if not exists plans (epoch integer primary key, body text);"
            "create table if not exists rounds (number integer primary key, body text);"
            "create table if not exists batches"
            " (batch_id integer primary key, intent text, done text);"
            "create table if not exists files"
            " (number integer primary key, path text, rows integer, first integer);"
            "create table if not exists seen (path text primary key);"
            "create table if not exists windows (batch_id integer primary key, body text);"
            "create table if not exists pins"
            " (pin integer primary key, batch_id integer, until real);"
            "commit;"
        )
        self.guard = GuardBook(self._db)
        self._db.commit()

    @property
    def segment_folder(self) -> Path:
        """Where segment files are."""
        return self.folder / "segments"

    @property
    def window_folder(self) -> Path:
        """Where the points of the window are."""
        return self.folder / "window"

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _put(self, statement: str, *values: Any) -> None:
        with self._db:
            self._db.execute(statement, values)

    def _get(self, statement: str, *values: Any) -> Any:
        row = self._db.execute(statement, values).fetchone()
        return None if row is None or row[0] is None else json.loads(row[0])

    def agree(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Remember what the state was made for, or check that it still is.

        Parameters
        ----------
        meta
            Settings that results depend on; a state directory made with others is refused.
        """
        meta = json.loads(json.dumps({"format": FORMAT, **meta}))
        kept = self.meta()
        if kept is None:
            self._put("insert into meta values ('meta', ?)", json.dumps(meta))
            return meta
        for key in sorted(set(kept) | set(meta)):
            if kept.get(key) != meta.get(key):
                raise StateError(
                    f"state in {self.folder} was made with {key} = {kept.get(key)!r}, "
                    f"this run has {meta.get(key)!r}; use the same settings or another --state"
                )
        return kept

    def meta(self) -> dict[str, Any] | None:
        """Return the settings that the state was made with."""
        kept: dict[str, Any] | None = self._get("select value from meta where key = 'meta'")
        return kept

    def put_version(self, version: IndexVersion, tallies: Sequence[tuple[int, bytes]] = ()) -> None:
        """Record an index version, and at once what the guard counted on the way there."""
        with self._db:
            self._db.execute(
                "insert or replace into versions values (?, ?)",
                (version.position, json.dumps(asdict(version))),
            )
            self.guard.write_tallies(tallies)

    def put_guard(self, change: GuardChange) -> None:
        """Record the guard as it is from now on, and what it decided on the way there."""
        with self._db:
            self.guard.write(change)

    def version_at(self, position: int) -> IndexVersion | None:
        """Newest version that is not beyond a position."""
        body = self._get(
            "select body from versions where position <= ? order by position desc limit 1", position
        )
        return None if body is None else _version(body)

    def versions_between(self, after: int, upto: int) -> list[IndexVersion]:
        """Versions in ``(after, upto]``, in order."""
        rows = self._db.execute(
            "select body from versions where position > ? and position <= ? order by position",
            (after, upto),
        )
        return [_version(json.loads(body)) for (body,) in rows]

    def drop_versions_before(self, position: int) -> None:
        """Forget versions that no batch can ask for again, and delete their files."""
        keep = self.version_at(position)
        if keep is None:
            return
        self._put("delete from versions where position < ?", keep.position)
        rows = self._db.execute("select body from versions")
        live: set[str] = set()
        for (body,) in rows:
            for ref in _version(json.loads(body)).segments:
                live.update(name for name in (ref.file, ref.ended) if name)
        for path in self.segment_folder.glob("*.seg"):
            if path.name not in live:
                path.unlink(missing_ok=True)

    def put_plan(self, epoch: int, plan: dict[str, Any]) -> None:
        """Record a plan; an epoch is written once."""
        self._put("insert into plans values (?, ?)", epoch, json.dumps(plan))

    def plan(self, epoch: int) -> dict[str, Any]:
        """Plan of an epoch."""
        body = self._get("select body from plans where epoch = ?", epoch)
        if body is None:
            raise StateError(f"state in {self.folder} has no plan of epoch {epoch}")
        plan: dict[str, Any] = body
        return plan

    def put_round(
        self,
        row: dict[str, Any],
        plan: dict[str, Any] | None,
        guard: GuardChange | None = None,
    ) -> None:
        """Record at once what a round came to: the decision, its plan, and the guard after it."""
        with self._db:
            self._db.execute(
                "insert into rounds values (?, ?)", (int(row["round"]), json.dumps(row))
            )
            if plan is not None:
                self._db.execute(
                    "insert into plans values (?, ?)", (int(plan["epoch"]), json.dumps(plan))
                )
            if guard is not None:
                self.guard.write(guard)

    def rounds(self) -> list[dict[str, Any]]:
        """All rounds, in order."""
        rows = self._db.execute("select body from rounds order by number")
        return [json.loads(body) for (body,) in rows]

    def last_round(self) -> dict[str, Any] | None:
        """Newest round."""
        row: dict[str, Any] | None = self._get(
            "select body from rounds order by number desc limit 1"
        )
        return row

    def last_epoch(self) -> int | None:
        """Newest plan epoch."""
        row = self._db.execute("select max(epoch) from plans").fetchone()
        return None if row[0] is None else int(row[0])

    def files(self) -> list[tuple[str, int, int]]:
        """Point files in replay order: path, rows, number of the first row."""
        rows = self._db.execute("select path, rows, first from files order by number")
        return [(path, count, first) for path, count, first in rows]

    def seen_files(self) -> set[str]:
        """Input files that are in the replay order already."""
        return {path for (path,) in self._db.execute("select path from seen")}

    def add_files(self, files: list[tuple[str, int, int]], seen: list[str]) -> None:
        """Extend the replay order."""
        with self._db:
            self._db.executemany("insert into files (path, rows, first) values (?, ?, ?)", files)
            self._db.executemany("insert into seen values (?)", [(path,) for path in seen])

    def put_intent(self, intent: Intent) -> Intent:
        """Write an intent, unless the batch has one already; returns the one that holds."""
        self._put(
            "insert or ignore into batches values (?, ?, null)",
            intent.batch_id,
            json.dumps(asdict(intent)),
        )
        kept = self.intent(intent.batch_id)
        assert kept is not None
        return kept

    def intent(self, batch_id: int) -> Intent | None:
        """Intent of a batch."""
        body = self._get("select intent from batches where batch_id = ?", batch_id)
        return None if body is None else Intent(**body)

    def last_intent(self) -> Intent | None:
        """Intent of the newest batch, finished or not."""
        body = self._get("select intent from batches order by batch_id desc limit 1")
        return None if body is None else Intent(**body)

    def put_commit(self, commit: Commit, window: WindowChange | None = None) -> None:
        """Write a commit: from here on the batch has happened, and is in the window."""
        with self._db:
            self._db.execute(
                "update batches set done = ? where batch_id = ?",
                (json.dumps(asdict(commit)), commit.batch_id),
            )
            if window is None:
                return
            row = (window.batch_id, json.dumps(window.row))
            self._db.execute("insert into windows values (?, ?)", row)
            gone = [(number,) for number in window.gone]
            self._db.executemany("delete from windows where batch_id = ?", gone)
            state = json.dumps(window.state)
            self._db.execute("insert or replace into meta values ('window', ?)", (state,))

    def window(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Batches of the window in order, and what goes with them; None before the first."""
        # One statement, so that both are of the same commit.
        rows = self._db.execute(
            "select batch_id, body from windows union all"
            " select null, value from meta where key = 'window' order by 1"
        ).fetchall()
        batches = [json.loads(body) for number, body in rows if number is not None]
        state = next((json.loads(body) for number, body in rows if number is None), None)
        return batches, state

    def pin_window(self, until: float) -> int:
        """Keep the files of the window as it is now until a time, or until they are let go."""
        with self._db:
            cursor = self._db.execute(
                "insert into pins (batch_id, until)"
                " select coalesce(min(batch_id), 0), ? from windows",
                (until,),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def unpin_window(self, pin: int) -> None:
        """Let files go."""
        self._put("delete from pins where pin = ?", pin)

    def pinned_batch(self, now: float) -> int | None:
        """Oldest batch whose files somebody holds; forgets those who held them too long."""
        rows = self._db.execute("select pin, batch_id, until from pins").fetchall()
        for pin, _, until in rows:
            if until < now:
                self.unpin_window(pin)
        return min((batch_id for _, batch_id, until in rows if until >= now), default=None)

    def commit(self, batch_id: int) -> Commit | None:
        """Commit of a batch, or None where it has not happened."""
        body = self._get("select done from batches where batch_id = ?", batch_id)
        return None if body is None else _commit(body)

    def last_commit(self) -> Commit | None:
        """Newest commit."""
        body = self._get(
            "select done from batches where done is not null order by batch_id desc limit 1"
        )
        return None if body is None else _commit(body)

    def reached(self) -> int | None:
        """Largest event time of any committed batch."""
        row = self._db.execute(
            "select max(json_extract(done, '$.figures.time_max')) from batches"
        ).fetchone()
        return None if row[0] is None else int(row[0])

    def commits(self) -> list[Commit]:
        """All commits, in order."""
        rows = self._db.execute("select done from batches where done is not null order by batch_id")
        return [_commit(json.loads(body)) for (body,) in rows]


def _commit(body: dict[str, Any]) -> Commit:
    files = tuple((staged, final) for staged, final in body["files"])
    return Commit(body["batch_id"], files, body["figures"])


def _version(body: dict[str, Any]) -> IndexVersion:
    return IndexVersion(
        body["position"],
        body["rows"],
        tuple(SegmentRef(**ref) for ref in body["segments"]),
        tuple(tuple(row) for row in body["refused"]),
    )
