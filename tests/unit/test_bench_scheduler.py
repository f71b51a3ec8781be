"""The scheduler keeps a hundred replicas busy to the end, in virtual time."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_replicas_of_different_speeds_on_nodes_that_are_lost_end_together() -> None:
    command = [str(ROOT / "scripts" / "bench_scheduler"), "--prompts", "40000", "--leases", "2000", "--replicas", "100"]

    done = subprocess.run([sys.executable, *command, "--json"], capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)

    assert found["efficiency"] >= 0.97
    assert found["driver_rss_mb"] < 600
    assert found["node_losses"] > 0
    assert {"driver_cpu_us_per_prompt", "resume_seconds"} < found.keys()
    assert [straggler["node"] for straggler in found["stragglers"]] != []
