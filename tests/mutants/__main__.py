"""`python -m tests.mutants FOLDER`: one engine over two ranks; for every fault, what stops the replica.

Prints one JSON object: fault -> what the self-test said (empty: nothing), and fault -> what became of the prompts of
a lease. Runs in a process of its own: SGLang's shutdown kills every child of its process.
"""

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from hsray.capture.cpu import cpu_environment
from hsray.checkpoint import read_facts
from hsray.config import SpoolConfig
from hsray.engine import EngineSpec
from hsray.errors import SelfTestError
from hsray.plan import build_plan, load_plan
from hsray.probe import self_test
from hsray.records import Prompt
from hsray.replica import Replica
from hsray.replica_spec import ReplicaSpec
from hsray.schema import bytes_per_token, shard_metadata
from hsray.sites import resolve_sites
from hsray.store import open_store
from tests.mutants.engine import FAULT_FILE, STATE_FAULTS
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

SELF_TEST_FAULTS = ["", *STATE_FAULTS, "layer off by one", "rank-local partial sums", "states of the step before"]
# Seen in every prompt, also long after the self-test.
PROMPT_FAULTS = ["", "NaN in an aux row", "NaN in a final row", "zero aux rows", "zero final rows", "other prompt ids"]
SITES = ["resid_pre_2", "resid_pre_4", "final_prenorm", "final_postnorm"]


def main(folder: Path) -> dict[str, Any]:
    fault_file = folder / "fault"
    fault_file.write_text("")
    os.environ[FAULT_FILE] = str(fault_file)
    cpu_environment(os.environ)  # before anything looks for torchvision
    model = make_tiny_model("llama", folder / "model")
    facts = read_facts(model)
    sites = resolve_sites(SITES, facts.num_layers)
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(n, f"p{n}", rng.integers(3, VOCAB_SIZE, 9).astype(np.int32), np.ones(9, np.uint8), "", n)
        for n in range(3)
    ]
    store = open_store(str(folder / "run"))
    record = build_plan(
        prompts,
        store,
        bytes_per_token=bytes_per_token(4, facts.hidden_size, "float32"),
        shard_bytes=1 << 20,
        max_lease_prompts=9,
    )
    plan = load_plan(store, record)
    engine = EngineSpec(
        str(model), args={"device": "cpu", "tp_size": 2, "chunked_prefill_size": 4096, "max_total_tokens": 8192},
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if (os.cpu_count() or 1) > 1 else {}, is_cpu=True,
    )  # fmt: skip
    spec = ReplicaSpec(
        run_url=store.url,
        storage_options={},
        commit="conditional",
        retry_seconds=60,
        engine=engine,
        facts=facts,
        sites=tuple(site.name for site in sites),
        dtype="float32",
        spool=SpoolConfig(path=str(folder / "spool"), bytes=32 << 20),
        shard_bytes=1 << 20,
        shard_metadata=shard_metadata(
            sites=sites, hidden_size=facts.hidden_size, dtype="float32", run_id="mutants", model="tiny"
        ),
        largest_prompt_tokens=9,
        start_timeout_seconds=120,
        request_timeout_seconds=60,
        log_dir=str(folder / "logs"),
        engine_class="tests.mutants.engine:MutantEngine",
    )
    replica = Replica(spec, "mutant")
    tested, lease = {}, {}
    for fault in SELF_TEST_FAULTS:
        fault_file.write_text(fault)
        try:
            self_test(replica.in_flight, replica.oracle)
            tested[fault] = ""
        except SelfTestError as err:
            tested[fault] = str(err)
    for fault in PROMPT_FAULTS:
        fault_file.write_text(fault)
        (only,) = plan.leases
        outcome = replica.run_lease(only, uuid.uuid4().hex[:8], plan.refs[only.root_id])
        lease[fault] = [failure.message for failure in outcome.failures]
    passed = replica.facts().self_test_passed
    replica.shutdown()
    return {"self_test": tested, "lease": lease, "passed": passed}


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(main(Path(sys.argv[1]))), file=answer)
