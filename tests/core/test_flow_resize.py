"""The number of machines changes while a dataflow runs, and its results are the interpreter's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flow_runs import FlowRun, RandomMoves, RandomResizes, as_table, compare, run_case, usable
from roost.balance.changes import NoChange, Resize
from roost.dataflow.buckets import BucketMap
from roost.dataflow.flow import Dataflow
from roost.dataflow.interpreter import Interpreter
from roost.dataflow.moves import MapChange, Recreation
from roost.dataflow.schema import resolve
from roost.model.choices import LayoutName
from roost.runtime.flow_rounds import FLOW_ROUNDS, FlowSnapshot
from roost.runtime.records import commits, intent
from roost.runtime.rounds import Proposal, Resizing
from roost.stages.flow_routing import maps_of, stage_of
from roost.storage.store import Store
from stage_scenario import STEPS

REASONS = ("another policy changed", "remain")  # of what the arbiter may refuse


def run_resized(seed: int, folder: Path, kills: int = 0) -> Counter[str]:
    """Run a random dataflow with random resizes and moves; returns what that covered."""
    case, chance = usable(seed, slow=True), random.Random(seed)
    moves, resizes = RandomMoves(chance, resizes=False), RandomResizes(chance)
    layout = chance.choice(list(LayoutName)).value
    balance = chance.choice(["off", "planner", "greedy"])
    run = FlowRun(case.flow, folder, layout=lambda _: layout, resize=resizes)
    run.policies = moves.policies(case.flow) if chance.random() < 0.7 else []
    run.settings = {"round": 0, "balance": balance, "imbalance": 0}
    run_case(case, run, chance, kills)
    with closing(Store(folder / "state")) as store:
        verdicts = [v for _, row in store.items(FLOW_ROUNDS) for v in row["verdicts"]]
    refused = [v for v in verdicts if v["verdict"] != "accepted"]
    assert all(any(text in v["reason"] for text in REASONS) for v in refused), refused
    return resizes.covered + moves.covered + Counter(case.features)


@pytest.mark.sweep([], 3, 1000)
def test_random_resizes_change_no_result(seed: int, tmp_path: Path) -> None:
    run_resized(seed, tmp_path)


@pytest.mark.sweep(range(400, 402), 2, 300)
def test_drivers_killed_around_resizes(seed: int, tmp_path: Path) -> None:
    run_resized(seed, tmp_path, kills=2)


def test_random_resizes_cover_operators_and_moves(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(10):
        found += run_resized(seed, tmp_path / str(seed))
    resizes = ["resized up", "resized down", "resized while buckets move", "resized with state"]
    assert all(found[name] >= 20 for name in resizes), found
    features = ["window moves", "join", "product", "tuple window", "aggregate of aggregate"]
    assert all(found[name] for name in features), found


# --------------------------------------------------------------------------- one dataflow


def sums() -> Dataflow:
    flow = Dataflow("sums")
    source = flow.source("s", {"k": "int64", "v": "int64", "t": "int64"}, time="t")
    found = source.aggregate({"v": "sum(v)"}, by="k", size=6, advance=2, name="sums")
    found.filter("v < 90", name="some").sink("out")
    return flow


@dataclass
class Sizes:
    """Wants the machines of a list, one for each round."""

    sizes: list[int]

    def __call__(self) -> int:
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]


def run_sums(run: FlowRun, batches: int = 7, kill_at: Sequence[str] = ()) -> None:
    """Run batches with open windows, and compare with the interpreter."""
    flow = sums()
    graph = resolve(flow.name, flow.operators)
    oracle = Interpreter(graph)
    with run:
        for number in range(batches):
            times = [3 * number + k for k in range(4)]
            rows = [{"k": k % 9, "v": k, "t": t} for k, t in enumerate(times * 6)]
            ended = ["s"] if number == batches - 1 else []
            oracle.batch({"s": rows}, float(number), ended)
            run.batch({"s": as_table(graph, "s", rows)}, float(number), ended, kill_at)
    compare(run, oracle)


def maps(folder: Path) -> list[BucketMap]:
    with closing(Store(folder / "state")) as store:
        return [BucketMap.from_json(*row) for row in store.items(maps_of("sums"))]


@pytest.mark.parametrize("balance", ["off", "planner", "greedy"])
def test_only_what_must_move_moves(balance: str, tmp_path: Path) -> None:
    """New machines get buckets, the others keep theirs; all buckets leave machines that leave."""
    run = FlowRun(sums(), tmp_path, resize=Resizing(Sizes([2, 4, 4, 1])))
    run.settings = {"round": 0, "balance": balance, "imbalance": 9}
    run_sums(run)
    found = [one for one in maps(tmp_path) if any(move.old != move.new for move in one.moves)]
    first, grown, shrunk = (one.machines for one in [maps(tmp_path)[0], *found[:2]])
    assert (first, grown, shrunk) == (2, 4, 1)
    if balance != "planner":  # which divides what it measures
        assert {move.new for move in found[0].moves} == {2, 3}
    assert set(found[0].owners) == {0, 1, 2, 3} and set(found[1].owners) == {0}
    assert {move.protocol for move in found[1].moves if move.old} == {Recreation.STATE}


def test_a_stateless_stage_is_resized(tmp_path: Path) -> None:
    """In the layout operator_cloud, the exchange before a Filter has machines of its own."""
    run = FlowRun(sums(), tmp_path, resize=Resizing(Sizes([2, 12, 12, 2])), history=2)
    run.layout = lambda batch: "operator_cloud"
    run_sums(run)
    with closing(Store(tmp_path / "state")) as store:
        counts = [row["machines"] for _, row in store.items(maps_of("some"))]
        rows = [commit.figures["stages"][stage_of("some")]["rows_in"] for commit in commits(store)]
    assert counts[0] == counts[2] == 1 < counts[1] and all(rows)
    with run:
        run._loop()  # deletes epochs that no batch can need
    with closing(Store(tmp_path / "state")) as store:
        assert [epoch for epoch, _ in store.items(maps_of("some"))] == [1, 2]


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_killed_at_any_step_leaves_a_resize_done_or_not_begun(
    step: str, tmp_path: Path
) -> None:
    """The driver is killed in each batch; a batch repeats on the machines that its intent names."""
    asked = [2, 5, 3, 4]
    run = FlowRun(sums(), tmp_path)

    class Wanted:
        name = "resize"

        def propose(self, snapshot: FlowSnapshot) -> Proposal:
            size = asked[min(int(snapshot.clock) // 2, 3)]
            if snapshot.has_size(size):
                return Proposal(NoChange("has it"))
            return Proposal(Resize(size, "script"))

    run.resize = Wanted()
    run_sums(run, kill_at=[step])
    found = maps(tmp_path)
    with closing(Store(tmp_path / "state")) as store:
        epochs = [intent(store, number).epochs[stage_of("sums")] for number in range(7)]  # type: ignore[union-attr]
        rounds = [row["epochs"] for _, row in store.items(FLOW_ROUNDS)]
    sizes = [found[epoch].machines for epoch in epochs]
    # A batch that is committed is not repeated, and its round is lost.
    grown = [2, 2, 2, 5, 5, 3, 3] if step not in ("publish", "cleanup", "round") else [2] * 7
    assert sizes == grown
    assert sum(map(bool, rounds)) >= len(set(sizes)) - 1


def test_a_resize_waits_for_windows_of_machines_that_leave(tmp_path: Path) -> None:
    """The old owner of a bucket that moves without its state computes its open windows first."""
    asked = {0: MapChange("sums", {b: 0 for b in range(256)}, "x", protocol=Recreation.WINDOW)}

    class Moving:
        name = "moves"

        def propose(self, snapshot: FlowSnapshot) -> Proposal:
            return Proposal(asked.pop(int(snapshot.clock), NoChange("none")))

    run = FlowRun(sums(), tmp_path, policies=[Moving()], resize=Resizing(Sizes([2, 1])))
    run_sums(run)
    with closing(Store(tmp_path / "state")) as store:
        reasons = [v for _, row in store.items(FLOW_ROUNDS) for v in row["verdicts"]]
    refused = [v["reason"] for v in reasons if v["verdict"] == "refused"]
    assert refused and all("is on machine 1, but 1 remain" in reason for reason in refused)
    assert maps(tmp_path)[-1].machines == 1


def test_later_settings_replace_the_machines_of_a_resize(tmp_path: Path) -> None:
    """A run of fixed size uses its own settings; one that may be resized continues."""

    def last(resize: Any) -> int:
        run = FlowRun(sums(), tmp_path, resize=resize)
        with run:
            run._loop()
        return maps(tmp_path)[-1].machines

    run_sums(FlowRun(sums(), tmp_path, resize=Resizing(Sizes([5]))))
    assert last(Resizing(Sizes([5]))) == 5
    assert last(None) == 2


def test_a_dataflow_needs_a_machine(tmp_path: Path) -> None:
    class Nothing:
        name = "resize"

        def propose(self, snapshot: FlowSnapshot) -> Proposal:
            return Proposal(Resize(0, "none"))

    run_sums(FlowRun(sums(), tmp_path, resize=Nothing()), batches=2)
    with closing(Store(tmp_path / "state")) as store:
        verdicts = [row["verdicts"][0] for _, row in store.items(FLOW_ROUNDS)]
    assert {v["reason"] for v in verdicts} == {"none; refused: a dataflow needs a machine, not 0"}
