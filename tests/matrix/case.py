"""`python -m tests.matrix.case CASE MODEL_FOLDER FOLDER`: one case, in a process of its own.

SGLang's `Engine.shutdown` kills every child of its process, so an engine shares one with nothing. MODEL_FOLDER holds
`model/` and `reference.npz` of the family (`runner.prepare_family`). Writes FOLDER/result.json.
"""

import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hsray.capture.tested import untested
from hsray.checkpoint import read_facts
from hsray.config import SpoolConfig
from hsray.engine import EngineSpec
from hsray.errors import SelfTestError
from hsray.index import Segments, index_table
from hsray.plan import Plan, build_plan, load_plan
from hsray.reader import Run
from hsray.records import JsonDict, Lease, Prompt, ShardRecord
from hsray.replica import Replica
from hsray.replica_spec import ReplicaSpec
from hsray.schema import bytes_per_token, shard_metadata
from hsray.sites import Site, resolve_sites
from hsray.store import Store, open_store
from tests.matrix.cases import Case
from tests.matrix.prompts import edge_prompts, matrix_prompts
from tests.matrix.watch import Steps, read_steps, watch_environment

# First, middle and last layer, and both final states.
SITES = ["resid_pre_1", "resid_pre_3", "resid_pre_4", "resid_pre_7", "final_prenorm", "final_postnorm"]
DTYPE = "float32"
# Relative to transformers; and a prompt alone relative to the same prompt among others, where only the sizes of
# matrix products differ, and with them the order in which float32 sums are rounded (1e-6 to 2e-6).
TOLERANCE = 1e-5
ALONE_TOLERANCE = 5e-6

States = dict[int, dict[str, npt.NDArray[np.float32]]]


def run_case(case: Case, model_folder: Path, folder: Path) -> JsonDict:
    """Run the case and return what was seen. Raises what the replica raises."""
    started = time.monotonic()
    model = model_folder / "model"
    prompts = matrix_prompts()
    alone = edge_prompts(prompts)
    facts = read_facts(model)
    sites = resolve_sites(SITES, facts.num_layers)
    per_token = bytes_per_token(len(sites), facts.hidden_size, DTYPE)
    store = open_store(str(folder / "run"))
    record = build_plan(prompts, store, bytes_per_token=per_token, shard_bytes=1 << 30, max_lease_prompts=len(prompts))
    plan = load_plan(store, record)
    steps_file = folder / "steps.jsonl"
    spec = ReplicaSpec(
        run_url=store.url,
        storage_options={},
        commit="conditional",
        retry_seconds=60,
        engine=EngineSpec(
            str(model), args=case.engine_args, env={**case.engine_env, **watch_environment(steps_file)}, is_cpu=True
        ),
        facts=facts,
        sites=tuple(site.name for site in sites),
        dtype=DTYPE,
        spool=SpoolConfig(path=str(folder / "spool"), bytes=64 << 20),
        shard_bytes=1 << 30,
        shard_metadata=shard_metadata(
            sites=sites, hidden_size=facts.hidden_size, dtype=DTYPE, run_id="matrix", model=facts.name
        ),
        largest_prompt_tokens=record["largest_prompt_tokens"],
        start_timeout_seconds=240,
        request_timeout_seconds=120,
        log_dir=str(folder / "logs"),
        # What is not in the table yet is tested here.
        allow_untested=True,
        engine_class="tests.matrix.watch:WatchedEngine",
    )
    try:
        replica = Replica(spec, "matrix")
    except SelfTestError as err:
        if not case.refused:
            raise
        problems = [] if case.refused in str(err) else [f"the self-test did not name {case.refused}: {err}"]
        return {**case.to_json(), "refusal": str(err), "problems": problems}
    ready = time.monotonic()
    together = extract(replica, plan, store, sites, prompts)
    by_itself: States = {}
    for prompt in alone:
        by_itself |= extract(replica, plan, store, sites, [prompt])
    replica_facts = replica.facts()
    done = time.monotonic()
    replica.shutdown()
    lengths = [[p.num_tokens for p in prompts], *([p.num_tokens] for p in alone)]
    steps, *alone_steps = read_steps(steps_file, lengths)
    errors = relative_errors(together, load_reference(model_folder))
    alone_error = _largest(relative_errors(by_itself, {row: together[row] for row in by_itself}).values())
    return {
        **case.to_json(),
        "model_class": replica_facts.model_class,
        "sglang_version": replica_facts.sglang_version,
        "self_test": list(replica_facts.self_test_passed),
        "self_test_skipped": list(replica_facts.self_test_skipped),
        "prompts": len(prompts),
        "tokens": record["num_tokens"],
        "errors": errors,
        "worst_error": _largest(errors.values()),
        "alone_error": alone_error,
        "steps": steps.num_steps,
        "split_prompts": steps.num_split,
        "most_parts": max(steps.parts),
        "most_prompts_in_a_step": steps.most_prompts,
        "leaders": steps.leaders,
        "start_seconds": round(ready - started, 1),
        "seconds": round(done - started, 1),
        "tested": untested(replica_facts.sglang_version, replica_facts.model_class) is None,
        "problems": [
            *(["the self-test let it pass"] if case.refused else []),
            *error_problems(errors, alone_error),
            *claim_problems(case, [p.num_tokens for p in prompts], steps),
            *alone_problems(case, [p.num_tokens for p in alone], alone_steps),
        ],
    }


def extract(replica: Replica, plan: Plan, store: Store, sites: Sequence[Site], prompts: Sequence[Prompt]) -> States:
    """The states of `prompts` as a reader sees them, by row. They are in the engine together."""
    (root,) = plan.leases
    lease = Lease(root.lease_id, tuple(p.row for p in prompts), tuple(p.num_tokens for p in prompts))
    outcome = replica.run_lease(lease, uuid.uuid4().hex[:8], plan.refs[root.root_id])
    if outcome.failures:
        raise RuntimeError(f"prompts failed: {outcome.failures}")
    return read_states(store, outcome.shards, sites, replica.spec)


def read_states(store: Store, shards: Iterable[ShardRecord], sites: Sequence[Site], spec: ReplicaSpec) -> States:
    record: dict[str, Any] = {
        "sites": [{"name": site.name} for site in sites],
        "model": {"hidden_size": spec.facts.hidden_size},
        "dtype": spec.dtype,
    }
    run = Run(store, {}, record, False, Segments(index_table(shards, spec.sites), spec.sites), True)
    return {prompt.row: {site: np.array(prompt[site]) for site in spec.sites} for prompt in run}


def load_reference(model_folder: Path) -> States:
    """By row and site; `reference.npz` holds `ROW/SITE`."""
    states: States = {}
    with np.load(model_folder / "reference.npz") as arrays:
        for key in arrays.files:
            row, site = key.split("/")
            if site in SITES:
                states.setdefault(int(row), {})[site] = arrays[key]
    return states


def relative_errors(ours: States, theirs: States) -> dict[str, float]:
    """By site, the largest of any prompt: `|ours - theirs| / |theirs|`, Euclidean norms over the whole prompt, as
    `hsray.verify --parity` has it. Rows that only one side has raise KeyError."""
    if ours.keys() != theirs.keys():
        raise KeyError(f"rows {sorted(ours.keys() ^ theirs.keys())} are on one side only")

    def error(mine: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
        if mine.shape != other.shape:
            raise ValueError(f"states are {mine.shape}, expected {other.shape}")
        wanted = other.astype(np.float64)
        return float(np.linalg.norm(mine.astype(np.float64) - wanted) / np.linalg.norm(wanted))

    return {site: _largest(error(ours[row][site], theirs[row][site]) for row in theirs) for site in SITES}


def error_problems(errors: Mapping[str, float], alone_error: float) -> list[str]:
    # Written so that NaN is a problem.
    problems = [f"{site} is off by {error:.2e}" for site, error in errors.items() if not error <= TOLERANCE]
    if not alone_error <= ALONE_TOLERANCE:
        problems.append(f"prompts alone differ from the same among others by {alone_error:.2e}")
    return problems


def claim_problems(case: Case, lengths: Sequence[int], steps: Steps) -> list[str]:
    """Whether the prompts really ran as the case's name says."""
    problems = []
    if steps.most_prompts < 2:
        problems.append("no step held two prompts")
    if steps.leaders != case.dp:
        problems.append(f"{steps.leaders} ranks held prompts, not {case.dp}")
    if case.step_tokens < 0:
        if steps.num_split:
            problems.append(f"{steps.num_split} prompts were cut")
        return problems
    longer = sum(length > case.step_tokens for length in lengths)
    if steps.num_split < longer:
        problems.append(f"{steps.num_split} prompts were cut, {longer} are longer than a step")
    if case.step_tokens >= sum(lengths) and steps.num_split:
        problems.append(f"{steps.num_split} prompts were cut although a step holds them all")
    if steps.most_tokens > case.step_tokens:
        problems.append(f"a step held {steps.most_tokens} rows")
    return problems


def alone_problems(case: Case, lengths: Sequence[int], steps: Sequence[Steps]) -> list[str]:
    """A prompt alone is cut exactly where its length says."""
    problems = []
    for length, seen in zip(lengths, steps, strict=True):
        parts = -(-length // case.step_tokens) if case.step_tokens > 0 else 1
        if seen.parts != (parts,):
            problems.append(f"{length} tokens alone came in {seen.parts[0]} parts, not {parts}")
    return problems


def _largest(errors: Iterable[float]) -> float:
    # Unlike max(), numpy's does not lose a NaN.
    return float(np.max(list(errors)))


def main() -> NoReturn:
    case = Case(**{k: v for k, v in json.loads(sys.argv[1]).items() if k != "name"})
    model_folder, folder = map(Path, sys.argv[2:])
    result = run_case(case, model_folder, folder)
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    sys.stdout.flush()
    # A replica that was refused has left its engine running; the runner ends whatever is left.
    os._exit(0)


if __name__ == "__main__":
    main()
