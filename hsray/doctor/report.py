"""Findings for people and for programs: a table on a terminal, plain lines in a log, JSON."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hsray.doctor.facts import NodeFacts
from hsray.doctor.finding import Finding, exit_code
from hsray.doctor.nodes import Node
from hsray.records import JsonDict
from hsray.units import format_bytes as size

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_ORDER = {"fail": 0, "warn": 1, "ok": 2}
_NODES_NAMED = 6


def show_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    """One line per finding, in the order of the checks."""
    if not console.is_terminal:
        _say(console, f"{title}:" if title else "")
        for finding in findings:
            seen = finding.seen.replace("\n", "\n      | ")
            _say(console, f"{finding.level.upper():4}  {finding.check}: {seen}")
            if finding.advice:
                _say(console, f"      do: {finding.advice}")
        return
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        text = Text(finding.seen)
        if finding.advice:
            text.append(f"\n{finding.advice}", style=_STYLES[finding.level])
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, text)
    console.print(table)


def show_nodes(console: Console, nodes: Sequence[Node], found: Mapping[str, Sequence[Finding]]) -> None:
    """A row per node, then what is not right, once for all nodes that share it."""
    columns = ("node", "host", "replicas", "GPUs", "driver", "GPU free", "memory free", "spool free", "sglang", "worst")
    rows = [_row(node, found[node.name]) for node in nodes]
    if console.is_terminal:
        table = Table(*columns, box=None, padding=(0, 1))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row[:-1]), Text(row[-1], style=_STYLES[row[-1]]))
        console.print(table)
    else:
        widths = [max(len(row[n]) for row in (columns, *rows)) for n in range(len(columns))]
        for row in (columns, *rows):
            _say(console, "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    shared: dict[Finding, list[str]] = {}
    for node in nodes:
        for finding in found[node.name]:
            if finding.level != "ok":
                shared.setdefault(finding, []).append(node.name)
    merged = [
        dataclasses.replace(finding, seen=f"{_names(names, len(nodes))}: {finding.seen}")
        for finding, names in sorted(shared.items(), key=lambda item: _ORDER[item[0].level])
    ]
    show_findings(console, "Nodes", [*found[""], *merged])


def _names(names: Sequence[str], total: int) -> str:
    if len(names) == total > 1:
        return f"all {total} nodes"
    return ", ".join(names[:_NODES_NAMED]) + (
        f" and {len(names) - _NODES_NAMED} more" if len(names) > _NODES_NAMED else ""
    )


def _row(node: Node, findings: Sequence[Finding]) -> tuple[str, ...]:
    worst = min((finding.level for finding in findings), key=lambda level: _ORDER[level], default="ok")
    facts = node.facts
    if facts is None:
        return (node.name, "?", str(node.slots), str(node.gpus), *("?",) * 5, worst)
    return (
        node.name,
        facts.host,
        str(node.slots),
        str(len(facts.gpus)),
        ", ".join(sorted({gpu.driver for gpu in facts.gpus})) or "-",
        size(min(gpu.free for gpu in facts.gpus)) if facts.gpus else "-",
        size(facts.memory_free),
        size(facts.spool.free),
        facts.packages.get("sglang", "-"),
        worst,
    )


def show_verdict(console: Console, findings: Iterable[Finding]) -> None:
    counts = {"fail": 0, "warn": 0, "ok": 0}
    for finding in findings:
        counts[finding.level] += 1
    verdict = "The run would not get far" if counts["fail"] else "Nothing stands in the way"
    text = f"{verdict}: {counts['fail']} failures, {counts['warn']} warnings, {counts['ok']} checks in order."
    console.print(Text(text, style=_STYLES["fail" if counts["fail"] else "ok"]), soft_wrap=True)


def to_json(
    findings: Sequence[tuple[str, Finding]], facts: NodeFacts, nodes: Sequence[Node], bench: JsonDict | None
) -> JsonDict:
    """Everything, for programs. `findings` come with the name of their node (empty: this machine or the cluster)."""
    return {
        "exit_code": int(exit_code(finding for _, finding in findings)),
        "findings": [{"node": node, **dataclasses.asdict(finding)} for node, finding in findings],
        "facts": _plain(facts),
        "nodes": {node.name: _plain(node.facts) if node.facts else {"error": node.error} for node in nodes},
        "bench": bench,
    }


def _plain(facts: NodeFacts) -> JsonDict:
    data: dict[str, Any] = dataclasses.asdict(facts)
    data["listening"] = sorted(facts.listening)
    # Hundreds of names; the version says which.
    data["sglang"].pop("arguments")
    return data


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
