"""From measured rates to what will be the limit, and how long a run takes. Pure."""

from dataclasses import dataclass

from hsray.doctor.finding import Finding, ok, warn
from hsray.estimate import SECONDS_PER_HOUR
from hsray.records import JsonDict
from hsray.units import format_bytes as size
from hsray.units import format_seconds

_PREFILL = "prefill"
_ADVICE = {
    "copies off the GPU": "fewer sites make fewer bytes; look at the PCIe link of the GPU (nvidia-smi -q)",
    "shared memory": "fewer sites make fewer bytes; look for a throttled or remote memory node",
    "store": "more nodes bring more network, unless the store itself is the limit; fewer sites make fewer bytes",
}
BILLION = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured on one node. None: not measured.

    Attributes:
        prefill: tokens/s of one replica that captures nothing.
        device_copy: bytes/s from one GPU into a registered arena.
        spool: bytes/s of one thread into an arena.
        store: bytes/s of this node into the store, in several objects at once.
    """

    prefill: float | None
    device_copy: float | None
    spool: float | None
    store: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """`limits`: tokens/s of one node by stage, the lowest first. `hours` of the run, if its tokens are known."""

    limits: tuple[tuple[str, float], ...]
    nodes: int
    hours_per_billion: float
    hours: float | None

    def to_json(self) -> JsonDict:
        return {
            "limits": dict(self.limits),
            "nodes": self.nodes,
            "hours_per_billion_tokens": self.hours_per_billion,
            "hours": self.hours,
        }


def forecast(
    rates: Rates, *, bytes_per_token: int, stored_per_token: float, replicas: int, nodes: int, tokens: int | None
) -> Forecast | None:
    """The upper bound that the slowest stage sets; None if nothing was measured.

    Args:
        bytes_per_token: of states in the arena; `stored_per_token` in the store, after codecs and selections.
        replicas: on one node. Prefill and copies are each replica's own; the store is shared by them.
        nodes: alike, with a network of their own.
        tokens: of the whole run, if known.
    """
    stages = (
        (_PREFILL, rates.prefill, replicas),
        ("copies off the GPU", _per_token(rates.device_copy, bytes_per_token), replicas),
        # On a GPU the copy engine fills the arena; on a CPU a thread of each replica does.
        ("shared memory", None if rates.device_copy else _per_token(rates.spool, bytes_per_token), replicas),
        ("store", _per_token(rates.store, stored_per_token), 1),
    )
    limits = sorted(((name, rate * count) for name, rate, count in stages if rate), key=lambda limit: limit[1])
    if not limits:
        return None
    per_second = limits[0][1] * nodes
    hours = None if tokens is None else tokens / per_second / SECONDS_PER_HOUR
    return Forecast(tuple(limits), nodes, BILLION / per_second / SECONDS_PER_HOUR, hours)


def _per_token(rate: float | None, bytes_per_token: float) -> float | None:
    return None if rate is None or not bytes_per_token else rate / bytes_per_token


def judge(found: Forecast, stored_per_token: float, tokens: int | None, plan_command: str) -> list[Finding]:
    """The bottleneck and the time, as findings."""
    name, lowest = found.limits[0]
    shown = "; ".join(f"{stage} {rate:,.0f}" for stage, rate in found.limits)
    seen = f"{name}. Most tokens/s of one node, by stage: {shown}"
    measured = {stage for stage, _ in found.limits}
    if name == _PREFILL:
        findings = [ok("bottleneck", f"{seen}. Extraction cannot be faster than its slowest stage")]
    elif _PREFILL not in measured:
        findings = [ok("bottleneck", f"{seen}. Prefill was not measured")]
    else:
        prefill = dict(found.limits)[_PREFILL]
        findings = [
            warn("bottleneck", f"{seen}. Engines would wait {1 - lowest / prefill:.0%} of the time", _ADVICE[name])
        ]
    rate = lowest * found.nodes
    per_billion = format_seconds(found.hours_per_billion * SECONDS_PER_HOUR)
    time = f"{per_billion} per billion tokens ({size(BILLION * stored_per_token)})"
    time += f" on {found.nodes} node{'s' if found.nodes != 1 else ''}, at best"
    if found.hours is not None and tokens is not None:
        time += f"; this run's {tokens:,} tokens: {format_seconds(found.hours * SECONDS_PER_HOUR)}"
    else:
        time += f"; for this run: {plan_command} --tokens-per-second {rate:.0f} --replicas 1"
    return [*findings, ok("time", time)]
