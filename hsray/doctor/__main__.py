"""`python -m hsray.doctor [CONFIG] [key=value ...]`."""

import argparse
import functools
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console

from hsray.config import Config, load_config
from hsray.doctor.facts import NodeFacts, RunFacts
from hsray.doctor.finding import Finding, exit_code, fail, ok
from hsray.errors import ConfigError, ExitCode, HsrayError
from hsray.log import configure_logging
from hsray.quickstart import quickstart_config
from hsray.records import JsonDict

if TYPE_CHECKING:
    from hsray.doctor.nodes import Node
    from hsray.doctor.subject import Subject

log = logging.getLogger("hsray.doctor")

# Importing SGLang for the first time on a node with a slow disk takes a minute or two.
_NODES_SECONDS = 400.0


@dataclass(slots=True)
class Examination:
    """What was found. `findings` come with the name of their node, empty for this machine and the cluster."""

    subject: "Subject"
    facts: NodeFacts
    run: RunFacts
    configuration: list[Finding]
    machine: list[Finding]
    nodes: "list[Node]" = field(default_factory=list)
    by_node: dict[str, list[Finding]] = field(default_factory=dict)
    bench: list[Finding] = field(default_factory=list)
    figures: JsonDict | None = None

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        here = [("", finding) for finding in (*self.configuration, *self.machine, *self.bench)]
        return here + [(name, finding) for name, findings in self.by_node.items() for finding in findings]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 nothing would stop the run, 4 something would, 5 the store is unusable."""
    parser = argparse.ArgumentParser(
        prog="python -m hsray.doctor", description="Look for what would stop or slow a run, before it starts."
    )
    parser.add_argument("config", nargs="?", help="YAML file; without one, the quickstart's")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example cluster.replicas=2")
    parser.add_argument("--nodes", action="store_true", help="look at every node of the Ray cluster, too")
    parser.add_argument("--bench", action="store_true", help="measure prefill, copies and the store: some minutes")
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    args = parser.parse_intermixed_args(argv)
    configure_logging("warning")
    try:
        config = _load(args.config, args.overrides)
        console = Console(stderr=args.json)
        with console.status("looking at this machine, the model and the store ..."):
            found = examine(config)
        if args.nodes:
            with console.status("looking at the nodes of the cluster ..."):
                add_nodes(found)
        if not args.json:
            show(console, found)
        if args.bench:
            with console.status("measuring: some minutes ..."):
                add_bench(found)
            if not args.json:
                show_bench(console, found)
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)
    except KeyboardInterrupt:
        log.error("interrupted")
        return int(ExitCode.INTERRUPTED)
    if args.json:
        from hsray.doctor.report import to_json

        print(json.dumps(to_json(found.findings, found.facts, found.nodes, found.figures), indent=2))  # noqa: T201
    else:
        from hsray.doctor.report import show_verdict

        show_verdict(console, (finding for _, finding in found.findings))
    return int(exit_code(finding for _, finding in found.findings))


def _load(path: str | None, overrides: list[str]) -> Config:
    if path is None or "=" in path:
        return load_config(quickstart_config(), [item for item in (path, *overrides) if item is not None])
    return load_config(path, overrides)


def examine(config: Config) -> Examination:
    """Collect the facts of this machine and of the run, and check them."""
    from hsray.doctor.checks import check_driver, check_node
    from hsray.doctor.collect import collect_node
    from hsray.doctor.inputs import examine_run
    from hsray.doctor.subject import make_subject

    subject, findings = make_subject(config)
    facts = collect_node(subject.config)
    run = examine_run(subject)
    stored = facts.store.run
    longest = max((*run.inputs.lengths, stored.largest_prompt_tokens if stored else 0), default=0)
    subject = replace(subject, known_longest=longest)
    # With a cluster, replicas run on its nodes; a driver's machine may have no GPU.
    is_place = subject.config.engine.is_cpu or bool(facts.gpus) or not run.ray_address
    machine = [*check_node(subject, facts, is_place=is_place), *check_driver(subject, facts, run)]
    if not is_place:
        machine.append(ok("gpus", f"none on this machine; --nodes looks at those of {run.ray_address}"))
    return Examination(subject, facts, run, findings, machine)


def add_nodes(found: Examination) -> None:
    """Collect and check the facts of every node of the cluster."""
    from hsray.cluster.survey import ask_every_node
    from hsray.doctor.collect import collect_node
    from hsray.doctor.nodes import Node, check_nodes

    config = found.subject.config
    gpus = 0 if config.engine.is_cpu else config.engine.tp_size
    try:
        answers = ask_every_node(config.cluster, gpus, functools.partial(collect_node, config), _NODES_SECONDS)
    except ConfigError as err:
        found.by_node[""] = [fail("cluster", str(err), "name a running cluster in cluster.address or RAY_ADDRESS")]
        return
    found.nodes = [
        Node(
            f"{answer.address}/{answer.node_id[:6]}",
            answer.node_id,
            answer.gpus,
            answer.slots,
            answer.answer,
            answer.error,
        )
        for answer in answers
    ]
    found.by_node = check_nodes(found.subject, found.nodes)


def add_bench(found: Examination) -> None:
    """Measure, and say what will be the limit."""
    from hsray.doctor.bench import bench

    lengths = found.run.inputs.lengths or (512,)
    if found.subject.model is None or not found.subject.per_token:
        found.bench = [fail("bench", "the model or its sites are not known", "correct what failed above first")]
        return
    found.figures, found.bench = bench(found.subject, found.facts, found.run, lengths, found.nodes)


def show(console: Console, found: Examination) -> None:
    from hsray.doctor.report import show_findings, show_nodes

    if found.configuration:
        show_findings(console, "Configuration", found.configuration)
    show_findings(console, f"This machine ({found.facts.host})", found.machine)
    if found.nodes:
        show_nodes(console, found.nodes, found.by_node)
    elif found.by_node:
        show_findings(console, "Nodes", found.by_node[""])


def show_bench(console: Console, found: Examination) -> None:
    from hsray.doctor.report import show_findings

    show_findings(console, "Measured", found.bench)


def _on_sigterm(number: int, _frame: object) -> None:
    """As Ctrl-C: scratch objects are deleted, and processes that were asked end."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(main())
