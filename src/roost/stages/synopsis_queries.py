"""Standing synopsis queries: their results are files of the batch, published with its commit.

They run on the driver, from the files that the batch lists. The facts of the commit say what each
query reported last, so a batch that runs twice reports once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.model.records import TIME_MIN
from roost.stages.contract import Batch, MapExecutor, Outcome, Reports, Stage, Staged
from roost.stages.synopsis import SynopsisStage
from roost.stages.writers import write_table
from roost.storage.files import Files
from roost.storage.store import Fact, View
from roost.synopsis.catalogue import TABLE, Catalogue
from roost.synopsis.reader import Loader
from roost.synopsis.standing import Memory, StandingQuery, result_table

REPORTED = "reported"  # key of what the queries reported last


@dataclass
class SynopsisQueryStage(Stage):
    """Evaluates the standing queries that are due after a batch."""

    name = "synopsis queries"
    kinds = ("synopsis",)

    queries: Sequence[StandingQuery]
    loader: Loader
    staging: Files
    _reported: Mapping[str, Memory] = field(default_factory=dict)  # by name

    def open(self, view: View) -> None:
        """Read what was reported last."""
        self._reported = view.get(TABLE, REPORTED) or {}

    def after(self, batch: Batch, reports: Reports, executor: MapExecutor) -> Outcome:
        """Evaluate the queries that may be due and write the results of those that are."""
        catalogue: Catalogue = batch.outcomes[SynopsisStage.name].result[0]
        now, found, reported = catalogue.now, [], {}
        for query in self.queries:
            memory = self._reported.get(query.name, {})
            items: Sequence[Any] = ()
            # Before the first point there is nothing to report.
            if now != TIME_MIN and query.may_be_due(now, memory):
                sketch = self.loader.load(catalogue, query.scopes(now))
                items, memory = query.evaluate(sketch, now, memory)
            reported[query.name] = memory
            if items:
                found.append((query, items))
        files = {}
        if found:
            table = result_table(batch.number, now, found)
            name = write_table(self.staging, batch.prefix, "results", table)
            files = {self.kinds[0]: [Staged(name)]}
        changed = reported != self._reported
        facts = [Fact(TABLE, REPORTED, reported)] if changed else []
        return Outcome(files=files, facts=facts, result=reported)

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        """Continue from what was reported."""
        self._reported = outcome.result

    def state(self) -> Any:
        """Return what was reported last."""
        return dict(self._reported)
