"""Sees which rows of which prompts each step of a real engine held, so that a case proves what it claims.

The scheduler process writes one line of JSON a step: its pid, and `[serial, num_tokens, start, count]` for each
prompt of the run in it.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsray.capture import launch
from hsray.capture.settings import CaptureSettings
from hsray.channel import RUN_LAYOUT
from hsray.engine import EngineSpec, SGLangEngine

_STEPS_FILE = "HSRAY_MATRIX_STEPS"


class WatchedEngine(SGLangEngine):
    """The real engine; `EngineSpec.env` names the file."""

    def __init__(self, spec: EngineSpec, capture: CaptureSettings) -> None:
        launch.run_scheduler_process = run_watched_scheduler_process
        super().__init__(spec, capture)


def watch_environment(file: Path) -> dict[str, str]:
    return {_STEPS_FILE: str(file)}


_run_scheduler_process = launch.run_scheduler_process


def run_watched_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """In the scheduler process: note what each step hands to the writer."""
    from hsray.capture.writer import StateWriter

    put = StateWriter.put
    file = os.open(os.environ[_STEPS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def put_and_note(self: StateWriter, spans: Any, *rest: Any, **named: Any) -> None:
        of_run = [span for span in spans if span.request.layout == RUN_LAYOUT]
        if of_run:
            rows = [[s.request.serial, s.request.num_tokens, s.start, s.count] for s in of_run]
            os.write(file, json.dumps([os.getpid(), rows]).encode() + b"\n")
        put(self, spans, *rest, **named)

    StateWriter.put = put_and_note  # type: ignore[method-assign]
    return _run_scheduler_process(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Steps:
    """What a batch of prompts, sent in this order, looked like in the engine.

    Attributes:
        parts: for each prompt, in how many steps it was.
        most_prompts: prompts in the fullest step.
        leaders: scheduler processes that held rows.
        num_steps: steps with rows of these prompts.
        most_tokens: rows of the largest step.
    """

    parts: tuple[int, ...]
    most_prompts: int
    leaders: int
    num_steps: int
    most_tokens: int

    @property
    def num_split(self) -> int:
        return sum(parts > 1 for parts in self.parts)


def read_steps(file: Path, batches: Sequence[Sequence[int]]) -> list[Steps]:
    """The steps of each batch. `batches` are the prompts' lengths in the order they were sent, batch after batch;
    a prompt that is not found, or was not whole, raises ValueError."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    parts: Counter[int] = Counter()
    rows: Counter[int] = Counter()
    lengths: dict[int, int] = {}
    for _, spans in lines:
        for serial, num_tokens, _, count in spans:
            parts[serial] += 1
            rows[serial] += count
            lengths[serial] = num_tokens
    # A replica numbers requests as it sends them.
    serials = sorted(lengths)
    sent = [length for batch in batches for length in batch]
    if [lengths[s] for s in serials] != sent or any(rows[s] != lengths[s] for s in serials):
        raise ValueError(f"{file}: the engine's steps do not hold every row of every prompt once")
    found = []
    for batch in batches:
        mine, serials = set(serials[: len(batch)]), serials[len(batch) :]
        steps = [(pid, [s for s in spans if s[0] in mine]) for pid, spans in lines]
        steps = [(pid, spans) for pid, spans in steps if spans]
        found.append(
            Steps(
                parts=tuple(parts[s] for s in sorted(mine)),
                most_prompts=max(len(spans) for _, spans in steps),
                leaders=len({pid for pid, _ in steps}),
                num_steps=len(steps),
                most_tokens=max(sum(s[3] for s in spans) for _, spans in steps),
            )
        )
    return found
