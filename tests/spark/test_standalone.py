"""A standalone cluster starts, runs tasks on each host, and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.full]

DRIVER = """
import os, sys
from pathlib import Path
from roost.engine.session import make_session
from roost.engine.standalone import Host, StandaloneCluster

hosts = [Host(1, 600, ("env", f"ROOST_HOST={k}")) for k in range(2)]
settings = {"spark.executor.memory": "480m", "spark.cores.max": "2", "spark.executor.cores": "1"}
with StandaloneCluster(hosts, Path(sys.argv[1])) as cluster:
    assert cluster.workers() == 2
    spark = make_session(cluster.url, settings)
    numbers = spark.sparkContext.parallelize(range(8), 8)
    found = numbers.map(lambda n: (n, os.environ["ROOST_HOST"])).collect()
    spark.stop()
print(sorted({host for _, host in found}), sum(n for n, _ in found))
"""


def test_tasks_run_on_every_host(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "cluster")],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "['0', '1'] 28"
    mine = str(tmp_path)
    left = [p for p in psutil.process_iter(["environ"]) if mine in str(p.info["environ"] or "")]
    assert not left
