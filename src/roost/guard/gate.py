"""The gate: admits or refuses requests by user, and counts them, whole blocks at a time.

The log keeps whatever came in, and anybody may write to it. So the gate stands where the log is
folded, and judges rows by their position: the same rows get the same answer however often and in
whatever blocks they are read. A row is counted once, the first time that it is seen; a replay is
judged again and not counted again.

Positions are those of single requests over the whole log. Blocking a user at position ``k``
refuses rows after ``k``. For a request that is not in the log yet, :meth:`Gate.admits` tells
whether it has a chance, so that its sender can be told at once.

What admission finds wrong with a request (a box upside down, an unknown query) is not known here.
Where requests are to be counted only if they are admitted, :meth:`Gate.judge` comes before
admission and :meth:`Gate.count` after it. That is the better order: otherwise someone could
dilute what share of his queries is in hotspots with queries that never come to be.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from roost.guard.blocks import BlockList
from roost.guard.loops import REGISTERS, TERMINATES, UNCOUNTED
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
        admitted = self._blocks.judge(keys, position, self.counted)
        self._count(keys, users, registers, admitted, position, number)
        return admitted

    def judge(self, users: pa.Array, position: int) -> Mask:
        """Judge a block, and count nothing but refusals."""
        return self._blocks.judge(keys_of(users, self._users.secret), position, self.counted)

    def count(
        self, users: pa.Array, registers: Mask, admitted: Mask, position: int, number: int
    ) -> None:
        """Count what was admitted of a block that was judged before."""
        keys = keys_of(users, self._users.secret)
        self._count(keys, users, registers, admitted, position, number)

    def _count(
        self,
        keys: Keys,
        users: pa.Array,
        registers: Mask,
        admitted: Mask,
        position: int,
        number: int,
    ) -> None:
        assert len(registers) == len(keys), "a request is a registration or not"
        seen = min(max(self.counted - position, 0), len(keys))
        if seen == len(keys):
            return
        kinds = np.where(registers, np.int8(REGISTERS), np.int8(TERMINATES))
        kinds[~admitted] = UNCOUNTED
        kinds[:seen] = UNCOUNTED
        if users.null_count:
            kinds[users.is_null().to_numpy(zero_copy_only=False)] = UNCOUNTED
        self._users.count(keys, kinds, users, number)
        self.counted = position + len(keys)

    def admits(self, user: str) -> bool:
        """Whether a request that is made now will be admitted."""
        return self.refusal(user) is None

    def refusal(self, user: str) -> str | None:
        """Say why a request that is made now will be refused; None where it will not."""
        key = int(keys_of(pa.array([user], pa.string()), self._users.secret)[0])
        event = self._blocks.now(key)
        if event is None:
            return None
        return f"refused: user blocked since position {event.position} ({event.reason})"
