"""Nodes side by side: what differs that should not, and what Ray and the machine disagree on. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hsray.doctor.checks import check_node
from hsray.doctor.facts import NodeFacts
from hsray.doctor.finding import Finding, Level, fail, ok, warn
from hsray.doctor.subject import Subject
from hsray.units import format_bytes as size

_NAMES_SHOWN = 8
_LESS_MEMORY = 0.9
_SKEW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the cluster: its name, Ray's id of it, the GPUs that Ray gives away there, how many replicas it has
    room for, and its facts, or why there are none."""

    name: str
    node_id: str
    gpus: int
    slots: int
    facts: NodeFacts | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Attribute:
    """Something that should be the same wherever replicas run."""

    name: str
    level: Level
    value: Callable[[NodeFacts], str]
    advice: str


def _package(name: str, level: Level, advice: str) -> _Attribute:
    return _Attribute(name, level, lambda facts: facts.packages.get(name, "none"), advice)


_VERSIONS_CHANGE_NUMBERS = "install one version everywhere: another one gives other numbers"
_ATTRIBUTES = (
    _Attribute(
        "python", "warn", lambda facts: facts.python, "install one version everywhere; Ray wants the same minor"
    ),
    _package("hsray", "fail", "install one version everywhere"),
    _package("ray", "fail", "install one version everywhere"),
    _package("sglang", "fail", f"{_VERSIONS_CHANGE_NUMBERS}, and replicas that differ are refused"),
    _package("torch", "warn", _VERSIONS_CHANGE_NUMBERS),
    _package("transformers", "warn", _VERSIONS_CHANGE_NUMBERS),
    _Attribute("model", "fail", lambda facts: facts.model.digest or "incomplete", "copy one revision to every node"),
    _Attribute(
        "gpu",
        "warn",
        lambda facts: ", ".join(sorted({gpu.name for gpu in facts.gpus})) or "none",
        "pin the run to one kind with cluster.label_selector: others give other numbers",
    ),
    _Attribute(
        "driver",
        "warn",
        lambda facts: ", ".join(sorted({gpu.driver for gpu in facts.gpus})) or "none",
        "install one driver everywhere",
    ),
    _Attribute("gpus", "warn", lambda facts: str(len(facts.gpus)), "look for GPUs that fell off the bus (dmesg, Xid)"),
)


def check_nodes(subject: Subject, nodes: Sequence[Node]) -> dict[str, list[Finding]]:
    """Findings of every node by name, and under the empty name those of the cluster as a whole."""
    found: dict[str, list[Finding]] = {}
    for node in nodes:
        if node.facts is None:
            found[node.name] = [
                fail("node", node.error, "look at Ray's logs there; hsray and its packages must be installed on it")
            ]
        else:
            found[node.name] = [
                *_check_gpus_of_ray(subject, node, node.facts),
                *check_node(subject, node.facts, is_place=node.slots > 0),
            ]
    found[""] = [*_check_capacity(subject, nodes), *differences(nodes)]
    return found


def _check_capacity(subject: Subject, nodes: Sequence[Node]) -> Iterator[Finding]:
    places = sum(node.slots for node in nodes)
    wanted = subject.config.cluster.replicas
    seen = f"{len(nodes)} nodes with room for {places} replicas"
    if not places:
        need = f"{subject.config.engine.tp_size} GPUs" if not subject.config.engine.is_cpu else "a CPU"
        yield fail(
            "capacity",
            f"{seen}; one needs {need} on one node",
            "start nodes with --num-gpus, --labels and --resources as cluster.label_selector and cluster.resources ask",
        )
    elif isinstance(wanted, int) and not subject.config.engine.is_cpu and wanted > places:
        yield warn("capacity", f"{seen}, cluster.replicas is {wanted}", "add nodes, or say auto: the rest would wait")
    else:
        yield ok("capacity", seen)


def _check_gpus_of_ray(subject: Subject, node: Node, facts: NodeFacts) -> Iterator[Finding]:
    if subject.config.engine.is_cpu or node.gpus == len(facts.gpus):
        return
    seen = f"Ray gives away {node.gpus} GPUs, nvidia-smi shows {len(facts.gpus)}"
    advice = "start Ray there with the right --num-gpus, after the driver is loaded"
    yield fail("gpus of ray", seen, advice) if node.gpus > len(facts.gpus) else warn("gpus of ray", seen, advice)


def differences(nodes: Sequence[Node]) -> Iterator[Finding]:
    """What differs among the nodes that replicas run on (versions: among all of them)."""
    known = [(node, node.facts) for node in nodes if node.facts is not None]
    count = 0
    for attribute in _ATTRIBUTES:
        groups: dict[str, list[str]] = defaultdict(list)
        for node, facts in known:
            if node.slots or attribute.name in ("python", "hsray", "ray"):
                groups[attribute.value(facts)].append(node.name)
        if len(groups) > 1:
            count += 1
            shown = sorted(groups.items(), key=lambda item: -len(item[1]))
            seen = f"{attribute.name}: " + "; ".join(f"{value} on {_names(names)}" for value, names in shown)
            yield Finding("differences", attribute.level, seen, attribute.advice)
    for finding in (*_less_memory(known), *_clocks(known)):
        count += 1
        yield finding
    if not count and len(known) > 1:
        yield ok("differences", f"none among {len(known)} nodes")


def _less_memory(known: Sequence[tuple[Node, NodeFacts]]) -> Iterator[Finding]:
    def free_of_gpu(facts: NodeFacts) -> int:
        return min((gpu.free for gpu in facts.gpus), default=0)

    measures: tuple[tuple[str, Callable[[NodeFacts], int]], ...] = (
        ("free memory", lambda facts: facts.memory_free),
        ("free shared memory", lambda facts: facts.spool.free),
        ("free memory of the fullest GPU", free_of_gpu),
    )
    places = [(node, facts) for node, facts in known if node.slots]
    for name, measure in measures:
        values = {node.name: measure(facts) for node, facts in places}
        usual = statistics.median(values.values()) if values else 0
        less = [node for node, value in values.items() if value < _LESS_MEMORY * usual]
        if less:
            lowest = min(less, key=lambda node: values[node])
            yield warn(
                "differences",
                f"{name}: less than the usual {size(usual)} on {_names(less)}; {size(values[lowest])} on {lowest}",
                "look there for processes of earlier runs",
            )


def _clocks(known: Sequence[tuple[Node, NodeFacts]]) -> Iterator[Finding]:
    """All were asked at once, so their times overlap unless their clocks differ."""
    if len(known) < 2:
        return
    latest = max(known, key=lambda item: item[1].began)
    earliest = min(known, key=lambda item: item[1].ended)
    apart = latest[1].began - earliest[1].ended
    if apart > _SKEW_SECONDS:
        yield warn(
            "differences",
            f"clock: {latest[0].name} is at least {apart:.0f} s ahead of {earliest[0].name}",
            "set the clocks with NTP: times in logs mislead, and a store may refuse requests",
        )


def _names(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMES_SHOWN])} and {len(names) - _NAMES_SHOWN} more"
