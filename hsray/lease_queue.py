"""The leases that wait for a replica, in the order in which they are to be given out, and how small the last are.

Returned leases go before fresh ones, so that what went wrong is settled early; the pieces into which the last leases
are cut go after them, the largest first. Knows nothing of replicas, places or events.
"""

import bisect
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hsray.records import Lease

MIN_PIECE_SECONDS = 30.0
"""A lease is not cut into pieces that take less: each costs a record, a shard and a call."""
MAX_DIVISIONS = 3


@dataclass(slots=True)
class OpenLease:
    """`priority` is the plan order; `avoid` the places where it failed; `uploaded` the shard keys by attempt."""

    lease: Lease
    priority: tuple[int, str]
    is_half: bool
    tokens: int
    avoid: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    uploaded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    last_failure: str = ""
    last_replica: str = "driver"

    def note_failure(self, place: str, replica: str, message: str) -> None:
        self.avoid.add(place)
        self.last_failure, self.last_replica = message, replica


class LeaseQueue:
    """Attributes:
    tokens: of all that waits.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._fresh: deque[OpenLease] = deque()  # root leases that never ran here, in plan order
        self._returned: list[OpenLease] = []  # by priority
        self._pieces: list[tuple[int, tuple[int, str], OpenLease]] = []  # a heap, the largest on top

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned) + len(self._pieces)

    @property
    def has_unsuspected(self) -> bool:
        """Whether leases wait that never failed anywhere."""
        return bool(self._fresh or self._pieces)

    @property
    def returned(self) -> Iterator[OpenLease]:
        return iter(self._returned)

    def add_fresh(self, lease: OpenLease) -> None:
        self._fresh.append(lease)
        self.tokens += lease.tokens

    def add_returned(self, lease: OpenLease) -> None:
        bisect.insort(self._returned, lease, key=lambda waiting: waiting.priority)
        self.tokens += lease.tokens

    def add_piece(self, lease: OpenLease) -> None:
        heapq.heappush(self._pieces, (-lease.tokens, lease.priority, lease))
        self.tokens += lease.tokens

    def take(self, returned: OpenLease) -> OpenLease:
        """Take a certain returned lease out."""
        self._returned.remove(returned)
        self.tokens -= returned.tokens
        return returned

    def next_unsuspected(self) -> OpenLease | None:
        """Take the next fresh lease or piece out."""
        if self._fresh:
            lease = self._fresh.popleft()
        elif self._pieces:
            lease = heapq.heappop(self._pieces)[2]
        else:
            return None
        self.tokens -= lease.tokens
        return lease

    def cut_tail(self, tail: "Tail", num_replicas: int) -> list[tuple[OpenLease, int]]:
        """Take those fresh leases out that are to be cut, with how often each is to be halved."""
        kept: deque[OpenLease] = deque()
        cut: list[tuple[OpenLease, int]] = []
        behind = 0
        for lease in reversed(self._fresh):
            behind += lease.tokens
            divisions = tail.divisions(lease, behind, num_replicas)
            if divisions:
                cut.append((lease, divisions))
                self.tokens -= lease.tokens
            else:
                kept.appendleft(lease)
        self._fresh = kept
        return cut


class Tail:
    """How small the last leases should be, so that all replicas end at about the same time.

    A replica that gets a whole lease just before the queue is empty ends a lease's time after the others. So the
    size goes down with what is left: half of each replica's share (guided self-scheduling), but never below
    `MIN_PIECE_SECONDS` of work.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A replica was busy for so long with so many tokens."""
        self._tokens += tokens
        self._seconds += max(0.0, seconds)

    @property
    def is_informed(self) -> bool:
        return self._seconds > 0

    def divisions(self, lease: OpenLease, tokens_behind: float, num_replicas: int) -> int:
        """How often to halve a waiting lease that has `tokens_behind` waiting with and behind it."""
        least = MIN_PIECE_SECONDS * self._tokens / self._seconds if self._seconds else float("inf")
        target = max(tokens_behind / (2 * num_replicas), least)
        divisions = 0
        size, rows = float(lease.tokens), len(lease.lease.rows)
        while size > 1.5 * target and size >= 2 * least and rows >= 2 and divisions < MAX_DIVISIONS:
            divisions += 1
            size, rows = size / 2, rows // 2
        return divisions


def plan_order(leases: Sequence[Lease]) -> dict[str, int]:
    """Position of each root in the order in which its first lease comes."""
    order: dict[str, int] = {}
    for lease in leases:
        order.setdefault(lease.root_id, len(order))
    return order
