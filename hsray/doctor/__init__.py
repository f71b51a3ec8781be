"""What would stop a run, before it starts: `python -m hsray.doctor CONFIG`.

Facts are collected first (`collect` and what it calls: this machine, its GPUs, the model's files, the store, the
input), into plain dataclasses (`facts`). Checks (`check_*`) are pure functions from the configuration and those facts
to findings, so each can be tested with made-up facts. `nodes` has the facts collected on every node of a Ray cluster;
`bench` measures what `forecast` turns into a bottleneck and hours.
"""

from hsray.doctor.facts import NodeFacts, RunFacts
from hsray.doctor.finding import Finding, exit_code

__all__ = ["Finding", "NodeFacts", "RunFacts", "exit_code"]
