"""Inputs that were registered once, and the order in which their files are replayed."""

from __future__ import annotations

from roost.errors import StateError
from roost.storage.store import Fact, Store, View

FILES, SEEN = "files", "seen"


def point_files(view: View) -> list[tuple[str, int, int]]:
    """Return point files in replay order: path, rows, number of the first row."""
    return [(row["path"], row["rows"], row["first"]) for _, row in view.items(FILES)]


def seen_inputs(view: View) -> set[str]:
    """Return the tags of inputs that were read before."""
    return {tag for tag, _ in view.items(SEEN)}


def add_inputs(store: Store, files: list[tuple[str, int, int]], seen: list[str]) -> None:
    """Extend the replay order; an input is added once."""
    known = seen_inputs(store).intersection(seen)
    if known:
        raise StateError(f"input {min(known)} was added before")
    last = store.last(FILES)
    first = 1 if last is None else last[0] + 1
    rows = [{"path": path, "rows": rows, "first": start} for path, rows, start in files]
    store.record(
        *(Fact(FILES, number, row) for number, row in enumerate(rows, first)),
        *(Fact(SEEN, tag, True) for tag in seen),
    )
