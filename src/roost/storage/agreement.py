"""Settings that a state directory was made with, and that later runs must share."""

from __future__ import annotations

import json
from typing import Any

from roost.errors import StateError
from roost.storage.store import Fact, Store, View

META = "meta"


def agreed(view: View) -> dict[str, Any] | None:
    """Return the settings that the state was made with; None before its first run."""
    found: dict[str, Any] | None = view.get(META, META)
    return found


def agree(store: Store, meta: dict[str, Any]) -> None:
    """Record settings that results depend on, or check that they equal the recorded ones.

    Raises :class:`StateError` with the first setting that differs.
    """
    meta = json.loads(json.dumps(meta))
    found = agreed(store)
    if found is None:
        store.record(Fact(META, META, meta))
        return
    for key in sorted(set(found) | set(meta)):
        if found.get(key) != meta.get(key):
            raise StateError(
                f"state in {store.folder} was made with {key} = {found.get(key)!r}, "
                f"this run has {meta.get(key)!r}; use the same settings or another --state"
            )
