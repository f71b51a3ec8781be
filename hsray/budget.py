"""How often may something fail before it is given up: prompts, leases, places, the whole run.

Pure counting on top of `BudgetConfig`: no clock, no events, no decisions about what happens next (those are
`scheduler.py`'s). What must survive the driver is in the ledger (tries of a prompt in its lease's resolution,
starts of a lease as objects); the counters here are begun from that.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hsray.config import BudgetConfig

MIN_FINISHED_PROMPTS = 200
"""Prompts that must be finished before the fraction of dead ones can stop the run."""
MAX_BACKOFF_SECONDS = 60.0

Overrun = Literal["too_many_dead", "first_prompts_all_fail"]


class PromptTries:
    """Failed tries per input row. A crash that cannot be pinned on one prompt is not a try."""

    def __init__(self, limit: int, so_far: Mapping[int, int]) -> None:
        self._limit = limit
        self._tries = dict(so_far)

    def fail(self, row: int) -> int:
        """Count one failed try of `row`; returns its tries so far."""
        self._tries[row] = self._tries.get(row, 0) + 1
        return self._tries[row]

    def is_spent(self, row: int) -> bool:
        return self._tries.get(row, 0) >= self._limit

    def of(self, rows: Iterable[int]) -> dict[int, int]:
        """Tries of those `rows` that were tried and failed."""
        return {row: self._tries[row] for row in rows if row in self._tries}

    def adopt(self, recorded: Mapping[int, int]) -> None:
        """Take over what a resolution records, where it is more than is known here."""
        for row, tries in recorded.items():
            self._tries[row] = max(tries, self._tries.get(row, 0))

    def forget(self, rows: Iterable[int]) -> None:
        """Rows that are finished need no count."""
        for row in rows:
            self._tries.pop(row, None)


class LeaseCounts:
    """Replica deaths and starts per lease.

    A start's number names its object in the ledger, and the highest number is what the next driver knows. A
    start that ended without blame (drain, storage, cancelled copy) gives its number back, so that the numbers
    count starts that nobody saw the end of: ten drains do not kill a prompt, ten driver deaths do.
    """

    def __init__(self, budgets: BudgetConfig, starts: Mapping[str, int]) -> None:
        self._budgets = budgets
        self._crashes: Counter[str] = Counter()
        self._crashed_alone: set[str] = set()
        self._starts: Counter[str] = Counter(starts)

    def start(self, lease_id: str) -> int:
        """Count a start; returns its number, from 1."""
        self._starts[lease_id] += 1
        return self._starts[lease_id]

    def give_back_start(self, lease_id: str) -> None:
        self._starts[lease_id] -= 1

    def may_start(self, lease_id: str) -> bool:
        return self._starts[lease_id] < self._budgets.lease_starts

    def crash(self, lease_id: str, *, alone: bool) -> None:
        """Count a replica death under the lease; `alone` if no other lease ran there, so that the blame is exact."""
        self._crashes[lease_id] += 1
        if alone:
            self._crashed_alone.add(lease_id)

    def crashes(self, lease_id: str) -> int:
        return self._crashes.get(lease_id, 0)

    def exhaustion(self, lease_id: str) -> tuple[int, str] | None:
        """How often the lease was tried and why it may not be tried again; None while it may."""
        crashes = self.crashes(lease_id)
        if crashes >= self._budgets.lease_crashes and lease_id in self._crashed_alone:
            return crashes, f"{crashes} replicas died under it"
        starts = self._starts.get(lease_id, 0)
        if starts >= self._budgets.lease_starts:
            return starts, f"started {starts} times without an outcome"
        return None

    def forget(self, lease_id: str) -> None:
        self._crashes.pop(lease_id, None)
        self._crashed_alone.discard(lease_id)
        self._starts.pop(lease_id, None)


@dataclass(slots=True)
class PlaceStanding:
    """Failures of one place since it last delivered something.

    Repeated deaths under the same lease count once: they are evidence against the lease. So one bad prompt
    does not take a place with it, however often its lease is bisected, as long as one innocent lease is
    delivered for every `limit` - 1 guilty ones; while a place that kills whatever it is given is given up
    after `limit` leases.
    """

    limit: int
    strikes: int = 0
    _blamed: set[str] = field(default_factory=set)

    def strike(self, lease_ids: Collection[str] = ()) -> None:
        """Count a failure of the place while it ran `lease_ids` (empty: none of them is to blame)."""
        if self._blamed.isdisjoint(lease_ids):
            self.strikes += 1
        self._blamed.update(lease_ids)

    def delivered(self) -> None:
        self.strikes = 0
        self._blamed.clear()

    @property
    def is_in_doubt(self) -> bool:
        return self.strikes > 0

    @property
    def is_spent(self) -> bool:
        return self.strikes >= self.limit

    @property
    def backoff_seconds(self) -> float:
        """Pause before the next replica is started here: 1, 2, 4, ... at most 60 s."""
        return float(min(MAX_BACKOFF_SECONDS, 2.0 ** min(self.strikes, 10)))


class RunBudget:
    """Committed and dead prompts of the run, and whether going on makes sense."""

    def __init__(self, budgets: BudgetConfig, *, already_committed: int, already_dead: int) -> None:
        self._budgets = budgets
        self._already_dead = already_dead
        self.committed = already_committed
        self.dead = already_dead

    def count(self, *, committed: int, dead: int) -> None:
        self.committed += committed
        self.dead += dead

    def overrun(self) -> tuple[Overrun, str] | None:
        """Why the run should stop, if it should.

        The dead fraction is allowed three standard deviations (of a Poisson count) above its limit, so that
        one bad prompt among the first 200 does not stop a run of days, while a rate that really is too high
        stops it early.
        """
        # Deaths of earlier drivers do not count here: whoever resumes has changed something and wants a try.
        dead_now = self.dead - self._already_dead
        if self.committed == 0 and dead_now >= self._budgets.first_prompts_all_fail:
            return "first_prompts_all_fail", f"the first {dead_now} prompts all died and none was committed"
        finished = self.committed + self.dead
        expected = self._budgets.max_dead_fraction * finished
        if finished >= MIN_FINISHED_PROMPTS and self.dead > expected + 3 * math.sqrt(expected):
            return "too_many_dead", (
                f"{self.dead} of {finished} finished prompts are dead ({self.dead / finished:.2%}); "
                f"budgets.max_dead_fraction allows {self._budgets.max_dead_fraction:.2%}"
            )
        return None
