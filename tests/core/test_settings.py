"""Settings are the same from TOML, flags and Python, and refuse values by key."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from roost.errors import ConfigError
from roost.model.choices import (
    BucketPolicy,
    ElasticPolicyName,
    Exchange,
    LayoutName,
    PlacementName,
    Strategy,
    WindowKind,
)
from roost.model.settings import (
    KEYS,
    SECTIONS,
    EngineSettings,
    RunConfig,
    load_config,
    with_settings,
)
from roost.model.space import Coordinates, Outside, Rect
from roost.window import WindowSpec
from roost.window.spec import window_spec

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
    "engine.cache": ("copies", Path("copies")),
    "engine.cache_bytes": (1, 1),
    "balance.round": (60, 60.0),
    "balance.tolerance": (1.25, 1.25),
    "balance.exchange": ("always", Exchange.ALWAYS),
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
    "dataflow.flow": ("calls.py:flow", "calls.py:flow"),
    "dataflow.sources": ({"calls": "calls/"}, {"calls": "calls/"}),
    "dataflow.lateness": (5, 5.0),
    "dataflow.idle": (30, 30.0),
    "dataflow.machines": (3, 3),
    "dataflow.layout": ("operator_set", LayoutName.OPERATOR_SET),
    "dataflow.round": (0, 0.0),
    "dataflow.balance": ("greedy", BucketPolicy.GREEDY),
    "dataflow.imbalance": (0, 0.0),
    "dataflow.improvement": (0.5, 0.5),
    "dataflow.buckets": (1024, 1024),
    "synopsis.features": ("fare, kind", ("fare", "kind")),
    "synopsis.prefix_bits": (6, 6),
    "synopsis.place_bits": (20, 20),
    "synopsis.bucket_days": (7, 7),
    "synopsis.interval_days": (2, 2),
    "synopsis.slots": (4, 4),
    "synopsis.step_s": (1800, 1800),
    "synopsis.bins": (32, 32),
    "synopsis.rule": ("equal_density", "equal_density"),
    "synopsis.exchange": (True, True),
    "synopsis.learn_rows": (1000, 1000),
    "synopsis.fold_files": (4, 4),
    "synopsis.memory": (1_000_000, 1_000_000),
    "synopsis.study": (7, 7.0),
    "synopsis.retention": (365, 365.0),
    "synopsis.sets": ([{"columns": ["kind"]}], ({"columns": ["kind"]},)),
    "synopsis.queries": (
        [{"name": "all", "query": "count"}],
        ({"name": "all", "query": "count"},),
    ),
    "synopsis.scaling": (False, False),
    "synopsis.scaling_observations": (2, 2),
    "synopsis.scaling_stabilisation": (0, 0),
    "synopsis.scaling_memory_upper": (0.5, 0.5),
    "synopsis.scaling_memory_lower": (0.1, 0.1),
    "synopsis.scaling_backlog_upper": (3, 3.0),
    "synopsis.scaling_backlog_lower": (1, 1.0),
    "synopsis.scaling_utilisation": (0.7, 0.7),
    "elastic.min": (2, 2),
    "elastic.max": (7, 7),
    "elastic.lower": (0.3, 0.3),
    "elastic.upper": (0.8, 0.8),
    "elastic.target": (0.7, 0.7),
    "elastic.batch_seconds": (2, 2.0),
    "elastic.spares": (1, 1),
    "elastic.by_started_hour": (True, True),
    "elastic.forecast": (False, False),
    "elastic.policy": ("individual", ElasticPolicyName.INDIVIDUAL),
    "elastic.round": (30, 30.0),
    "elastic.total": (9, 9),
    "elastic.placement": ("best", PlacementName.BEST),
    "elastic.groups": ([{"name": "large", "max": 2}], ({"name": "large", "max": 2},)),
    "out.dir": ("results", Path("results")),
    "out.state": ("state", Path("state")),
    "out.sink": ("console", "console"),
    "out.topic": ("kafka://host:9092/matches", "kafka://host:9092/matches"),
    "out.report": ("report.json", Path("report.json")),
    "out.history": (500, 500),
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
    ("balance.round", 0, "a finite number above 0"),
    ("balance.round", "15 s", "a finite number above 0"),
    ("balance.tolerance", 1.0, "a finite number above 1"),
    ("balance.tolerance", True, "a finite number above 1"),
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
    ("window.length", 0, "a finite number above 0"),
    ("window.length", 10**400, "a finite number above 0"),
    ("window.length", "1h", "a finite number above 0"),
    ("window.length", float("inf"), "a finite number"),
    ("window.lateness", float("inf"), "a finite number"),
    ("join.within", float("inf"), "a finite number"),
    ("window.tumbling", "yes", "true or false"),
    ("window.lateness", -1, "a finite number from 0 up"),
    ("window.attributes", 3, "a list of names"),
    ("window.attributes", [3], "a list of names"),
    ("guard.enabled", "yes", "true or false"),
    ("guard.round", 0, "a finite number above 0"),
    ("guard.users_max", 7, "a whole number from 8 up"),
    ("join.left", 5, "text"),
    ("join.distance", -1, "a finite number from 0 up"),
    ("join.within", float("nan"), "a finite number from 0 up"),
    ("synopsis.features", 3, "a list of names"),
    ("synopsis.rule", "density", "cube_root or equal_density"),
    ("synopsis.fold_files", 1, "a whole number from 2 up"),
    ("synopsis.memory", 1_000, "a whole number from 65536 up"),
    ("synopsis.queries", {"name": "all"}, "a list of tables"),
    ("synopsis.queries", ["count"], "a list of tables"),
    ("dataflow.flow", "calls.py", "FILE.py:NAME"),
    ("dataflow.sources", "calls=x", "a table"),
    ("dataflow.lateness", -1, "a finite number from 0 up"),
    ("dataflow.idle", 0, "a finite number above 0"),
    ("dataflow.machines", 0, "a whole number from 1 up"),
    ("dataflow.round", -1, "a finite number from 0 up"),
    ("dataflow.balance", "swarm", "planner or greedy or off"),
    ("dataflow.imbalance", -0.1, "a finite number from 0 up"),
    ("dataflow.improvement", 1, "a finite number from 0 up, below 1"),
    ("out.dir", 5, "text"),
    ("out.sink", "mongo", "parquet or count or console or kafka"),
]


# Settings that are only valid with others.
JOIN = {"window.kind": "time", "window.length": 5, "join.distance": 1, "join.within": 1}
NEEDED: dict[str, dict[str, Any]] = {
    "window.kind": {"window.length": 5},
    "window.length": {"window.kind": "time"},
    "window.tumbling": {"window.kind": "time", "window.length": 5},
    "window.lateness": {"window.kind": "time", "window.length": 5},
    "window.attributes": {"window.kind": "time", "window.length": 5},
    "guard.evict": {"guard.enabled": True},
    "guard.quarantine": {"guard.enabled": True},
    **{key: JOIN for key in KEYS if key.startswith("join.")},
    **{
        key: {"synopsis.features": "fare"}
        for key in KEYS
        if key.startswith("synopsis.") and key != "synopsis.features"
    },
    **{
        key: {"elastic.max": 9}
        for key in KEYS
        if key.startswith("elastic.") and key != "elastic.max"
    },
    "elastic.placement": {"elastic.max": 9, "elastic.groups": [{"name": "large"}]},
}


def sections(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Keyword arguments of RunConfig for settings by key."""
    grouped: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        grouped.setdefault(section, {})[name] = value
    return grouped


def values(config: RunConfig) -> dict[str, Any]:
    return {key: attrgetter(key)(config) for key in KEYS}


def test_the_sections_of_a_run_are_the_registered_ones() -> None:
    assert [item.name for item in fields(RunConfig)] == list(SECTIONS)
    for name, section in SECTIONS.items():
        assert get_type_hints(RunConfig)[name] is section
    assert set(GOOD) == set(KEYS)


@pytest.mark.parametrize("key", GOOD)
def test_a_valid_setting_is_stored_under_its_key(key: str) -> None:
    value, expected = GOOD[key]
    needed = NEEDED.get(key, {})
    config = with_settings(RunConfig(), {**needed, key: value})
    assert attrgetter(key)(config) == expected
    assert type(attrgetter(key)(config)) is type(expected)
    others = set(KEYS) - {key, *needed}
    before, after = values(RunConfig()), values(config)
    assert all(after[name] == before[name] for name in others)


@pytest.mark.parametrize("key", GOOD)
def test_keys_keywords_and_sections_give_equal_configurations(key: str) -> None:
    given = {**NEEDED.get(key, {}), key: GOOD[key][0]}
    config = with_settings(RunConfig(), given)
    keywords = sections(given)
    assert RunConfig(**keywords) == config
    made = {name: SECTIONS[name](**values) for name, values in keywords.items()}
    assert RunConfig(**made) == config
    assert replace(RunConfig(), **made) == config
    parsed = {key: attrgetter(key)(config) for key in given}
    assert with_settings(RunConfig(), parsed) == config, "parsed values are accepted again"
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(("key", "value", "takes"), BAD, ids=[f"{k}={v}" for k, v, _ in BAD])
def test_an_invalid_setting_names_its_key_and_the_accepted_values(key, value, takes) -> None:
    with pytest.raises(ConfigError) as caught:
        with_settings(RunConfig(), {key: value})
    error = caught.value
    section, name = key.split(".")
    for make in (
        lambda: RunConfig(**{section: {name: value}}),
        lambda: SECTIONS[section](**{name: value}),
        lambda: replace(RunConfig(), **{section: {name: value}}),
    ):
        with pytest.raises(ConfigError) as again:
            make()
        assert str(again.value) == str(error)
    assert error.key == key
    assert takes in error.expected
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
    assert caught.value.expected == "a known key"


def test_the_file_may_have_the_sink_and_a_flag_its_topic(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[out]\nsink = "kafka"\n')
    with pytest.raises(ConfigError, match=r"out\.topic: got None"):
        load_config(path)
    topic = "kafka://host:9092/matches"
    config = load_config(path, {"out.topic": topic})
    assert (config.out.sink, config.out.topic) == ("kafka", topic)
    assert load_config(str(path), {"out.sink": "count"}).out.sink == "count"


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
    for make in (
        lambda: with_settings(RunConfig(), settings),
        lambda: RunConfig(**sections(settings)),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.key == key


def test_a_sink_that_does_not_exist_is_refused() -> None:
    """Version 0.1 staged its matches, published none and deleted them."""
    with pytest.raises(ConfigError, match=r"out\.sink: got 'paquet', expected parquet or count"):
        RunConfig(out={"sink": "paquet"})


OLD_KEYWORDS = {
    "format": "points.format", "x": "points.x", "y": "points.y", "time": "points.time",
    "point_id": "points.id", "attributes": "points.attributes", "speed": "points.speed",
    "query_log": "queries.log", "query_id_type": "queries.id_type",
    "polygon_vertices_max": "queries.polygon_vertices_max", "bounds": "space.bounds",
    "grid": "space.grid", "coordinates": "space.coordinates", "outside": "space.outside",
    "strategy": "engine.strategy", "machines": "engine.machines",
    "batch_rows": "engine.batch_rows", "available_now": "engine.available_now",
    "master": "engine.master", "spark": "engine.spark", "encrypt": "engine.encrypt",
    "round_length": "balance.round", "tolerance": "balance.tolerance",
    "window_length": "window.length", "window_tumbling": "window.tumbling",
    "window_lateness": "window.lateness", "window_attributes": "window.attributes",
    "guard_round": "guard.round", "guard_evict": "guard.evict",
    "guard_quarantine": "guard.quarantine", "guard_users_max": "guard.users_max",
    "join_left": "join.left", "join_right": "join.right", "join_distance": "join.distance",
    "join_within": "join.within", "state": "out.state", "sink": "out.sink",
    "sink_topic": "out.topic", "report": "out.report",
}  # fmt: skip
OLD_SECTIONS = {
    "points": "path", "queries": "path", "window": "kind", "guard": "enabled", "out": "dir",
}  # fmt: skip


GROUP = {"name": "large"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"groups": [{}]}, "groups.name"),
        ({"groups": [{"name": ""}]}, "groups.name"),
        ({"groups": [GROUP, GROUP]}, "groups.name"),
        ({"groups": [{**GROUP, "size": 3}]}, "groups.size"),
        ({"groups": [{**GROUP, "min": 0}]}, "groups.min"),
        ({"groups": [{**GROUP, "min": 3, "max": 2}]}, "groups.max"),
        ({"groups": [{**GROUP, "cores": True}]}, "groups.cores"),
        ({"groups": [{**GROUP, "memory": 5}]}, "groups.memory"),
        ({"groups": [{**GROUP, "operators": "count"}]}, "groups.operators"),
        ({"groups": [{**GROUP, "operators": ["a", "a"]}]}, "groups.operators"),
        ({"groups": [{"name": "default", "max": 2}]}, "groups.max"),
        ({"groups": [{**GROUP, "min": 2}], "total": 2}, "total"),
        ({"placement": "best"}, "placement"),
        ({"placement": "best", "groups": [{"name": "default"}]}, "placement"),
    ],
)
def test_wrong_executor_groups_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(elastic={"max": 2, **settings})
    assert caught.value.key == f"elastic.{key}"


def test_every_keyword_of_version_0_1_is_known_to_the_test() -> None:
    renamed = {f"{section}.{name}" for section, name in OLD_SECTIONS.items()}
    newer = {
        "engine.cache",
        "engine.cache_bytes",
        "balance.exchange",
        "out.history",
        *(k for k in KEYS if k.startswith(("dataflow.", "synopsis.", "elastic."))),
    }
    assert {*OLD_KEYWORDS.values(), *renamed} == set(KEYS) - newer


@pytest.mark.parametrize("name", OLD_KEYWORDS)
def test_a_flat_keyword_is_refused_with_its_new_spelling(name: str) -> None:
    section, setting = OLD_KEYWORDS[name].split(".")
    value = GOOD[OLD_KEYWORDS[name]][0]
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{name: value})
    assert caught.value.key == name
    assert f"did you mean {section}={ {setting: value} }?" in str(caught.value)


@pytest.mark.parametrize("name", OLD_SECTIONS)
def test_a_value_in_place_of_a_section_is_refused_with_its_new_spelling(name: str) -> None:
    value = GOOD[f"{name}.{OLD_SECTIONS[name]}"][0]
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{name: value})
    assert caught.value.key == name
    assert f"such as { {OLD_SECTIONS[name]: value} }" in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"engin": {"machines": 2}}, "engin: got {'machines': 2}, .*did you mean engine="),
        ({"machine": 2}, "machine: got 2, .*did you mean engine={'machines': 2}"),
        ({"zzzz": 2}, "zzzz: got 2, expected a section: points, queries, space"),
        ({"engine": {"machine": 2}}, r"engine\.machine: got 2, .*did you mean engine\.machines"),
        ({"engine": {"zzzz": 2}}, r"engine\.zzzz: got 2, expected a known key"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_one(keywords, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**keywords)


def test_settings_cannot_be_changed() -> None:
    config = RunConfig()
    with pytest.raises(FrozenInstanceError):
        config.engine = EngineSettings()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.engine.machines = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("points.path", Path("in/points"), "in/points"),
        ("points.speed", "60", 60.0),
        ("space.bounds", (0, 0, 1, 2), Rect(0.0, 0.0, 1.0, 2.0)),
        ("space.bounds", [0, 0, 1, 2], Rect(0.0, 0.0, 1.0, 2.0)),
        ("space.bounds", Rect(0.0, 0.0, 1.0, 2.0), Rect(0.0, 0.0, 1.0, 2.0)),
        ("space.grid", (20, 10), (20, 10)),
        ("space.grid", [20, 10], (20, 10)),
        ("engine.strategy", Strategy.SWARM, Strategy.SWARM),
        ("engine.machines", np.int64(3), 3),
        ("balance.round", np.float64(3), 3.0),
        ("out.dir", Path("results"), Path("results")),
        ("engine.machines", None, None),
    ],
)
def test_values_are_accepted_as_a_person_writes_them(key: str, value: Any, expected: Any) -> None:
    config = RunConfig(**sections({key: value}))
    assert attrgetter(key)(config) == expected
    assert type(attrgetter(key)(config)) is type(expected)


@pytest.mark.parametrize("key", ["points.time", "engine.batch_rows", "out.dir", "out.sink"])
def test_a_setting_with_a_default_cannot_be_none(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: got None"):
        RunConfig(**sections({key: None}))


def test_lengths_of_time_are_in_seconds_and_lateness_is_the_length() -> None:
    config = with_settings(RunConfig(), {"window.kind": "time", "window.length": 1.5})
    assert window_spec(config.window, 1_000_000) == WindowSpec(
        WindowKind.TIME, 1_500_000, lateness=1_500_000
    )
    config = with_settings(config, {"window.lateness": 0, "window.tumbling": True})
    assert window_spec(config.window, 1) == WindowSpec(WindowKind.TIME, 2, tumbling=True)
    counted = with_settings(RunConfig(), {"window.kind": "count", "window.length": 7})
    assert window_spec(counted.window, 1_000_000) == WindowSpec(WindowKind.COUNT, 7)


def test_speed_may_be_unbounded() -> None:
    paced = with_settings(RunConfig(), {"points.speed": 3})
    assert paced.points.speed == 3.0
    assert with_settings(paced, {"points.speed": "max"}).points.speed is None


def test_the_state_directory_is_in_the_output_by_default() -> None:
    assert RunConfig(out={"dir": "o"}).out.state_dir == Path("o") / "state"
    assert RunConfig(out={"dir": "o", "state": "s"}).out.state_dir == Path("s")


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
        points={"path": "points.parquet", "attributes": {"fare": "double", "base": "string"}},
        space={"bounds": Rect(-74.5, 40.0, -73.0, 41.0), "grid": (20, 10)},
        engine={
            "strategy": Strategy.UNIFORM,
            "machines": 3,
            "spark": {"spark.ui.enabled": "false"},
        },
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
    assert takes in caught.value.expected
