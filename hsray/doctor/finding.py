"""A finding: what was looked at, how it is, what was seen, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hsray.errors import ExitCode

Level = Literal["ok", "warn", "fail"]
STORE = "store"
"""The check whose failure is exit code 5."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`fail` would stop the run, `warn` may make it slow, odd or hard to follow. Those two always say what to do."""

    check: str
    level: Level
    seen: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level != "ok" and not self.advice:
            raise ValueError(f"{self.check}: a finding that is not ok must say what to do")


def ok(check: str, seen: str) -> Finding:
    return Finding(check, "ok", seen)


def warn(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, "warn", seen, advice)


def fail(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, "fail", seen, advice)


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """5 if the store is unusable, else 4 if something else would stop the run, else 0."""
    failed = {finding.check for finding in findings if finding.level == "fail"}
    if STORE in failed:
        return ExitCode.STORE
    return ExitCode.CONFIG if failed else ExitCode.COMPLETE
