"""The applications that benchmarks measure: the examples of the repository, over other sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from roost.dataflow.flow import Dataflow
from roost.dataflow.loading import load_flow
from roost.dataflow.operators import Source
from roost.errors import RoostError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def application(name: str, path: str) -> Dataflow:
    """Return the dataflow of an example whose only source reads a path.

    Raises
    ------
    RoostError
        If Roost does not run from its repository, because a package has no examples.
    """
    file = EXAMPLES / f"{name}.py"
    if not file.is_file():
        raise RoostError(f"this benchmark runs examples/{name}.py: start it in the repository")
    flow = load_flow(f"{file}:flow")
    operators = [replace(o, path=path) if isinstance(o, Source) else o for o in flow.operators]
    return Dataflow(flow.name, operators)
