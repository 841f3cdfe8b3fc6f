"""Inputs that were registered once, and the order in which their files are replayed."""

from __future__ import annotations

from roost.errors import StateError
from roost.storage.store import Fact, Store, View

FILES, SEEN = "files", "seen"


def _table(kind: str, source: str) -> str:
    return f"{kind} {source}" if source else kind


def point_files(view: View, source: str = "") -> list[tuple[str, int, int]]:
    """Return the files of a source in replay order: path, rows, number of the first row."""
    rows = view.items(_table(FILES, source))
    return [(row["path"], row["rows"], row["first"]) for _, row in rows]


def seen_inputs(view: View, source: str = "") -> set[str]:
    """Return the tags of inputs that were read before."""
    return {tag for tag, _ in view.items(_table(SEEN, source))}


def add_inputs(
    store: Store, files: list[tuple[str, int, int]], seen: list[str], source: str = ""
) -> None:
    """Extend the replay order of a source; an input is added once."""
    known = seen_inputs(store, source).intersection(seen)
    if known:
        raise StateError(f"input {min(known)} was added before")
    table = _table(FILES, source)
    last = store.last(table)
    first = 1 if last is None else last[0] + 1
    rows = [{"path": path, "rows": rows, "first": start} for path, rows, start in files]
    store.record(
        *(Fact(table, number, row) for number, row in enumerate(rows, first)),
        *(Fact(_table(SEEN, source), tag, True) for tag in seen),
    )
