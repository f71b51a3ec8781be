"""Nodes side by side, what is printed, and what measured rates mean."""

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from hsray.doctor.bench import describe
from hsray.doctor.facts import Disk, NodeFacts
from hsray.doctor.finding import Finding, fail, ok, warn
from hsray.doctor.forecast import Rates, forecast, judge
from hsray.doctor.measure import Measured
from hsray.doctor.nodes import Node, check_nodes, differences
from hsray.doctor.report import show_findings, show_nodes, show_verdict, to_json
from tests.doctor_facts import GIB, gpus, node, subject

HEALTHY = node()


def nodes(*facts: NodeFacts | None, gpus: int = 8, slots: int = 4) -> list[Node]:
    return [
        Node(f"10.0.0.{n}", f"id{n}", gpus, slots, fact, "" if fact else "no answer within 400 s")
        for n, fact in enumerate(facts, start=1)
    ]


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings if finding.level != "ok"]


def test_equal_nodes_do_not_differ() -> None:
    found = check_nodes(subject(), nodes(HEALTHY, HEALTHY, HEALTHY))

    assert [bad(findings) for findings in found.values()] == [[], [], [], []]
    assert [finding.seen for finding in found[""]] == [
        "3 nodes with room for 12 replicas",
        "none among 3 nodes",
    ]


def spool(free: int) -> Disk:
    return dataclasses.replace(HEALTHY.spool, free=free)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"python": "3.12.4"}, "warn", "python: 3.12.3 on 10.0.0.1, 10.0.0.2; 3.12.4 on 10.0.0.3"),
        ({"packages": {**HEALTHY.packages, "hsray": "0.2.0"}}, "fail", "hsray"),
        ({"packages": {**HEALTHY.packages, "ray": "2.61.0"}}, "fail", "ray"),
        ({"packages": {**HEALTHY.packages, "sglang": "0.5.17"}}, "fail", "sglang"),
        ({"packages": {**HEALTHY.packages, "torch": "2.9"}}, "warn", "torch"),
        ({"packages": {k: v for k, v in HEALTHY.packages.items() if k != "transformers"}}, "warn", "transformers: "),
        ({"model": dataclasses.replace(HEALTHY.model, digest="other")}, "fail", "model"),
        ({"gpus": gpus(name="NVIDIA H100")}, "warn", "gpu: NVIDIA H200 on 10.0.0.1, 10.0.0.2; NVIDIA H100"),
        ({"gpus": gpus(driver="570.1")}, "warn", "driver"),
        ({"gpus": gpus(4)}, "warn", "gpus: 8 on"),
        ({"memory_free": 900 * GIB}, "warn", "free memory: less than the usual 2.04 TB on 10.0.0.3"),
        ({"spool": spool(100 * GIB)}, "warn", "free shared memory"),
        ({"gpus": (*gpus(7), dataclasses.replace(gpus(1)[0], index=7, free=GIB))}, "warn", "fullest GPU"),
        ({"began": 1100.0, "ended": 1110.0}, "warn", "10.0.0.3 is at least 90 s ahead of 10.0.0.1"),
    ],
)
def test_what_differs_is_told_with_the_nodes(changes: dict[str, Any], level: str, words: str) -> None:
    (found,) = differences(nodes(HEALTHY, HEALTHY, node(**changes)))

    assert found.level == level
    assert words in found.seen


def test_a_head_without_gpus_is_no_place_and_no_difference() -> None:
    head = Node("10.0.0.9", "id9", 0, 0, node(gpus=(), memory_free=GIB, packages={"hsray": "0.1.0", "ray": "2.60.0"}))

    found = check_nodes(subject(), [head, *nodes(HEALTHY, HEALTHY)])

    assert [bad(findings) for findings in found.values()] == [[], [], [], []]


def test_a_node_that_does_not_answer_is_a_failure() -> None:
    found = check_nodes(subject(), nodes(HEALTHY, None))

    assert bad(found["10.0.0.2"]) == [("node", "fail")]
    assert "no answer" in found["10.0.0.2"][0].seen


@pytest.mark.parametrize(("given", "level"), [(16, "fail"), (4, "warn")])
def test_ray_gives_away_the_gpus_that_there_are(given: int, level: str) -> None:
    found = check_nodes(subject(), nodes(HEALTHY, gpus=given))

    assert bad(found["10.0.0.1"]) == [("gpus of ray", level)]


def test_a_cluster_without_a_place_is_a_failure() -> None:
    found = check_nodes(subject(), nodes(HEALTHY, slots=0))

    assert bad(found[""]) == [("capacity", "fail")]
    assert bad(check_nodes(subject(cluster={"replicas": 9}), nodes(HEALTHY, HEALTHY))[""]) == [("capacity", "warn")]


# --------------------------------------------------------------- printed

FINDINGS = [ok("python", "3.12"), warn("ports", "few [red]", "widen them"), fail("gpus", "none", "add some")]


def printed(terminal: bool, *calls: Any, width: int = 60) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=width, color_system=None)
    for function, *arguments in calls:
        function(console, *arguments)
    return text.getvalue()


def test_a_log_gets_one_plain_line_for_each_finding_and_what_to_do() -> None:
    assert printed(False, (show_findings, "This machine", FINDINGS)).splitlines() == [
        "This machine:",
        "OK    python: 3.12",
        "WARN  ports: few [red]",
        "      do: widen them",
        "FAIL  gpus: none",
        "      do: add some",
    ]


def test_a_terminal_gets_a_table_with_nothing_cut_off() -> None:
    long = fail("gpus", "none " * 40, "add some " * 20)

    text = printed(True, (show_findings, "This machine", [*FINDINGS, long]))

    assert "few [red]" in text
    assert text.count("none") == 41
    assert text.count("add some") == 21
    assert max(map(len, text.splitlines())) <= 60


def test_what_many_nodes_share_is_said_once() -> None:
    many = nodes(*[node(gpus=gpus(7)) for _ in range(9)], HEALTHY)
    found = check_nodes(subject(), many)

    text = printed(False, (show_nodes, many, found), width=200)

    assert text.count("1 idle") == 1
    assert "10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4, 10.0.0.5, 10.0.0.6 and 3 more: 7 x NVIDIA H200" in text
    table = text.splitlines()[:11]
    assert table[0].split()[:3] == ["node", "host", "replicas"]
    assert [line.split()[-1] for line in table[1:]] == ["fail"] * 9 + ["ok"]
    assert "all 2 nodes: " in printed(False, (show_nodes, many[:2], check_nodes(subject(), many[:2])))


def test_a_node_without_facts_has_a_row() -> None:
    found = check_nodes(subject(), nodes(HEALTHY, None))

    for terminal in (False, True):
        text = printed(terminal, (show_nodes, nodes(HEALTHY, None), found), width=200)
        assert "no answer within 400 s" in text


def test_the_verdict_counts() -> None:
    assert "1 failures, 1 warnings, 1 checks in order" in printed(False, (show_verdict, FINDINGS))
    assert "Nothing stands in the way: 0 failures" in printed(False, (show_verdict, FINDINGS[:2]))


def test_json_holds_everything_and_is_json() -> None:
    many = nodes(HEALTHY, None)
    findings = [("", FINDINGS[0]), ("10.0.0.1", FINDINGS[2])]

    data = json.loads(json.dumps(to_json(findings, HEALTHY, many, {"a": 1})))

    assert data["exit_code"] == 4
    assert data["findings"][1] == {
        "node": "10.0.0.1",
        "check": "gpus",
        "level": "fail",
        "seen": "none",
        "advice": "add some",
    }
    assert data["facts"]["gpus"][0]["capability"] == [9, 0]
    assert data["nodes"]["10.0.0.2"] == {"error": "no answer within 400 s"}


# -------------------------------------------------------------- forecast


ONE: dict[str, Any] = {"replicas": 1, "nodes": 1, "tokens": None}


def test_the_slowest_stage_is_the_limit() -> None:
    found = forecast(
        Rates(prefill=40_000, device_copy=50e9, spool=5e9, store=2e9),
        bytes_per_token=32_768,
        stored_per_token=32_768,
        replicas=4,
        nodes=2,
        tokens=1_000_000_000,
    )

    assert found is not None
    assert [name for name, _ in found.limits] == ["store", "prefill", "copies off the GPU"]
    assert found.limits[0][1] == pytest.approx(2e9 / 32_768)
    assert found.hours == found.hours_per_billion == pytest.approx(1e9 / (2 * 2e9 / 32_768) / 3600)
    bottleneck, time = judge(found, 32_768, 1_000_000_000, "plan")
    assert bottleneck.level == "warn"
    assert "store. " in bottleneck.seen
    assert "wait 62% of the time" in bottleneck.seen
    assert "1,000,000,000 tokens" in time.seen


def test_a_store_that_keeps_up_is_no_warning() -> None:
    found = forecast(
        Rates(40_000, None, 5e9, 20e9),
        bytes_per_token=32_768,
        stored_per_token=32_768,
        replicas=1,
        nodes=1,
        tokens=None,
    )

    assert found is not None
    bottleneck, time = judge(found, 32_768, None, "python -m hsray.plan CONFIG")
    assert (bottleneck.level, bottleneck.seen.partition(".")[0]) == ("ok", "prefill")
    assert "python -m hsray.plan CONFIG --tokens-per-second 40000 --replicas 1" in time.seen


def test_codecs_and_selections_spare_the_store_not_the_copies() -> None:
    made = subject(capture={"codec": "fp8-token", "tokens": {"default": "loss"}}, prompts={"empty_mask": "reject"})
    stored = made.stored_per_token({"all": 1.0, "loss": 0.25})

    assert stored == pytest.approx(made.per_token / 2 * 0.25, rel=0.01)
    found = forecast(
        Rates(None, 1e9, 5e9, 1e9),
        bytes_per_token=made.per_token,
        stored_per_token=stored,
        replicas=1,
        nodes=1,
        tokens=None,
    )
    assert found is not None
    limits = dict(found.limits)
    assert limits["store"] / limits["copies off the GPU"] == pytest.approx(8, rel=0.01)


def test_without_prefill_the_other_stages_are_compared() -> None:
    found = forecast(
        Rates(None, None, 5e9, 1e9), bytes_per_token=1000, stored_per_token=1000, replicas=1, nodes=1, tokens=None
    )

    assert found is not None
    assert "Prefill was not measured" in judge(found, 1000, None, "plan")[0].seen
    assert forecast(Rates(None, None, None, None), bytes_per_token=1, stored_per_token=1, **ONE) is None


def test_what_could_not_be_measured_is_told() -> None:
    nothing = Measured(None, None, None, None, 0.0, 0, 0.0, {})
    errors = {"prefill": "CUDA out of memory", "device_copy": "error 1", "spool": "no room", "store": "denied"}

    assert bad(describe(nothing, "here", is_cpu=False)) == [("prefill", "warn")]
    broken = describe(dataclasses.replace(nothing, errors=errors), "here", is_cpu=False)
    assert bad(broken) == [(n, "fail") for n in ("prefill", "copies off the GPU", "shared memory", "store")]
    whole = describe(Measured(10.0, 5e9, 5e9, 1e9, 30.0, 150, 15.0, {}), "here", is_cpu=False)
    assert bad(whole) == []
    assert "10 tokens/s of one replica on here" in whole[0].seen
