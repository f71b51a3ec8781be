"""Checks of installed versions: Python, hsray's requirements, SGLang against the tested table. Pure."""

import difflib
from collections.abc import Iterator

from hsray.capture.tested import TESTED_VERSIONS, untested
from hsray.doctor.facts import NodeFacts
from hsray.doctor.finding import Finding, fail, ok, warn
from hsray.doctor.subject import Subject
from hsray.engine import unknown_arguments

_OLDEST_PYTHON = (3, 11)


def check_python(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    version = tuple(int(part) for part in node.python.split(".")[:2])
    if version < _OLDEST_PYTHON:
        yield fail("python", node.python, "install Python 3.11 or newer, the same version on every node")
    else:
        yield ok("python", f"{node.python}, {node.cpus} CPUs")


def check_packages(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    if node.unmet:
        yield fail(
            "packages",
            f"hsray {node.packages.get('hsray', '')} needs {'; '.join(node.unmet)}",
            "install hsray with its requirements into this environment, on every node",
        )
        return
    shown = ("hsray", "ray", "torch", "transformers", "obstore")
    yield ok("packages", ", ".join(f"{name} {node.packages[name]}" for name in shown if name in node.packages))


def check_sglang(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    version = node.sglang.version or node.packages.get("sglang", "")
    if not version:
        yield fail(
            "sglang", f"not installed ({node.sglang.error})", "pip install 'hsray[gpu]' (no GPU: scripts/install)"
        )
        return
    if node.sglang.error:
        yield fail(
            "sglang",
            f"{version} cannot be imported: {node.sglang.error}",
            "install the packages that this version pins (pip install 'hsray[gpu]'), into a fresh environment",
        )
        return
    architecture = subject.model.architecture if subject.model else ""
    problem = untested(version, architecture) if architecture else None
    if problem is None:
        yield ok("sglang", f"{version}; tested with {architecture or 'models: ' + ', '.join(TESTED_VERSIONS)}")
    elif subject.config.engine.allow_untested:
        yield warn("sglang", problem.partition(". Set ")[0], "engine.allow_untested is set: the self-test decides")
    else:
        yield fail(
            "sglang",
            problem.partition(". Set ")[0],
            "use a tested version and model, or set engine.allow_untested: true to let the self-test decide",
        )


def check_engine_arguments(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    args, known = subject.config.engine.args, node.sglang.arguments
    if not known:
        return
    for name in unknown_arguments(args, known):
        near = difflib.get_close_matches(name, known, n=1)
        yield fail(
            "engine arguments",
            f"engine.args.{name} is not an argument of SGLang {node.sglang.version}",
            f"write {near[0]}" if near else "remove it",
        )
