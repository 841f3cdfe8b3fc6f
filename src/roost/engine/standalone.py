"""A standalone Spark cluster on the loopback address: a master, and a worker for each host.

A host is a command prefix: words that start the worker in surroundings of their own, for example in
a memory cgroup. Without one, hosts differ only in their processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from roost.engine.session import check_java
from roost.errors import RoostError

ADDRESS = "127.0.0.1"
DEADLINE_S = 60.0
POLL_S = 0.1
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"


@dataclass(frozen=True)
class Host:
    """What a worker offers, and the words before its command."""

    cores: int
    memory_mb: int
    prefix: tuple[str, ...] = ()


class StandaloneCluster:
    """Starts and stops the processes of a cluster; logs and work directories are in ``folder``."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self._hosts = hosts
        self.folder = folder
        self._port, self._web_port = _free_port(), _free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Address for ``engine.master``."""
        return f"spark://{ADDRESS}:{self._port}"

    def __enter__(self) -> Self:
        """Start the cluster; returns when all workers have registered."""
        check_java()
        self.folder.mkdir(parents=True, exist_ok=True)
        ports = ("--port", str(self._port), "--webui-port", str(self._web_port))
        try:
            self._start("master", MASTER, "--host", ADDRESS, *ports)
            self._wait_for_workers(0)
            for number in range(len(self._hosts)):
                self.start_worker(number)
            self._wait_for_workers(len(self._hosts))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all processes."""
        self._stop()

    def start_worker(self, number: int) -> None:
        """Start the worker of a host."""
        host = self._hosts[number]
        offer = ("--cores", str(host.cores), "--memory", f"{host.memory_mb}m")
        web = ("--webui-port", "0")
        name = f"worker-{number}"
        self._start(name, WORKER, "--host", ADDRESS, *offer, *web, self.url, prefix=host.prefix)

    def workers(self) -> int:
        """Return the number of registered workers, or -1 if the master does not respond."""
        try:
            with urllib.request.urlopen(f"http://{ADDRESS}:{self._web_port}/json/") as response:
                return int(json.load(response)["aliveworkers"])
        except (OSError, ValueError):  # the page is empty while the master starts
            return -1

    def _wait_for_workers(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.workers() < count:
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RoostError(f"the cluster did not start; its logs are in {self.folder}")
            time.sleep(POLL_S)

    def _start(self, name: str, class_name: str, *words: str, prefix: Sequence[str] = ()) -> None:
        home = Path(pyspark.__file__).parent
        environ = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": ADDRESS,
            "SPARK_WORKER_DIR": str(self.folder / name),
            "SPARK_DAEMON_MEMORY": "256m",
        }
        command = [*prefix, str(home / "bin" / "spark-class"), class_name, *words]
        with (self.folder / f"{name}.log").open("wb") as log:
            started = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(started)

    def _stop(self) -> None:
        """Stop workers before the master; a worker that is stopped ends its executors."""
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes.clear()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((ADDRESS, 0))
        return int(found.getsockname()[1])
