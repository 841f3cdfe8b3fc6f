"""Pipelines in a separate process, which has the connector's jars and may be killed.

Reads runs from standard input, each a line of JSON: settings, and steps to pause before. Prints
each pause and each report in a line that begins with ``@``; another line ends a pause. Reports have
the messages that were ``waiting`` at the end of each batch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from roost import Pipeline
from roost.errors import RoostError
from roost.model.settings import RunConfig, with_settings


def say(what: Any) -> None:
    print(f"@{json.dumps(what)}", flush=True)


def main() -> None:
    spark = None
    while line := sys.stdin.readline():
        run = json.loads(line)
        pauses = [tuple(pause) for pause in run.get("pauses", ())]

        waiting: list[int] = []

        def on_step(
            step: str, batch_id: int, pauses: list[Any] = pauses, waiting: list[int] = waiting
        ) -> None:
            if step == "end" and pipeline._streams is not None:
                waiting.append(pipeline._streams.waiting())
            if (step, batch_id) in pauses:
                say([step, batch_id])
                sys.stdin.readline()

        config = with_settings(RunConfig(), run["settings"])
        with Pipeline(config, spark=spark, on_step=on_step) as pipeline:
            try:
                say({**pipeline.run(), "waiting": waiting})
            except RoostError as error:
                say({"error": f"{type(error).__name__}: {error}"})
            spark = pipeline.spark


if __name__ == "__main__":
    main()
