"""An operator moves between two resource profiles of a cluster by measured load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flow_runs import rows_of
from rankings import expected_rankings
from roost.bench.dodo_cluster import OTHER, tweets
from roost.engine.standalone import Host, StandaloneCluster

pytestmark = pytest.mark.spark

DEADLINE_S = 400


def drive(folder: Path, master: str, cores: int) -> str:
    """Return the last line that a driver prints."""
    driver = Path(__file__).with_name("placement_driver.py")
    command = [sys.executable, str(driver), str(folder), master, str(cores)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.full
def test_a_group_that_no_worker_can_provide_is_refused(tmp_path: Path) -> None:
    with StandaloneCluster([Host(1, 600)] * 2, tmp_path / "cluster") as cluster:
        refused = drive(tmp_path / "refused", cluster.url, cores=4)
    assert "elastic.groups" in refused and OTHER in refused


def test_an_operator_moves_and_its_executor_dies(tmp_path: Path) -> None:
    """``algorithm_1`` decides; the results are those of the interpreter, each once."""
    with StandaloneCluster([Host(1, 600)] * 2, tmp_path / "cluster") as cluster:
        found = json.loads(drive(tmp_path / "run", cluster.url, cores=1))
    assert (found["operator"], found["before"], found["after"]) == ("rank", "default", OTHER)
    assert found["loads"]["count"] > found["loads"]["rank"] > 0.0
    assert found["state_bytes"] > 0 and 0.0 < found["seconds_to_first_batch"] < DEADLINE_S
    names = [name for (name,) in found["ran"]]
    first, second = found["killed"]
    # The executor was replaced. Then its worker died, too, and the default group took over.
    assert len({first, second, found["local"]}) == 3
    assert names[0] == first and second in names and names[-3:] == [found["local"]] * 3
    files = (tmp_path / "run" / "out" / "top_topics").glob("*.parquet")
    mine = Counter(repr(row) for file in files for row in rows_of(pq.ParquetFile(file).read()))
    theirs = Counter(map(repr, expected_rankings(tweets(), found["rows"])))
    assert mine == theirs and theirs
