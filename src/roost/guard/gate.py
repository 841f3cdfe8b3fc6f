"""The gate: admits or refuses requests by user, and counts them, whole blocks at a time.

The log keeps whatever came in, and anybody may write to it. So the gate stands where the log is
folded, and judges rows by their position: the same rows get the same answer however often and in
whatever blocks they are read. A row is counted once, the first time that it is seen; a replay is
judged again and not counted again.

Positions are those of single requests over the whole log. Blocking a user at position ``k``
refuses rows after ``k``. For a request that is not in the log yet, :meth:`Gate.refusal` tells
whether it has a chance, so that its sender can be told at once.

What admission finds wrong with a request (a box upside down, an unknown query) is not known here.
Where requests are to be counted only if they are admitted, :meth:`Gate.judge` comes before
admission and :meth:`Gate.add` after it. That is the better order: otherwise someone could
dilute what share of his queries is in hotspots with queries that never come to be.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.guard.blocks import BlockList
from roost.guard.loops import REFUSED, REGISTERS, TERMINATES, UNCOUNTED
from roost.guard.tally import Tally
from roost.guard.users import Keys, UserTable, keys_of

Mask = NDArray[np.bool_]


class Gate:
    """Judges and counts.

    Parameters
    ----------
    users
        Where requests are counted.
    blocks
        Who is blocked from when on.
    counted
        First position that was not counted yet.

    Examples
    --------
    >>> from roost.guard.users import make_secret
    >>> gate = Gate(UserTable(make_secret(np.random.default_rng(0))), BlockList())
    >>> names, registers = pa.array(["ann", "bob", "ann"]), np.array([True, True, False])
    >>> gate.admit(names, registers, 0, 0).tolist(), gate.counted
    ([True, True, True], 3)
    """

    def __init__(self, users: UserTable, blocks: BlockList, counted: int = 0) -> None:
        self._users = users
        self._blocks = blocks
        self.counted = counted

    def admit(self, users: pa.Array, registers: Mask, position: int, number: int) -> Mask:
        """Judge a block and count what is admitted of it.

        Parameters
        ----------
        users
            Names, one a request; a request without one is admitted and not counted, for
            admission to refuse.
        registers
            Whether each request registers a query; otherwise it terminates one.
        position
            Log position of the first request.
        number
            Round that is open.
        """
        keys = keys_of(users, self._users.secret)
        admitted = self._blocks.judge(keys, position)
        kinds = np.where(registers, np.int8(REGISTERS), np.int8(TERMINATES))
        kinds[~admitted] = REFUSED
        kinds[: max(self.counted - position, 0)] = UNCOUNTED
        if users.null_count:
            nobody = users.is_null().to_numpy(zero_copy_only=False)
            admitted[nobody] = True
            kinds[nobody] = UNCOUNTED
        tally, own = Tally.of(users, keys, kinds)
        self._add(tally, own, max(position + len(keys), self.counted), number)
        return admitted

    def judge(self, users: pa.Array, position: int) -> Mask:
        """Judge a block, and count nothing."""
        return self._blocks.judge(keys_of(users, self._users.secret), position)

    def add(self, tally: Tally, counted: int, number: int) -> None:
        """Add what was counted before, or elsewhere, up to a log position."""
        self._add(tally, keys_of(tally.names, self._users.secret), counted, number)

    def _add(self, tally: Tally, keys: Keys, counted: int, number: int) -> None:
        assert counted >= self.counted, "requests are counted in order"
        asked = np.flatnonzero(tally.counts[:, :2].any(axis=1))
        names = tally.names.take(pa.array(asked))
        self._users.count(keys[asked], names, tally.counts[asked], number)
        self._blocks.count(keys, tally.counts[:, 2])
        self.counted = counted

    def refusal(self, user: str) -> str | None:
        """Say since when and why a user is refused; None where a request will be admitted."""
        key = int(keys_of(pa.array([user], pa.string()), self._users.secret)[0])
        event = self._blocks.now(key)
        if event is None:
            return None
        return f"since position {event.position} of the query log, {event.reason}"
