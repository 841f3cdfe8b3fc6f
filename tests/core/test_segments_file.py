"""Segment files: what was written is what is mapped, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from properties import examples
from roost.errors import StateError
from roost.storage.files import ALIGN, MAGIC, map_arrays, write_arrays

dtypes = st.sampled_from(["<f8", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "|u1", "|b1"])
shapes = arrays_of.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=7)
named_arrays = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=8),
    dtypes.flatmap(lambda dtype: arrays_of.arrays(dtype, shapes)),
    max_size=6,
)


@given(named_arrays)
@settings(examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_come_back_as_they_were(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    path = tmp_path / "a.seg"
    size = write_arrays(path, arrays)
    assert path.stat().st_size == size
    mapped = map_arrays(path)
    assert list(mapped) == list(arrays)
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype
        assert mapped[name].shape == array.shape
        assert mapped[name].tobytes() == array.tobytes()


def test_arrays_that_are_not_contiguous_are_written_in_order(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float64).reshape(4, 6)
    write_arrays(tmp_path / "a.seg", {"part": whole[::2, 1::2], "turned": whole.T})
    mapped = map_arrays(tmp_path / "a.seg")
    assert mapped["part"].tolist() == [[1, 3, 5], [13, 15, 17]]
    assert mapped["turned"].tolist() == whole.T.tolist()


def test_arrays_are_aligned_and_read_only(tmp_path: Path) -> None:
    arrays = {"a": np.ones(3, np.int8), "b": np.arange(5.0), "c": np.arange(7, dtype=np.int32)}
    write_arrays(tmp_path / "a.seg", arrays)
    for array in map_arrays(tmp_path / "a.seg").values():
        assert array.ctypes.data % ALIGN == 0
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_another_process_maps_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.seg"
    write_arrays(path, {"values": np.arange(1000) ** 2})
    code = (
        "import sys; from pathlib import Path; from roost.storage.files import map_arrays;"
        "print(map_arrays(Path(sys.argv[1]))['values'].sum())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=env, check=True
    )
    assert int(done.stdout) == sum(n**2 for n in range(1000))


def test_a_mapped_file_outlives_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.seg"
    write_arrays(path, {"values": np.arange(10)})
    mapped = map_arrays(path)
    path.unlink()
    assert mapped["values"].tolist() == list(range(10))


def test_a_name_that_exists_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.seg"
    write_arrays(path, {"values": np.arange(3)})

    def no_room(descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="no space left"):
        write_arrays(path, {"values": np.arange(99)})
    assert map_arrays(path)["values"].tolist() == [0, 1, 2]
    with pytest.raises(OSError, match="no space left"):
        write_arrays(tmp_path / "b.seg", {"values": np.arange(99)})
    assert [p.name for p in tmp_path.glob("*.seg")] == ["a.seg"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="no file"),
        pytest.param(b"", id="empty"),
        pytest.param(b"PAR1" + bytes(100), id="another format"),
        pytest.param(MAGIC[:4], id="cut off"),
    ],
)
def test_what_is_no_segment_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.seg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StateError, match=r"a\.seg"):
        map_arrays(path)
