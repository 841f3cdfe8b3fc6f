"""Streaming DataFrames as sources of a run: each of their micro-batches is read by one batch.

Spark starts a micro-batch when its stream has rows. Between micro-batches, a thread reads the other
sources of the run, and closes the windows that an idle source held back.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from roost.engine.executor import FrameInputs
from roost.runtime.feed import Feed

POLL_S = 0.1
WAIT_S = 1
Start = Callable[[Callable[[DataFrame, int], None]], StreamingQuery]
"""Starts a query that calls a function for every micro-batch."""


def unread(progress: str) -> int:
    """Return how far the end of a micro-batch is behind the newest offsets of its topics.

    Offsets of other sources than Kafka do not count rows.
    """
    rows = 0
    for source in json.loads(progress)["sources"]:
        newest, end = source.get("latestOffset"), source.get("endOffset")
        if not isinstance(newest, dict) or not isinstance(end, dict):
            continue
        for topic, offsets in newest.items():
            if isinstance(offsets, dict):
                read = end.get(topic, {})
                rows += sum(max(last - read.get(part, 0), 0) for part, last in offsets.items())
    return rows


class StoppedError(Exception):
    """Rejects a micro-batch that Spark starts after the pipeline was stopped."""


class Streams:
    """The streams of a run, which share its batches.

    ``available_now`` ends the run with what is there now; ``idle``, whether sources become idle.
    """

    def __init__(
        self, feed: Feed, stopping: Callable[[], bool], *, available_now: bool, idle: bool
    ) -> None:
        self.feed = feed
        self.queries: dict[str, StreamingQuery] = {}
        self._stopping = stopping
        self._available_now = available_now
        self._busy = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if feed.sources or idle:
            self._thread = threading.Thread(target=self._between, name="roost-sources", daemon=True)

    def add(self, stage: str, start: Start) -> StreamingQuery:
        """Start the query whose micro-batches a stage reads."""
        query = self.queries[stage] = start(partial(self._each, stage))
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()
        return query

    def waiting(self) -> int:
        """Return the messages that topics had beyond the last micro-batch that Spark finished.

        Spark finishes a micro-batch after its callback, so this is known with a delay of one.
        """
        found = [query._jsq.lastProgress() for query in list(self.queries.values())]
        return sum(unread(progress.json()) for progress in found if progress is not None)

    def _each(self, stage: str, frame: DataFrame, number: int) -> None:
        while True:
            with self._busy:
                if self._ends():
                    raise StoppedError  # after a return, Spark would record the batch as done
                if self.feed.awaited in (None, stage):
                    self._run(partial(self.feed.read_stream, stage, number, _with(frame, stage)))
                    return
            time.sleep(POLL_S)

    def _between(self) -> None:
        """Run batches without a stream while there are streams, or rows to read now."""
        try:
            while self._step():
                pass
        except BaseException as error:
            self._failure = self._failure or error  # wait() raises it
            for query in self.queries.values():
                query.stop()

    def _step(self) -> bool:
        """Run a batch if there is anything to do; returns whether to go on."""
        active = any(query.isActive for query in list(self.queries.values()))
        with self._busy:
            if self._ends() or not (active or self._available_now):
                return False
            if self._run(self.feed.step):
                return True
            # Looks for new files, too.
            over = self.feed.exhausted or self.feed.awaited is not None
        time.sleep(POLL_S)
        return active or not over

    def _run(self, call: Callable[[], bool | None]) -> bool:
        """Run a batch; a failure ends the run."""
        try:
            return bool(call())
        except BaseException as error:
            self._failure = error
            raise

    def _ends(self) -> bool:
        return self._closed or self._failure is not None or self._stopping()

    def wait(self) -> None:
        """Wait until all streams have ended, and the other sources too, or the run is stopped.

        Raises what ended a batch, or else what ended a stream; SourceError if the last run began a
        batch with a micro-batch of a stream that was not started.
        """
        awaited = self.feed.awaited
        if awaited is not None and awaited not in self.queries:
            self._failure = self.feed.unstarted(awaited)
        try:
            while not self._ends():
                if all([query.awaitTermination(WAIT_S) for query in self.queries.values()]):
                    break
            self.join()
        except StreamingQueryException:
            if self._failure is None and not self._stopping():
                raise
        finally:
            self._closed = True
            with self._busy:
                pass  # wait for the current batch
            self.join()
            for query in self.queries.values():
                query.stop()
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """Wait for the thread of the other sources, which ends with the run."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()


def _with(frame: DataFrame, stage: str) -> partial[FrameInputs]:
    """Return what adds the rows of a micro-batch to the inputs of a batch."""
    return partial(FrameInputs, frame, stage)
