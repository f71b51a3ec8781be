"""`--bench`: where to measure, and what the figures mean for the run."""

import functools
from collections.abc import Sequence

from hsray.doctor.facts import NodeFacts, RunFacts
from hsray.doctor.finding import Finding, fail, ok, warn
from hsray.doctor.forecast import Rates, forecast, judge
from hsray.doctor.measure import Measured, measure
from hsray.doctor.nodes import Node
from hsray.doctor.subject import Subject
from hsray.records import JsonDict
from hsray.units import format_bytes as size
from hsray.units import format_seconds

_NODE_SECONDS = 300.0


def bench(
    subject: Subject, facts: NodeFacts, run: RunFacts, lengths: Sequence[int], nodes: Sequence[Node]
) -> tuple[JsonDict, list[Finding]]:
    """Measure on the first node that a replica fits on, or here if no nodes were looked at."""
    config = subject.config
    place = next((node for node in nodes if node.slots and node.facts is not None), None)
    if place is not None and place.facts is not None:
        from hsray.cluster.survey import run_on_node

        gpus = 0 if config.engine.is_cpu else config.engine.tp_size
        task = functools.partial(measure, config, list(lengths), with_engine=True)
        measured = run_on_node(
            config.cluster, place.node_id, gpus, task, config.engine.start_timeout_seconds + _NODE_SECONDS
        )
        where, replicas, facts = place.name, place.slots, place.facts
    else:
        has_device = config.engine.is_cpu or len(facts.gpus) >= config.engine.tp_size
        measured = measure(config, lengths, with_engine=has_device)
        where, replicas = "this machine", max(1, subject.replicas_on(len(facts.gpus)))
    places = [node for node in nodes if node.slots]
    tokens = facts.store.run.num_tokens if facts.store.run else sum(run.inputs.lengths) if run.inputs.is_all else None
    stored = subject.stored_per_token(run.inputs.shares)
    found = forecast(
        Rates(measured.prefill, measured.device_copy, measured.spool, measured.store),
        bytes_per_token=subject.per_token,
        stored_per_token=stored,
        replicas=replicas,
        nodes=max(1, len(places)),
        tokens=tokens,
    )
    findings = describe(measured, where, is_cpu=config.engine.is_cpu)
    if found is not None:
        findings += judge(found, stored, tokens, "python -m hsray.plan CONFIG")
    return {"measured": measured.to_json(), "forecast": found.to_json() if found else None}, findings


def describe(measured: Measured, where: str, *, is_cpu: bool) -> list[Finding]:
    """What was measured, and what could not be."""
    findings = []
    if measured.prefill is not None:
        findings.append(
            ok(
                "prefill",
                f"{measured.prefill:,.0f} tokens/s of one replica on {where}, nothing captured ({measured.tokens:,} "
                f"tokens in {measured.seconds:.1f} s); the engine started in {format_seconds(measured.load_seconds)}",
            )
        )
    elif "prefill" in measured.errors:
        findings.append(
            fail("prefill", measured.errors["prefill"], "the run's engine would fail alike: correct what the log says")
        )
    else:
        findings.append(
            warn(
                "prefill",
                f"not measured: {where} has not the GPUs for a replica",
                "add --nodes, or run it on a GPU node",
            )
        )
    if measured.device_copy is not None:
        findings.append(
            ok("copies off the GPU", f"{size(measured.device_copy)}/s from one GPU into a registered arena")
        )
    elif "device_copy" in measured.errors and not is_cpu:
        findings.append(
            fail(
                "copies off the GPU",
                measured.errors["device_copy"],
                "the capture needs page-locked shared memory: look at the driver, and at the limits of the container",
            )
        )
    for name, rate, what in (
        ("shared memory", measured.spool, "of one thread into an arena"),
        ("store", measured.store, "in four objects at once"),
    ):
        key = "spool" if name == "shared memory" else name
        if rate is not None:
            findings.append(ok(name, f"{size(rate)}/s {what}"))
        elif key in measured.errors:
            findings.append(fail(name, measured.errors[key], "correct what the message names"))
    return findings
