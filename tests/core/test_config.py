"""Settings: a bad one names its key, what it got and what it takes; a good one arrives."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from roost.balance import Strategy
from roost.config import KEYS, RunConfig, check_together, load_config, with_settings
from roost.errors import ConfigError
from roost.space import Coordinates, Outside, Rect
from roost.window import WindowKind, WindowSpec

GOOD: dict[str, tuple[Any, Any]] = {
    "points.path": ("in/points.parquet", "in/points.parquet"),
    "points.format": ("csv", "csv"),
    "points.x": ("east", "east"),
    "points.y": ("north", "north"),
    "points.time": ("when", "when"),
    "points.id": ("key", "key"),
    "points.attributes": ({"fare": "double"}, {"fare": "double"}),
    "points.speed": (2.5, 2.5),
    "queries.path": ("in/requests.parquet", "in/requests.parquet"),
    "queries.log": ("kafka://host:9092/log", "kafka://host:9092/log"),
    "queries.id_type": ("int", "int"),
    "queries.polygon_vertices_max": (500, 500),
    "space.bounds": ("-74.5,40,-73,41", Rect(-74.5, 40.0, -73.0, 41.0)),
    "space.grid": ("20x10", (20, 10)),
    "space.coordinates": ("plane", Coordinates.PLANE),
    "space.outside": ("dead", Outside.DEAD),
    "engine.strategy": ("history", Strategy.HISTORY),
    "engine.machines": (7, 7),
    "engine.batch_rows": (1000, 1000),
    "engine.available_now": (True, True),
    "engine.master": ("local[2]", "local[2]"),
    "engine.spark": ({"spark.ui.enabled": "false"}, {"spark.ui.enabled": "false"}),
    "engine.encrypt": (True, True),
    "balance.round": (60, 60.0),
    "balance.tolerance": (1.25, 1.25),
    "window.kind": ("count", WindowKind.COUNT),
    "window.length": (3600, 3600.0),
    "window.tumbling": (True, True),
    "window.lateness": (0, 0.0),
    "window.attributes": ("fare, kind", ("fare", "kind")),
    "guard.enabled": (True, True),
    "guard.round": (30, 30.0),
    "guard.evict": (True, True),
    "guard.quarantine": (True, True),
    "guard.users_max": (1000, 1000),
    "join.left": ("kind = 'a'", "kind = 'a'"),
    "join.right": ("kind = 'b'", "kind = 'b'"),
    "join.distance": (0, 0.0),
    "join.within": (30, 30.0),
    "out.dir": ("results", Path("results")),
    "out.state": ("state", Path("state")),
    "out.sink": ("console", "console"),
    "out.topic": ("kafka://host:9092/matches", "kafka://host:9092/matches"),
    "out.report": ("report.json", Path("report.json")),
}

BAD: list[tuple[str, Any, str]] = [
    ("points.path", 5, "text"),
    ("points.path", "", "text"),
    ("points.format", "xml", "auto or parquet or csv or jsonl"),
    ("points.x", ["a"], "text"),
    ("points.attributes", "fare", "a table"),
    ("points.speed", 0, "above 0"),
    ("points.speed", -1, "above 0"),
    ("points.speed", "fast", "max"),
    ("points.speed", True, "max"),
    ("points.speed", float("nan"), "above 0"),
    ("queries.id_type", "uuid", "int or text"),
    ("queries.polygon_vertices_max", 3, "a whole number from 4 up"),
    ("space.bounds", "1,2,3", "four numbers x0,y0,x1,y1"),
    ("space.bounds", "a,b,c,d", "four numbers x0,y0,x1,y1"),
    ("space.bounds", 7, "four numbers x0,y0,x1,y1"),
    ("space.bounds", [0, 0, 0, 1], "x0 < x1"),
    ("space.bounds", "0,0,nan,1", "finite"),
    ("space.grid", "10", "CxR"),
    ("space.grid", "10x", "CxR"),
    ("space.grid", 10, "CxR"),
    ("space.grid", [10.5, 3], "CxR"),
    ("space.grid", "0x10", "from 1 to"),
    ("space.grid", "10x99999", "from 1 to"),
    ("space.coordinates", "mercator", "lonlat or plane"),
    ("space.outside", "drop", "exact or dead"),
    ("engine.strategy", "random", "replicated or uniform or history"),
    ("engine.strategy", ["uniform"], "replicated or uniform or history"),
    ("balance.round", 0, "a number above 0"),
    ("balance.round", "15 s", "a number above 0"),
    ("balance.tolerance", 1.0, "a number above 1"),
    ("balance.tolerance", True, "a number above 1"),
    ("engine.machines", 0, "a whole number from 1 up"),
    ("engine.machines", 2.0, "a whole number from 1 up"),
    ("engine.machines", "2", "a whole number from 1 up"),
    ("engine.machines", True, "a whole number from 1 up"),
    ("engine.batch_rows", -5, "a whole number from 1 up"),
    ("engine.available_now", "yes", "true or false"),
    ("engine.available_now", 1, "true or false"),
    ("engine.spark", "spark.x=1", "a table"),
    ("engine.encrypt", "yes", "true or false"),
    ("window.kind", "day", "time or count or bytes"),
    ("window.length", 0, "a number above 0"),
    ("window.length", "1h", "a number above 0"),
    ("window.length", float("inf"), "a finite number"),
    ("window.lateness", float("inf"), "a finite number"),
    ("join.within", float("inf"), "a finite number"),
    ("window.tumbling", "yes", "true or false"),
    ("window.lateness", -1, "a number from 0 up"),
    ("window.attributes", 3, "a list of names"),
    ("window.attributes", [3], "a list of names"),
    ("guard.enabled", "yes", "true or false"),
    ("guard.round", 0, "a number above 0"),
    ("guard.users_max", 7, "a whole number from 8 up"),
    ("join.left", 5, "text"),
    ("join.distance", -1, "a number from 0 up"),
    ("join.within", float("nan"), "a number from 0 up"),
    ("out.dir", 5, "text"),
    ("out.sink", "mongo", "parquet or count or console or kafka"),
]


def test_every_setting_is_tried_and_every_attribute_has_a_key() -> None:
    assert set(GOOD) == set(KEYS)
    assert sorted(attribute for attribute, _ in KEYS.values()) == sorted(
        item.name for item in fields(RunConfig)
    )


@pytest.mark.parametrize("key", GOOD)
def test_a_good_setting_arrives(key: str) -> None:
    value, expected = GOOD[key]
    config = with_settings(RunConfig(), {key: value})
    assert getattr(config, KEYS[key][0]) == expected
    others = {name for name, _ in KEYS.values()} - {KEYS[key][0]}
    assert all(getattr(config, name) == getattr(RunConfig(), name) for name in others)


@pytest.mark.parametrize(("key", "value", "takes"), BAD, ids=[f"{k}={v}" for k, v, _ in BAD])
def test_a_bad_setting_names_the_key_what_it_got_and_what_it_takes(key, value, takes) -> None:
    with pytest.raises(ConfigError) as caught:
        with_settings(RunConfig(), {key: value})
    error = caught.value
    assert error.key == key
    assert takes in error.takes
    message = str(error)
    assert message.startswith(f"{key}: got ")
    assert takes in message
    if isinstance(value, str) and "," not in value:
        assert repr(value) in message


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("engine.machine", "engine.machines"),
        ("points.pth", "points.path"),
        ("space.bound", "space.bounds"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: got 3, .*did you mean {suggestion}"):
        with_settings(RunConfig(), {key: 3})


def test_a_key_unlike_any_other_is_refused_too() -> None:
    with pytest.raises(ConfigError) as caught:
        with_settings(RunConfig(), {"zzz": 3})
    assert caught.value.takes == "a known key"


def test_the_kafka_sink_needs_its_topic() -> None:
    """The sink may come from the file and the topic from a flag, so only the whole is judged."""
    from_file = with_settings(RunConfig(), {"out.sink": "kafka"})
    with pytest.raises(ConfigError, match=r"out\.topic: got None"):
        check_together(from_file)
    check_together(with_settings(from_file, {"out.topic": "kafka://host:9092/matches"}))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"window.length": 5}, "window.length"),
        ({"window.tumbling": True}, "window.tumbling"),
        ({"window.kind": "time"}, "window.length"),
        ({"window.kind": "count", "window.length": 2.5}, "window.length"),
        ({"window.kind": "count", "window.length": 2, "window.lateness": 1}, "window.lateness"),
        ({"join.distance": 5, "join.within": 1}, "join.distance"),
        ({"window.kind": "count", "window.length": 2, "join.distance": 5}, "join.within"),
        ({"window.kind": "count", "window.length": 2, "join.left": "a = 1"}, "join.distance"),
        ({"guard.evict": True}, "guard.evict"),
        ({"guard.quarantine": True}, "guard.quarantine"),
        ({"guard.enabled": True, "engine.strategy": "uniform"}, "engine.strategy"),
    ],
)
def test_windows_joins_and_guards_need_all_their_settings(
    settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_together(with_settings(RunConfig(), settings))
    assert caught.value.key == key


def test_a_window_that_python_code_made_is_judged_too() -> None:
    assert RunConfig(window="time").window is WindowKind.TIME  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"window\.kind"):
        RunConfig(window="day")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"window\.length"):
        check_together(RunConfig(window=WindowKind.COUNT, window_length=-5))


def test_lengths_of_time_are_in_seconds_and_lateness_is_the_length() -> None:
    config = with_settings(RunConfig(), {"window.kind": "time", "window.length": 1.5})
    assert config.window_spec(1_000_000) == WindowSpec(
        WindowKind.TIME, 1_500_000, lateness=1_500_000
    )
    config = with_settings(config, {"window.lateness": 0, "window.tumbling": True})
    assert config.window_spec(1) == WindowSpec(WindowKind.TIME, 2, tumbling=True)
    counted = with_settings(RunConfig(), {"window.kind": "count", "window.length": 7})
    assert counted.window_spec(1_000_000) == WindowSpec(WindowKind.COUNT, 7)


def test_speed_may_be_unbounded() -> None:
    paced = with_settings(RunConfig(), {"points.speed": 3})
    assert paced.speed == 3.0
    assert with_settings(paced, {"points.speed": "max"}).speed is None


def test_the_state_lies_beside_the_output_unless_told() -> None:
    assert RunConfig(out=Path("o")).state_folder == Path("o") / "state"
    assert RunConfig(out=Path("o"), state=Path("s")).state_folder == Path("s")


def test_a_file_is_read_with_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        [points]
        path = "points.parquet"
        attributes = { fare = "double", base = "string" }
        [space]
        bounds = [-74.5, 40, -73, 41]
        grid = [20, 10]
        [engine]
        strategy = "uniform"
        machines = 3
        spark = { "spark.ui.enabled" = "false" }
        """
    )
    config = load_config(path)
    assert config == RunConfig(
        points="points.parquet",
        attributes={"fare": "double", "base": "string"},
        bounds=Rect(-74.5, 40.0, -73.0, 41.0),
        grid=(20, 10),
        strategy=Strategy.UNIFORM,
        machines=3,
        spark={"spark.ui.enabled": "false"},
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        pytest.param('[points]\npath = "a"\nfromat = "csv"\n', "points.fromat", id="misspelt"),
        pytest.param("[engine]\nmachines = 'two'\n", "engine.machines", id="wrong type"),
        pytest.param("machines = 2\n", "machines", id="outside its table"),
        pytest.param("[engine.deep]\nkey = 1\n", "engine.deep.key", id="too deep"),
    ],
)
def test_a_bad_setting_in_a_file_is_named(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("content", "takes"),
    [
        pytest.param(None, "a readable file", id="missing"),
        pytest.param(b"points = [", "valid TOML", id="broken"),
        pytest.param(b"\xff\xfe", "valid TOML", id="not text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content, takes: str) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.key == "config"
    assert caught.value.got == str(path)
    assert takes in caught.value.takes
