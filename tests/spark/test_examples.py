"""Every example and every code block of the README runs and prints the expected output."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import shapely

from roost.cli import main as roost
from roost.model.records import Circle
from roost.stages.generators import PointGenerator, load_places
from roost.stages.sources import parse_generator
from roost.testing.oracle import haversine

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated(rows: int, rate: float, seed: int) -> Any:
    """Return the rows of ``generate:rows=…,rate=…,seed=…``; event time is row / rate seconds."""
    return PointGenerator(load_places(), rate, 0, seed, spread_deg=0.1).block(0, rows)


def inside(circle: Circle, table: Any) -> np.ndarray:
    lon, lat = table["lon"].to_numpy(), table["lat"].to_numpy()
    near = np.abs(lat - circle.cy) < 1.0  # 50 km are less than half a degree of latitude
    hits = np.zeros(len(lon), bool)
    for row in np.flatnonzero(near):
        distance = haversine(circle.cx, circle.cy, lon[row], lat[row])
        hits[row] = distance <= circle.radius
    return hits


def check_quick_start(example: Any, spark: Any, out: Path) -> None:
    counts = example.main(out, spark)
    points = pq.read_table(ROOT / "src" / "roost" / "data" / "sample_points.parquet")
    lon, lat = points["lon"].to_numpy(), points["lat"].to_numpy()
    base = np.array(points["base"].to_pylist())
    midtown, _, park, one_base = (query.shape for query in example.QUERIES)
    box = (lon >= midtown.x0) & (lon <= midtown.x1) & (lat >= midtown.y0) & (lat <= midtown.y1)
    assert one_base == midtown
    expected = {
        "midtown": box.sum(),
        "one base in midtown": (box & (base == "B02617")).sum(),
        "around the park": shapely.intersects_xy(shapely.from_wkt(park.text), lon, lat).sum(),
        "jfk": inside(example.QUERIES[1].shape, points).sum(),
    }
    assert counts == Counter({name: int(count) for name, count in expected.items()})
    assert min(counts.values()) > 0
    assert example.main(out, spark) == counts


def check_register_while_running(example: Any, spark: Any, out: Path) -> None:
    batches = example.main(out, spark)
    assert batches == {"tokyo": [0, 1], "delhi": [1, 2, 3], "tokyo, from second 12 on": [2, 3]}
    points = generated(200_000, 10_000.0, 7)
    late = np.arange(200_000) >= 120_000
    matches = pq.read_table(out / "matches")
    mine = pc.equal(matches["query_id"], "tokyo, from second 12 on")
    found = sorted(matches.filter(mine)["point_id"].to_pylist())
    hits = inside(example.TOKYO, points) & late
    assert found == points.filter(hits)["id"].to_pylist()


def check_streaming_dataframe(example: Any, spark: Any, out: Path) -> None:
    count = example.main(out, spark)
    points = pq.read_table(out / "points")
    x, y = points["x"].to_numpy(), points["y"].to_numpy()
    yard = (x >= 10) & (x <= 20) & (y >= 10) & (y <= 20)
    fast = (y >= 40) & (y <= 60) & (points["speed_kmh"].to_numpy() > 120)
    assert points.num_rows == example.FILES * example.ROWS
    assert count == yard.sum() + fast.sum() > 0
    assert pq.read_table(out / "matches").num_rows == count


def check_callback_sink(example: Any, spark: Any, out: Path) -> None:
    counts = example.main(out, spark)
    points = generated(200_000, 10_000.0, 7)
    large = points["value"].to_numpy() > 60
    expected = {
        name: int((inside(Circle(lon, lat, 50_000.0), points) & large).sum())
        for name, (lon, lat) in example.CITIES.items()
    }
    assert counts == Counter(expected)
    assert min(counts.values()) > 0


def check_recent_points(example: Any, spark: Any, out: Path) -> None:
    counts = example.main(out, spark)
    points = generated(200_000, 10_000.0, 7)
    seconds = np.arange(200_000) / 10_000
    near, batch = inside(example.TOKYO, points), np.arange(200_000) // 50_000

    def held(number: int) -> np.ndarray:
        newest = seconds[batch == number].max()
        there: np.ndarray = near & (batch <= number) & (seconds > newest - 10)
        return there

    windows = {number: int(held(number).sum()) for number in range(4)}
    later = {number: int((held(number) & (batch >= 2)).sum()) for number in (2, 3)}
    assert counts == {"snapshot": windows, "from the start": windows, "from batch 2 on": later}
    assert windows[3] == later[3] > later[2] > 0
    nearest = pq.read_table(out / "nearest").to_pylist()
    assert [row["rank"] for row in nearest] == [1, 2, 3] * 4


def run_again(example: Any, spark: Any, out: Path) -> int:
    """Run an example of a dataflow twice: its calls are finite, so the second run adds nothing."""
    count: int = example.main(out, spark)
    assert example.main(out, spark) == count > 0
    return count


def rows_of(path: str) -> Any:
    """Return the rows of a finite generator."""
    source = parse_generator(path, lambda: 0.0)
    rows = source.total()
    assert rows is not None
    return source.again(0, rows)[0].generator.block(0, rows)


def check_top_topics(example: Any, spark: Any, out: Path) -> None:
    assert run_again(example, spark, out) == 6
    texts = rows_of(example.TWEETS)["text"].to_pylist()
    counts = Counter(tag.removeprefix("#") for text in texts for tag in text.split())
    table = pq.read_table(out / "top_topics")
    last = table.filter(pc.equal(table["at"], pc.max(table["at"]))).sort_by("rank")
    found = list(zip(last["topic"].to_pylist(), last["mentions"].to_pylist(), strict=True))
    assert found == sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10]


def check_recommendations(example: Any, spark: Any, out: Path) -> None:
    count = run_again(example, spark, out)
    liked: dict[int, set[int]] = {}
    for row in rows_of(example.RATINGS).to_pylist():
        if row["rating"] > example.FAN_ABOVE:
            liked.setdefault(row["user"], set()).add(row["item"])
    lists = example.latest(pq.read_table(out / "recommendations"))
    assert len(lists) == count == len(set().union(*liked.values()))
    for item, others in lists.items():
        fans = Counter(other for items in liked.values() if item in items for other in items)
        del fans[item]
        assert others == sorted(fans.items(), key=lambda one: (-one[1], one[0]))[:10]


def starts_and_ends(path: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the calls of a path, and their starts and ends in microseconds."""
    calls = rows_of(path)
    start, end = (calls[name].cast("int64").to_numpy() for name in ("start", "end"))
    return calls, start, end


def window_counts(key: Any, start: np.ndarray, size: int, advance: int) -> Counter[Any]:
    """Count the tuples of each window and key; times in microseconds."""
    found: Counter[Any] = Counter()
    for value, time in zip(key.to_pylist(), start.tolist(), strict=True):
        for begin in range(time // advance * advance, time - size, -advance):
            found[begin, value] += 1
    return found


def check_heavy_customers(example: Any, spark: Any, out: Path) -> None:
    count = run_again(example, spark, out)
    calls, start, _ = starts_and_ends(example.CALLS)
    everyone = window_counts(calls["src"], start, 3_600_000_000, 60_000_000)
    heavy = pq.read_table(out / "heavy")
    assert heavy.num_rows == count < len(everyone)
    assert min(heavy["mean"].to_pylist()) > example.THRESHOLD_S
    places = zip(heavy["start"].cast("int64").to_pylist(), heavy["src"].to_pylist(), strict=True)
    assert [everyone[place] for place in places] == heavy["calls"].to_pylist()


def check_calls_by_district(example: Any, spark: Any, out: Path) -> None:
    run_again(example, spark, out)
    calls, start, _ = starts_and_ends(example.CALLS)
    expected = window_counts(calls["district"], start, 60_000_000, 10_000_000)
    table = pq.read_table(out / "districts")
    times = table["start"].cast("int64").to_pylist()
    places = zip(times, table["district"].to_pylist(), strict=True)
    assert dict(zip(places, table["calls"].to_pylist(), strict=True)) == expected


def check_two_calls(example: Any, spark: Any, out: Path) -> None:
    count = run_again(example, spark, out)
    calls, start, _ = starts_and_ends(example.CALLS)
    by_caller: dict[str, list[int]] = {}
    for caller, time in zip(calls["src"].to_pylist(), start.tolist(), strict=True):
        by_caller.setdefault(caller, []).append(time)
    near = (
        sum(abs(a - b) <= 60_000_000 for k, a in enumerate(times) for b in times[:k])
        for times in by_caller.values()
    )
    assert count == sum(near)


def check_overlapping_calls(example: Any, spark: Any, out: Path) -> None:
    count = run_again(example, spark, out)
    calls, start, end = starts_and_ends(example.CALLS)
    src, dst = (np.array(calls[name].to_pylist()) for name in ("src", "dst"))
    expected = 0
    for row in range(len(start)):
        common = (src == src[row]) | (src == dst[row]) | (dst == src[row]) | (dst == dst[row])
        expected += int((common & (start > start[row]) & (start < end[row])).sum())
    assert count == expected


def check_busiest_geofences(example: Any, spark: Any, out: Path) -> None:
    hours = run_again(example, spark, out)
    points = pq.read_table(ROOT / "src" / "roost" / "data" / "sample_points.parquet")
    lon, lat = points["lon"].to_numpy(), points["lat"].to_numpy()
    hour = points["event_time"].cast("int64").to_numpy() // 3_600_000_000
    greatest: Counter[int] = Counter()
    for box in (query.shape for query in example.GEOFENCES):
        inside = (lon >= box.x0) & (lon <= box.x1) & (lat >= box.y0) & (lat <= box.y1)
        counted = zip(*np.unique(hour[inside], return_counts=True), strict=True)
        for number, matches in counted:
            greatest[int(number)] = max(greatest[int(number)], int(matches))
    ranked = pq.read_table(out / "busiest_geofences")
    first = ranked.filter(pc.equal(ranked["rank"], 1))
    times = (t // 3_600_000_000 for t in first["event_time"].cast("int64").to_pylist())
    assert dict(zip(times, first["matches"].to_pylist(), strict=True)) == greatest
    assert len(greatest) == hours


def check_synthetic_forest(example: Any, spark: Any, out: Path) -> None:
    errors = example.main(out, spark)
    train, synthetic = (pq.read_table(out / f"{name}.parquet") for name in ("all", "synthetic"))
    assert synthetic.num_rows == round(example.SHARE * train.num_rows)
    assert synthetic.schema.names == train.schema.names
    # No forest is better than the noise; one that knew only the mean would be off by four degrees.
    spread = float(np.std(train["temp_c"].to_numpy()))
    assert example.NOISE_C < errors["all"] < errors["synthetic"] * 1.02 < 0.5 * spread
    assert errors["synthetic"] < 1.05 * errors["all"]


CHECKS: dict[str, Callable[[Any, Any, Path], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, spark: Any, tmp_path: Path) -> None:
    CHECKS[name](load(name), spark, tmp_path / "out")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no {language} block"
    return found


@pytest.fixture
def in_folder(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty working directory; Roost uses the active session."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_python(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(blocks("python"))
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    promised = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert promised
    assert capsys.readouterr().out.splitlines() == promised


def test_readme_commands(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    commands = [shlex.split(line, comments=True) for line in lines]
    for program, *arguments in filter(None, commands):
        if program == ".venv/bin/roost":
            assert roost(arguments) == 0, arguments
        else:
            assert (ROOT / program).is_file(), program
    matches = pq.read_table(in_folder / "demo" / "matches", columns=["query_id"])
    jfk = pc.equal(matches["query_id"], "jfk")
    points = pq.read_table(ROOT / "src" / "roost" / "data" / "sample_points.parquet")
    expected = inside(Circle(-73.7781, 40.6413, 1500.0), points).sum()
    assert matches.filter(jfk).num_rows == expected > 0
    assert (in_folder / "demo" / "report.json").is_file()
    shown = capsys.readouterr().out
    assert "registered jfk" in shown
    assert "replicated" in shown
