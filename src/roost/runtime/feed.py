"""Reads the sources of a run batch by batch; the intent of a batch names what it reads of each.

Offsets of Roost's own sources are rows. Those of a stream, whose rows Spark stores, are Spark's
micro-batches: a batch reads at most one micro-batch of one stream, and with it the next rows of
each source. So any number of streams and sources share one sequence of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roost.dataflow.operators import SourceKind
from roost.errors import SourceError, StateError
from roost.runtime.executor import Inputs, SliceInputs
from roost.runtime.loop import BatchLoop
from roost.runtime.records import Commit, Intent, commit_of, last_intent
from roost.stages.flow_routing import FLOW, node_of
from roost.stages.reading import ReadingStage
from roost.stages.slices import Slice
from roost.stages.sources import RowSource

STREAM = "stream "  # begins the names of streams in offsets


@dataclass
class Feed:
    """Runs the batches of a run, and continues after its last intent.

    ``sources`` are Roost's own and ``streams`` are Spark's, both by the stage that reads them. A
    batch reads at most ``limit`` rows of a source. If ``final``, a source that ends has ended for
    later runs, too. Callers use it from one thread at a time.
    """

    loop: BatchLoop
    sources: Mapping[str, RowSource]
    streams: Sequence[str]
    limit: int
    final: bool
    on_batch: Callable[[Commit], None]

    def __post_init__(self) -> None:
        """Find the next batch: the last one, if it was begun and not committed."""
        store = self.loop.store
        names = [*self.sources, *(STREAM + stage for stage in self.streams)]
        self._number, self._offsets = 0, dict.fromkeys(names, 0)
        self._retained: dict[str, list[int]] = {}  # offsets of what this run does not read
        self._ended = set((store.get(FLOW, "progress") or {}).get("ended", ()))
        self._unfinished: Intent | None = None
        last = last_intent(store)
        if last is None:
            return
        done = commit_of(store, last.batch_id) is not None
        for name, (start, stop) in _recorded(last).items():
            if name in self._offsets:
                continue
            if stop > start and not done:
                what = "micro-batches" if name.startswith(STREAM) else "rows"
                raise SourceError(
                    f"batch {last.batch_id} was begun with {what} {start} to {stop} of "
                    f"{_shown(name)}, which this run does not read: a run that does must end it"
                )
            self._retained[name] = [stop, stop]
        self._unfinished = None if done else last
        self._number = last.batch_id + done
        self._offsets = {name: _range(last, name)[done] for name in names}

    @property
    def awaited(self) -> str | None:
        """Stage of the stream whose micro-batch must be repeated before anything else is read."""
        last = self._unfinished
        if last is None:
            return None
        ranges = {stage: _range(last, STREAM + stage) for stage in self.streams}
        return next((stage for stage, (start, stop) in ranges.items() if stop > start), None)

    def unstarted(self, stage: str) -> SourceError:
        """Return the error that a stream which is awaited was not started."""
        return SourceError(
            f"batch {self._number} was begun with a micro-batch of {_shown(stage)}, whose stream "
            "was not started: a run must start it to end this batch"
        )

    @property
    def exhausted(self) -> bool:
        """Whether the sources have no more rows now."""
        return all(s.ended(self._offsets[k]) and not s.poll() for k, s in self.sources.items())

    def step(self) -> bool:
        """Run a batch without a stream, if there is anything to do; returns whether there was."""
        if self.awaited is not None:
            return False
        slices = self._slices()
        over = self._over(slices)
        due = any(slices.values()) or over or any(stage.due() for stage in self.loop.stages)
        if not due and self._unfinished is None:
            return False
        self._run({}, slices, over, lambda beside: beside)
        return True

    def read_stream(self, stage: str, number: int, inputs: Callable[[SliceInputs], Inputs]) -> None:
        """Run the batch of a micro-batch, unless it is committed: Spark repeats the last one.

        ``inputs`` adds the rows of the micro-batch to what the batch reads besides. Must not be
        called while a micro-batch of another stream is awaited.
        """
        assert self.awaited in (None, stage)
        expected = self._offsets[STREAM + stage]
        if number < expected:
            return
        if number > expected:
            raise StateError(
                f"Spark begins micro-batch {number} of {_shown(stage)} instead of {expected}: its "
                "checkpoint does not belong to the state directory"
            )
        if self._unfinished is not None and self.awaited is None:
            self.step()
        slices = self._slices()
        self._run({stage: number}, slices, self._over(slices), inputs)

    def _slices(self) -> dict[str, Sequence[Slice]]:
        """Return the next rows of each source, or those that an unfinished batch has read."""
        last = self._unfinished
        if last is None:
            return {k: s.take(self._offsets[k], self.limit) for k, s in self.sources.items()}
        slices: dict[str, Sequence[Slice]] = {}
        for stage, source in self.sources.items():
            start, stop = _range(last, stage)
            slices[stage] = source.again(start, stop) if stop > start else []
            found = sum(item.rows for item in slices[stage])
            if found != stop - start:
                raise SourceError(
                    f"batch {last.batch_id} read rows {start} to {stop}, but the points now have "
                    f"only {start + found}: were files removed?"
                )
        return slices

    def _stops(self, slices: Mapping[str, Sequence[Slice]]) -> dict[str, int]:
        return {k: self._offsets[k] + sum(item.rows for item in mine) for k, mine in slices.items()}

    def _over(self, slices: Mapping[str, Sequence[Slice]]) -> list[str]:
        """Return the sources of the dataflow that bring no more rows after a batch."""
        if self._unfinished is not None:
            return self._unfinished.ended
        if not self.final:
            return []
        stops = self._stops(slices)
        over = {k for k, s in self.sources.items() if not s.grows and s.ended(stops[k])}
        of_points = {k.value for k in SourceKind} if ReadingStage.name in over else set()
        names = {node_of(stage) for stage in over - {ReadingStage.name}} | of_points
        return sorted(names - self._ended)

    def _run(
        self,
        read: Mapping[str, int],
        slices: Mapping[str, Sequence[Slice]],
        over: Sequence[str],
        inputs: Callable[[SliceInputs], Inputs],
    ) -> None:
        """Run a batch; ``read`` has the micro-batch of a stream."""
        stops = {**self._offsets, **self._stops(slices)}
        stops |= {STREAM + stage: number + 1 for stage, number in read.items()}
        mine = {name: [self._offsets[name], stop] for name, stop in stops.items()}
        offsets = {**self._retained, **mine}
        beside = {**{stage: [] for stage in self.streams if stage not in read}, **slices}
        commit = self.loop.run(self._number, offsets, inputs(SliceInputs(beside)), over)
        self._unfinished = None
        self._number += 1
        self._offsets = stops
        self._ended.update(over)
        self.on_batch(commit)


def _recorded(intent: Intent) -> dict[str, tuple[int, int]]:
    """Return start and stop of all that an intent names."""
    names = list(intent.offsets) or [STREAM + ReadingStage.name]
    if "start" in intent.offsets:
        names = [ReadingStage.name]  # of version 0.1
    return {name: _range(intent, name) for name in names}


def _shown(name: str) -> str:
    """Return the name of a source for messages."""
    stage = name.removeprefix(STREAM)
    return "points" if stage == ReadingStage.name else node_of(stage)


def _range(intent: Intent, name: str) -> tuple[int, int]:
    """Return start and stop of what a batch reads of a source or stream."""
    if name.startswith(STREAM) and not intent.offsets:
        # Version 0.1 ran one batch for each micro-batch of its only stream, with its number.
        return intent.batch_id, intent.batch_id + 1
    return intent.rows_of(name)
