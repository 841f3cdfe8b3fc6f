"""Gate: admits or refuses requests by user, and counts them, one block at a time.

Any process may append to the log, so the gate judges when the log is applied, by log position: the
same requests get the same result however often and in whatever blocks they are read. Positions
count single requests. A request is counted once; a replay is judged but not counted again.

The gate does not validate requests. To count only admitted ones, call :meth:`Gate.judge` before
admission and :meth:`Gate.add` after it; otherwise an attacker could dilute their share of queries
in hotspots with invalid requests.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from roost.guard.blocks import BlockList
from roost.guard.loops import REFUSED, REGISTERS, TERMINATES, UNCOUNTED, Keys
from roost.guard.tally import Tally
from roost.guard.users import UserTable, keys_of
from roost.model.arrays import Mask


class Gate:
    """Judges requests, and counts those from position ``counted`` on."""

    def __init__(self, users: UserTable, blocks: BlockList, counted: int = 0) -> None:
        self._users = users
        self._blocks = blocks
        self.counted = counted

    def admit(self, users: pa.Array, registers: Mask, position: int, number: int) -> Mask:
        """Judge a block of requests and count the admitted ones.

        ``registers`` says whether each request registers or terminates a query, ``position`` is
        that of the first request, ``number`` the open round. A request without a user is admitted
        and not counted: admission refuses it.
        """
        keys = keys_of(users, self._users.secret)
        admitted = self._blocks.judge(keys, position)
        kinds = np.where(registers, np.int8(REGISTERS), np.int8(TERMINATES))
        kinds[~admitted] = REFUSED
        kinds[: max(self.counted - position, 0)] = UNCOUNTED
        if users.null_count:
            anonymous = users.is_null().to_numpy(zero_copy_only=False)
            admitted[anonymous] = True
            kinds[anonymous] = UNCOUNTED
        tally, own = Tally.of(users, keys, kinds)
        self._add(tally, own, max(position + len(keys), self.counted), number)
        return admitted

    def judge(self, users: pa.Array, position: int) -> Mask:
        """Judge a block of requests without counting them."""
        return self._blocks.judge(keys_of(users, self._users.secret), position)

    def add(self, tally: Tally, counted: int, number: int) -> None:
        """Add requests that were counted elsewhere, up to a log position."""
        self._add(tally, keys_of(tally.names, self._users.secret), counted, number)

    def _add(self, tally: Tally, keys: Keys, counted: int, number: int) -> None:
        assert counted >= self.counted, "requests are counted in order"
        admitted = np.flatnonzero(tally.counts[:, :2].any(axis=1))
        names = tally.names.take(pa.array(admitted))
        self._users.count(keys[admitted], names, tally.counts[admitted], number)
        self._blocks.count(keys, tally.counts[:, 2])
        self.counted = counted

    def refusal(self, user: str) -> str | None:
        """Return since when and why a user's requests are refused; None if they are admitted."""
        key = int(keys_of(pa.array([user], pa.string()), self._users.secret)[0])
        event = self._blocks.now(key)
        if event is None:
            return None
        return f"since position {event.position} of the query log, {event.reason}"
