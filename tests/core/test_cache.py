"""What a worker retains between tasks: a limited number of entries of each kind."""

from __future__ import annotations

from pathlib import Path

from roost.storage.cache import WorkerCache


class Built:
    """A cache that notes which entries it had to build."""

    def __init__(self) -> None:
        self.cache = WorkerCache()
        self.keys: list[str] = []

    def get(self, kind: str, key: str) -> str:
        return self.cache.get(kind, key, lambda: self._build(key))

    def _build(self, key: str) -> str:
        self.keys.append(key)
        return key.upper()


def test_the_least_recently_used_entry_of_a_kind_is_dropped_first() -> None:
    built = Built()
    for kind, limit in WorkerCache.LIMITS.items():
        keys = [f"{kind} {number}" for number in range(min(limit, 20))]
        built.keys.clear()
        assert [built.get(kind, key) for key in keys * 2] == [key.upper() for key in keys] * 2
        assert built.keys == keys, "as many entries as the limit stay"
        if limit <= 20:
            built.get(kind, keys[0])
            built.get(kind, "more")
            built.get(kind, keys[0])
            assert built.keys == [*keys, "more"], "it was used last"
            built.get(kind, keys[1])
            assert built.keys == [*keys, "more", keys[1]], "it was used first"


def test_stale_entries_of_one_kind_are_dropped() -> None:
    built = Built()
    for kind in ("router", "parquet"):
        for key in ("a", "b"):
            built.get(kind, key)
    built.cache.drop("router", lambda key: key == "a")
    built.cache.drop("index", lambda key: True)
    built.keys.clear()
    for kind in ("router", "parquet"):
        for key in ("a", "b"):
            built.get(kind, key)
    assert built.keys == ["a"]


def test_only_a_cache_with_a_root_has_folders(tmp_path: Path) -> None:
    assert WorkerCache().folder("trio") is None
    folder = WorkerCache(lambda: tmp_path / "executor").folder("trio")
    assert folder == tmp_path / "executor" / "trio" and folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
