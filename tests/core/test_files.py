"""Files of points: any format, put in event order, with no row lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from roost.errors import ConfigError, SourceError
from roost.model.schemas import TIMESTAMP
from roost.stages.decode import MALFORMED, ROW
from roost.stages.json_lines import read_json_lines
from roost.stages.point_files import (
    PointFile,
    arrange,
    event_times,
    file_format,
    find_files,
    read_csv,
    read_requests,
    read_table,
    stored_times,
)


def points(times: list[int | None], start: int = 0) -> pa.Table:
    return pa.table(
        {
            "event_time": pa.array(times, TIMESTAMP),
            "x": [float(start + k) for k in range(len(times))],
            "y": [0.0] * len(times),
        }
    )


def write(path: Path, times: list[int | None], start: int = 0) -> Path:
    pq.write_table(points(times, start), path)
    return path


def replayed(files: list[PointFile]) -> list[tuple[int | None, float, int]]:
    """Return time, x and number of every row, in replay order."""
    rows = []
    for file in files:
        table = pq.read_table(file.path)
        assert table.num_rows == file.rows
        numbers = np.arange(file.first, file.first + file.rows)
        if ROW in table.column_names:
            numbers = table[ROW].to_numpy()
        times = table["event_time"].cast(pa.int64()).to_pylist()
        rows += zip(times, table["x"].to_pylist(), numbers.tolist(), strict=True)
    return rows


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", "parquet"), ("a.PQ", "parquet"), ("a.csv", "csv"),
        ("a.json", "jsonl"), ("a.jsonl", "jsonl"), ("a.ndjson", "jsonl"),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_suffix_or_as_configured(name: str, kind: str) -> None:
    assert file_format(Path(name), "auto") == kind
    assert file_format(Path(name), "csv") == "csv"


def test_an_unknown_suffix_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SourceError, match=r"a\.xlsx.*\.parquet.*points\.format"):
        file_format(Path("a.xlsx"), "auto")


def test_a_folder_gives_its_data_files_in_name_order(tmp_path: Path) -> None:
    for name in ("b.csv", "a.parquet", "_SUCCESS", ".a.crc", "notes.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub.parquet").mkdir()
    assert [p.name for p in find_files(str(tmp_path), "auto")] == ["a.parquet", "b.csv"]
    named = [p.name for p in find_files(str(tmp_path), "csv")]
    assert named == ["a.parquet", "b.csv", "notes.txt"], "a configured format applies to every file"
    assert find_files(str(tmp_path / "b.csv"), "auto") == [tmp_path / "b.csv"]
    with pytest.raises(SourceError, match="no such file or folder"):
        find_files(str(tmp_path / "missing"), "auto")


def test_csv_lines_with_another_number_of_fields_are_kept_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        'event_time,x,y,note\n2024-05-01T12:00:00,1.5,2,"a,b"\nbroken,1\n,,,\n1,2,3,4,5\n'
    )
    table = read_csv(path)
    good = [row for row in table.to_pylist() if row[MALFORMED] is None]
    assert [row["note"] for row in good] == ["a,b", None]
    assert good[1]["x"] is None
    bad = sorted(row[MALFORMED] for row in table.to_pylist() if row[MALFORMED] is not None)
    assert bad == ["1,2,3,4,5", "broken,1"]


def test_csv_with_one_wrong_value_keeps_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"2024-05-01T12:00:00,{k}.5,2.5" for k in range(60_000)]
    path.write_text("event_time,x,y\n" + "\n".join([*rows, "2024-05-01T12:00:00,east,2.5", ""]))
    table = read_csv(path)
    assert path.stat().st_size > 1 << 20, "more than the block that types are guessed from"
    assert table.num_rows == 60_001
    assert table["x"].to_pylist()[-2:] == ["59999.5", "east"]


def test_an_unreadable_file_is_named_in_the_error(tmp_path: Path) -> None:
    for name, content in (("a.csv", b""), ("a.parquet", b"PAR1 but not really")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceError, match=name.replace(".", r"\.")):
            read_table(tmp_path / name, "auto")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
objects = st.dictionaries(st.sampled_from(["id", "x", "y", "event_time"]), json_values, min_size=1)
broken = st.sampled_from(
    [
        b"oops", b'{"x": 1', b"[1, 2]", b"7", b"null", b'"text"', b"\xff\xfe", b'{"x": 1}}',
        b'{"x": 1} {"x": 2}', b'{"x": "\\ud800"}', b'{"\\udfff": 1}', b"[" * 50_000, b"{'x': 1}",
        b'{"x":' * 30_000,
    ]
)  # fmt: skip


@given(st.lists(objects.map(lambda o: json.dumps(o).encode()) | broken, max_size=8))
@examples(80)
def test_every_json_line_is_a_record_or_kept_as_text(lines: list[bytes]) -> None:
    def is_record(line: bytes) -> bool:
        try:
            value = json.loads(line)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict)

    table = read_json_lines(lines)
    assert table.num_rows == len(lines)
    unread = [] if MALFORMED not in table.column_names else table[MALFORMED].to_pylist()
    kept = sorted(text for text in unread if text is not None)
    expected = [line.decode("utf-8", "replace") for line in lines if not is_record(line)]
    assert kept == sorted(expected)


@pytest.mark.parametrize("others", [[], [b'{"x": 1}'], [b"oops"], [b'{"x": 1}', b"oops"]])
def test_records_without_fields_are_rows(others: list[bytes]) -> None:
    assert read_json_lines([b"{}", *others, b"{}"]).num_rows == 2 + len(others)


def test_json_records_keep_their_fields_whatever_their_types() -> None:
    lines = [b'{"id": 1, "x": 1.5}', b'{"id": "b", "x": "east", "extra": {"a": [1]}}', b"", b"  "]
    table = read_json_lines(lines)
    assert table["id"].to_pylist() == ["1", "b"]
    assert table["x"].to_pylist() == ["1.5", "east"]
    assert table["extra"].to_pylist() == [None, {"a": [1]}]


def test_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\r\n{"x": 2}\r\n')
    table = read_table(path, "auto")
    assert table["x"].to_pylist() == [1, 2]
    assert MALFORMED not in table.column_names


def test_requests_come_in_the_order_of_their_sequence(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = ['{"seq": 10, "op": "c"}', '{"seq": "2", "op": "b"}', "broken", '{"seq": 1, "op": "a"}']
    path.write_text("\n".join(lines))
    table = read_requests(path)
    assert table["op"].to_pylist() == ["a", "b", "c", None]
    assert table["malformed"].to_pylist() == [None, None, None, "broken"]


def test_requests_without_a_sequence_stay_in_their_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"op": ["b", "a"]}), tmp_path / "requests.parquet")
    assert read_requests(tmp_path / "requests.parquet")["op"].to_pylist() == ["b", "a"]


def test_event_times_of_every_kind_of_column() -> None:
    for column in (
        pa.array([5, None], pa.int64()),
        pa.array([5, None], TIMESTAMP),
        pa.array(["1970-01-01T00:00:00.000005Z", "yesterday"]),
    ):
        values, there = event_times(pa.table({"t": column}), "t")
        assert values[0] == 5
        assert there.tolist() == [True, False]
    values, there = event_times(pa.table({"x": [1, 2]}), "t")
    assert there.tolist() == [False, False]


def test_a_time_column_that_holds_no_times_is_refused_by_key() -> None:
    with pytest.raises(ConfigError) as caught:
        event_times(pa.table({"t": [1.5]}), "t")
    assert (caught.value.key, caught.value.got) == ("points.time", "double")


def test_stored_times(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [3, None, 9])
    values, there = stored_times(str(path), "event_time")
    assert values[there].tolist() == [3, 9]
    assert not stored_times(str(path), "missing")[1].any()


def test_a_file_in_order_is_replayed_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [1, 2, 2, None, 5])
    staged = tmp_path / "staged.parquet"
    assert arrange([path], "auto", "event_time", 100, staged) == [PointFile(str(path), 5, 100)]
    assert not staged.exists()


def test_files_that_follow_each_other_are_put_in_order_and_keep_their_numbers(tmp_path) -> None:
    late = write(tmp_path / "a.parquet", [10, 20])
    early = write(tmp_path / "b.parquet", [1, 10])
    files = arrange([late, early], "auto", "event_time", 0, tmp_path / "staged.parquet")
    assert files == [PointFile(str(early), 2, 2), PointFile(str(late), 2, 0)]


@given(
    st.lists(st.lists(st.none() | st.integers(-5, 30), max_size=6), min_size=1, max_size=4),
    st.integers(0, 50),
    st.booleans(),
)
@examples(80)
def test_any_files_are_replayed_in_event_order_with_nothing_lost(
    tmp_path_factory, parts, first: int, in_order: bool
) -> None:
    folder = tmp_path_factory.mktemp("points")
    if in_order:
        parts = [sorted(part, key=lambda t: -99 if t is None else t) for part in parts]
    expected, paths, at = [], [], 0
    for number, part in enumerate(parts):
        paths.append(write(folder / f"{number}.parquet", part, at))
        expected += [(time, float(at + k), first + at + k) for k, time in enumerate(part)]
        at += len(part)
    files = arrange(paths, "auto", "event_time", first, folder / "staged" / "points.parquet")
    rows = replayed(files)
    times = [time for time, _, _ in rows if time is not None]
    assert times == sorted(times)
    assert sorted(rows, key=lambda row: row[2]) == expected


def test_csv_and_json_are_joined_in_one_order(tmp_path: Path) -> None:
    csv, lines = tmp_path / "a.csv", tmp_path / "b.jsonl"
    csv.write_text("event_time,x\n2024-05-01T00:00:02,1\n2024-05-01T00:00:00,2\n")
    lines.write_text('{"event_time": "2024-05-01T00:00:01", "x": 3}\nbroken\n')
    staged = tmp_path / "deep" / "staged.parquet"
    (file,) = arrange([csv, lines], "auto", "event_time", 7, staged)
    assert (file.path, file.rows) == (str(staged), 4)
    table = pq.read_table(staged)
    assert table["x"].to_pylist() == [2, 3, 1, None]
    assert table[ROW].to_pylist() == [8, 9, 7, 10]
    assert table[MALFORMED].to_pylist() == [None, None, None, "broken"]
    assert [p.name for p in staged.parent.iterdir()] == ["staged.parquet"]


def test_a_bad_file_of_a_folder_does_not_change_the_others(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_text('{"event_time": "2024-05-01T00:00:01", "x": 1.5, "id": 7}\n')
    bad.write_text('{"event_time": "2024-05-01T00:00:00Z", "x": "east", "id": "b"}\nbroken\n')
    (file,) = arrange([good, bad], "auto", "event_time", 0, tmp_path / "staged.parquet")
    table = pq.read_table(file.path)
    values, there = event_times(table, "event_time")
    assert np.diff(values[there]).tolist() == [1_000_000]
    assert table["x"].to_pylist() == ["east", "1.5", None]
    assert table["id"].to_pylist() == ["b", "7", None]
    assert table[ROW].to_pylist() == [1, 0, 2]


def test_files_with_columns_of_different_types_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"event_time": [1], "x": [{"a": 1}]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"event_time": [0], "x": ["text"]}), tmp_path / "b.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with pytest.raises(SourceError, match="columns of different types"):
        arrange(paths, "auto", "event_time", 0, tmp_path / "staged.parquet")
