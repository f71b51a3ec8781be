"""Extract hidden states: `python -m hsray.extract CONFIG.yaml [key=value ...]`.

The same command starts and resumes a run; without arguments it runs the quickstart. Exit codes are
`hsray.errors.ExitCode`. Nothing heavy is imported before the configuration is known to be good.
"""

import argparse
import dataclasses
import logging
import os
import queue
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsray.config import Config, load_config
from hsray.errors import ConfigError, ExitCode, HsrayError, StoreError
from hsray.log import configure_logging
from hsray.quickstart import BUILTIN_PREFIX, quickstart_config, resolve_builtin

if TYPE_CHECKING:
    from hsray.checkpoint import ModelFacts
    from hsray.cluster import ClusterEvent, RayCluster
    from hsray.events import Action, Finished, ReplicaFailedToStart, ReplicaReady
    from hsray.finish import RunSummary
    from hsray.ledger import Ledger
    from hsray.plan import Plan
    from hsray.records import JsonDict
    from hsray.scheduler import Scheduler
    from hsray.sites import Site
    from hsray.store import Store

log = logging.getLogger("hsray.extract")  # also when run as __main__

# SGLang refuses prompts this close to its context length (one generated token and a reserve of its own).
ENGINE_RESERVED_TOKENS = 7
_TICK_SECONDS = 0.5
# Commits and shard deletions at once; each is one small request.
_COMMIT_THREADS = 16


def main(argv: Sequence[str] | None = None, *, engine_class: str = "hsray.engine:SGLangEngine") -> int:
    """Returns the exit code. `engine_class` is for tests: `hsray.testing:FakeEngine`."""
    parser = argparse.ArgumentParser(prog="python -m hsray.extract", description=__doc__)
    parser.add_argument("config", nargs="?", help="YAML file; without one, the quickstart runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example cluster.replicas=2")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        if args.config is None or "=" in args.config:
            overrides = [a for a in (args.config, *args.overrides) if a is not None]
            args.config = str(quickstart_config())
            _say(f"No configuration given: running the quickstart, {args.config}")
        else:
            overrides = args.overrides
        config = load_config(args.config, overrides)
        configure_logging(config.log.level)
        return int(run(config, engine_class=engine_class))
    except HsrayError as err:
        log.error("%s", err)
        log.debug("traceback", exc_info=True)
        return int(err.exit_code)
    except KeyboardInterrupt:
        log.error("interrupted before any work was given out; the same command starts again")
        return int(ExitCode.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to be worked on: stored plan, resolved model and sites."""

    config: Config
    store: "Store"
    ledger: "Ledger"
    record: "JsonDict"
    plan: "Plan"
    facts: "ModelFacts"
    sites: "tuple[Site, ...]"
    model_path: str


def run(config: Config, *, engine_class: str = "hsray.engine:SGLangEngine") -> ExitCode:
    """Start or resume the run of `config`, to its end or until it is stopped.

    Args:
        engine_class: `module:Class` of the engine; tests put a fake here.

    Raises:
        HsrayError: configuration, fingerprint, store or engine; the exit code is the error's.
    """
    started = time.monotonic()
    job = prepare(config)
    code, detail = ExitCode.FAILED, "ended by an error"
    try:
        if job.ledger.is_complete():
            code, summary = _judge(job, _summary(job))
            detail = "already complete"
            _say(f"Complete already: {_describe_summary(summary)} at {job.store.url}")
            return code
        finished = work(job, engine_class)
        code, detail = _conclude(job, finished)
        elapsed = time.monotonic() - started
        log.info("exit %d (%s) after %.0f s: %s", code, code.name.lower(), elapsed, detail)
        return code
    except StoreError as err:
        code, detail = ExitCode.STORE, str(err)
        raise
    except HsrayError as err:
        code, detail = err.exit_code, str(err)
        raise
    finally:
        _record_exit(job, code, detail)


# ------------------------------------------------------------------- prepare


def prepare(config: Config) -> Job:
    """Everything before the first replica: store, model, sites, plan. Creates the run or checks that it is ours."""
    from hsray.checkpoint import model_fingerprint, read_facts
    from hsray.engine import check_arguments
    from hsray.ledger import Ledger
    from hsray.plan import build_plan, check_has_work, delete_plan, fingerprint, load_plan, run_record
    from hsray.prompts import load_tokenizer, read_prompts, tokenizer_fingerprint
    from hsray.schema import bytes_per_token
    from hsray.sites import describe_sites, resolve_sites
    from hsray.store import open_store

    check_arguments(config.engine.args)
    config = _resolve_names(config)
    facts = read_facts(config.model.path)
    sites = resolve_sites(config.capture.sites, facts.num_layers, config.capture.final)
    per_token = bytes_per_token(len(sites), facts.hidden_size, config.capture.dtype)
    _say(f"Model {facts.name} ({facts.architecture}): {facts.num_layers} layers, hidden size {facts.hidden_size}")
    _say(describe_sites(sites))
    _say(f"  {per_token:,} bytes per token as {config.capture.dtype}")

    store = open_store(
        config.output.url,
        config.output.storage_options,
        commit=config.output.commit,
        retry_seconds=config.output.retry_seconds,
    )
    if store.url.startswith("memory:"):
        raise ConfigError("output.url: memory:// lives in one process; replicas are others. Use a path or a bucket")
    ledger = Ledger(store)
    stored = ledger.read_run()
    if stored is None and config.output.commit == "conditional":
        store.probe()

    tokenizer_path = config.model.tokenizer_path or config.model.path
    inputs = _input_hashes(config, stored)
    mine = fingerprint(
        config,
        sites=sites,
        model=model_fingerprint(config.model.path),
        tokenizer=tokenizer_fingerprint(tokenizer_path, config.prompts.chat_template),
        inputs=[(entry["url"], entry["hash"]) for entry in inputs],
    )
    if stored is not None:
        ledger.check_fingerprint(stored, {"fingerprint": mine, "format_version": stored["format_version"]})
        _say(f"Resuming run {stored['run_id']} at {store.url}")
    else:
        tokenizer = load_tokenizer(
            tokenizer_path,
            trust_remote_code=config.model.trust_remote_code,
            chat_template=config.prompts.chat_template,
        )
        items = read_prompts(
            config.prompts, tokenizer, vocab_size=facts.vocab_size, max_tokens=_max_tokens(config, facts)
        )
        plan_record = build_plan(
            items,
            store,
            bytes_per_token=per_token,
            shard_bytes=config.output.shard_bytes,
            max_lease_prompts=config.output.max_lease_prompts,
            on_progress=_plan_progress(),
        )
        check_has_work(plan_record)
        _store_norm(store, config, facts)
        proposed = run_record(
            config,
            run_id=uuid.uuid4().hex[:12],
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            facts={**dataclasses.asdict(facts), "path": config.model.path},
            sites=sites,
            fingerprint=mine,
            plan=plan_record,
            inputs=inputs,
        )
        stored = ledger.create_run(proposed)
        if stored["run_id"] != proposed["run_id"]:  # another driver was faster; its plan is the run's
            delete_plan(store, plan_record)
            ledger.check_fingerprint(stored, proposed)
    record = stored["plan"]
    _say(
        f"Plan: {record['num_rows']:,} rows = {record['num_prompts']:,} prompts + {record['num_rejects']:,} rejects; "
        f"{record['num_tokens']:,} tokens, {record['num_tokens'] * per_token / 1e9:,.2f} GB of states"
    )
    for reason, count in record["reject_reasons"].items():
        _say(f"  rejected {count:,}: {reason}")
    return Job(config, store, ledger, stored, load_plan(store, record), facts, sites, config.model.path)


def _resolve_names(config: Config) -> Config:
    """Built-in names and relative paths become absolute: replicas have another working directory."""

    def local(path: str) -> str:
        if path.startswith(BUILTIN_PREFIX):
            return resolve_builtin(path)
        return str(Path(path).expanduser().absolute()) if "://" not in path else path

    model = config.model.model_copy(
        update={
            "path": local(config.model.path),
            "tokenizer_path": local(config.model.tokenizer_path) if config.model.tokenizer_path else None,
        }
    )
    prompts = config.prompts.model_copy(update={"path": [local(path) for path in config.prompts.paths]})
    output = config.output.model_copy(update={"url": local(config.output.url)})
    return config.model_copy(update={"model": model, "prompts": prompts, "output": output})


def _max_tokens(config: Config, facts: "ModelFacts") -> int:
    """Longest prompt that will be accepted, in tokens."""
    context = int(config.engine.args.get("context_length") or facts.context_length)
    pool = int(config.engine.args.get("max_total_tokens") or context)
    limit = min(context, pool) - ENGINE_RESERVED_TOKENS
    wanted = config.prompts.max_tokens
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"prompts.max_tokens: {wanted} is more than the engine takes ({limit}: context length {context}, "
            f"KV pool {pool}, less {ENGINE_RESERVED_TOKENS}). Lower it, or set engine.args.context_length or "
            "max_total_tokens"
        )
    return wanted or limit


def _input_hashes(config: Config, stored: "JsonDict | None") -> "list[JsonDict]":
    """Content hash of every input file; one that has not changed since the run was made is not read again."""
    from hsray.prompts import hash_file, input_files

    known = {(e["url"], e["nbytes"], e["modified"]): e["hash"] for e in (stored or {}).get("inputs", [])}
    entries = []
    for file in input_files(config.prompts):
        content = known.get((file.url, file.nbytes, file.modified)) if file.modified else None
        if content is None:
            content = hash_file(file, config.prompts.storage_options)
        entries.append({"url": file.url, "nbytes": file.nbytes, "modified": file.modified, "hash": content})
    return entries


def _store_norm(store: "Store", config: Config, facts: "ModelFacts") -> None:
    from hsray.finish import store_final_norm

    if not store_final_norm(store, config.model.path, facts.norm_eps, facts.norm_kind):
        log.warning(
            "the checkpoint at %s shows no final norm weight: postnorm cannot be derived later", config.model.path
        )


def _plan_progress() -> "Callable[[Any], None]":
    last = time.monotonic()

    def show(counts: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            log.info("planning: %s rows, %s tokens, %s rejects", counts.rows, counts.tokens, counts.rejects.total())

    return show


# ---------------------------------------------------------------------- work


def work(job: Job, engine_class: str) -> "Finished | None":
    """Run replicas until the scheduler is finished. None if nothing was left to do.

    Raises:
        StoreError: the store became unusable.
    """
    from hsray.cluster import RayCluster
    from hsray.ledger import account
    from hsray.scheduler import Scheduler

    resolutions = job.ledger.resolutions()
    accounting = account(job.plan.leases, resolutions)
    if not accounting.open:
        return None
    attempts: dict[int, int] = {}
    for resolution in resolutions.values():
        for row, count in resolution.attempts.items():
            attempts[row] = max(count, attempts.get(row, 0))
    scheduler = Scheduler(
        accounting.open,
        job.config.budgets,
        starts=job.ledger.starts(),
        attempts=attempts,
        total_rows=job.plan.num_prompts,
        already_dead=len(accounting.dead),
        already_committed=len(accounting.committed),
        new_attempt_id=lambda: uuid.uuid4().hex[:12],
        prompt_id_of=lambda row: _prompt_id(job, row),
    )
    events: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
    spec = replica_spec(job, engine_class)
    gpus = 0 if job.config.engine.is_cpu else job.config.engine.tp_size
    cluster = RayCluster(job.config.cluster, spec, gpus, events.put)
    with _stop_on_signals(events) as on_signals:
        try:
            cluster.start()
            on_signals.install()  # Ray's start puts a handler of its own on SIGTERM, which aborts
            _say(f"Logs of SGLang and the replicas: {spec.log_dir}; of Ray: {cluster.session_dir()}")
            return Driver(job, scheduler, cluster, events).drive()
        finally:
            cluster.shutdown()


class Driver:
    """Feeds events to the scheduler and performs what it asks for. Owns no decision."""

    def __init__(
        self, job: Job, scheduler: "Scheduler", cluster: "RayCluster", events: "queue.SimpleQueue[ClusterEvent]"
    ) -> None:
        self.job, self.scheduler, self.cluster, self.events = job, scheduler, cluster, events
        self.pool = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="hsray-commit")
        self.finished: Finished | None = None
        self.leases_total = len(job.plan.leases)

    def drive(self) -> "Finished":
        from hsray.cluster import StoreFailed
        from hsray.events import ReplicaReady, Tick
        from hsray.progress import ProgressDisplay, Snapshot

        start = self.scheduler.progress
        done = start.prompts_committed + start.prompts_dead
        with ProgressDisplay(start.prompts_total, done, self.job.config.log.interval_seconds) as display, self.pool:
            while self.finished is None:
                try:
                    event = self.events.get(timeout=_TICK_SECONDS)
                except queue.Empty:
                    event = Tick()
                if isinstance(event, StoreFailed):
                    raise event.error
                if isinstance(event, ReplicaReady):
                    event = self.admit(event)
                for action in self.scheduler.handle(event, time.monotonic()):
                    self.perform(action)
                display.update(Snapshot(self.scheduler.progress, self.cluster.totals(), self.leases_total))
        return self.finished

    def admit(self, event: "ReplicaReady") -> "ReplicaReady | ReplicaFailedToStart":
        """Let a replica in if its engine is the one that the run began with; the first one sets it."""
        from hsray.engine import NUMBERS_DEPEND_ON
        from hsray.events import ReplicaFailedToStart
        from hsray.schema import ENGINE_KEY

        facts = next(f for f in self.cluster.facts() if f.replica == event.replica)
        mine = {
            "sglang_version": facts.sglang_version,
            "model_class": facts.model_class,
            "engine_dtype": facts.engine_dtype,
            **facts.engine,
        }
        stored = self.job.store.create_once(ENGINE_KEY, {"engine": mine}).record["engine"]
        allowed = self.job.config.engine.allow_change
        changed = [k for k in NUMBERS_DEPEND_ON if mine.get(k) != stored.get(k) and k not in allowed]
        if not changed:
            log.info("replica %s is ready on %s (log: %s)", event.replica, facts.node, facts.log_path)
            for skipped in facts.self_test_skipped:
                log.warning("replica %s: the self-test could not check %s", event.replica, skipped)
            return event
        self.cluster.retire(event.replica)
        differs = ", ".join(f"{k}: {stored.get(k)} then, {mine.get(k)} now" for k in changed)
        return ReplicaFailedToStart(
            event.replica,
            f"the engine is not the one this run began with ({differs}). Use that one, or name the keys in "
            "engine.allow_change",
            permanent=True,
        )

    def perform(self, action: "Action") -> None:
        from hsray import events as s

        match action:
            case s.SpawnReplica(place, replica):
                log.info("starting replica %s", replica)
                self.cluster.spawn(place, replica)
            case s.RetireReplica(replica, reason):
                log.warning("retiring replica %s: %s", replica, reason)
                self.cluster.retire(replica)
            case s.StartLease():
                self._submit(self._start_lease, action)
            case s.CancelLease(replica, lease_id, attempt, keep):
                self.cluster.cancel_lease(replica, lease_id, attempt, keep)
            case s.Resolve():
                if action.resolution.kind == "split":
                    self.leases_total += 1
                self._submit(self._resolve, action)
            case s.DiscardShards(keys):
                self._submit(self.job.store.delete, list(keys))
            case s.AbandonPlace(place, reason):
                log.error("giving up on place %s: %s", place, reason)
            case s.Finished():
                self.finished = action

    def _submit(self, function: "Callable[[Any], None]", argument: Any) -> None:
        from hsray.cluster import StoreFailed

        def guarded() -> None:
            try:
                function(argument)
            except StoreError as err:
                self.events.put(StoreFailed(err))
            except Exception as err:
                log.exception("unexpected error while committing")
                self.events.put(StoreFailed(StoreError(f"unexpected: {type(err).__name__}: {err}")))

        self.pool.submit(guarded)

    def _start_lease(self, action: Any) -> None:
        # The start is on record before the work begins: a lease that kills drivers is counted too.
        lease = action.lease
        info = {"attempt": action.attempt, "replica": action.replica, "time": datetime.now(UTC).isoformat()}
        self.job.ledger.record_start(lease.lease_id, action.number, info)
        self.cluster.start_lease(action.replica, lease, action.attempt, self.job.plan.refs[lease.root_id])

    def _resolve(self, action: Any) -> None:
        from hsray.events import Resolved

        standing, ours = self.job.ledger.resolve(action.resolution)
        for dead in standing.dead if ours else ():
            log.warning("prompt %s (row %d) is dead: %s", dead.prompt_id, dead.row, dead.message)
        self.events.put(Resolved(standing, ours))


def replica_spec(job: Job, engine_class: str) -> Any:
    """What every replica of the run is told."""
    from hsray.engine import EngineSpec
    from hsray.replica import ReplicaSpec
    from hsray.schema import shard_metadata

    config = job.config
    replicas = config.cluster.replicas
    per_node = 8 // config.engine.tp_size or 1
    env = dict(config.engine.env)
    if config.engine.is_cpu:
        per_node = replicas if isinstance(replicas, int) else 1
        # Ray would give each actor as many threads as it reserves CPUs: one.
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node)))
    log_dir = config.log.dir or str(Path(tempfile.gettempdir()) / "hsray-logs" / job.record["run_id"])
    return ReplicaSpec(
        run_url=job.store.url,
        storage_options=config.output.storage_options,
        commit=config.output.commit,
        retry_seconds=config.output.retry_seconds,
        engine=EngineSpec(
            model_path=job.model_path,
            trust_remote_code=config.model.trust_remote_code,
            args=config.engine.args,
            env=env,
            is_cpu=config.engine.is_cpu,
        ),
        facts=job.facts,
        sites=tuple(site.name for site in job.sites),
        dtype=config.capture.dtype,
        spool=config.spool,
        shard_bytes=config.output.shard_bytes,
        shard_metadata=shard_metadata(
            sites=job.sites,
            hidden_size=job.facts.hidden_size,
            dtype=config.capture.dtype,
            run_id=job.record["run_id"],
            model=job.facts.name,
        ),
        largest_prompt_tokens=job.plan.largest_prompt_tokens,
        start_timeout_seconds=config.engine.start_timeout_seconds,
        request_timeout_seconds=config.engine.request_timeout_seconds,
        log_dir=log_dir,
        allow_untested=config.engine.allow_untested,
        replicas_per_node=per_node,
        engine_class=engine_class,
    )


def _prompt_id(job: Job, row: int) -> str:
    """The id of a prompt no replica reported on (a crash): looked up in the stored plan."""
    from hsray.plan import read_lease_prompts

    root = next(lease for lease in job.plan.leases if lease.rows[0] <= row <= lease.rows[-1])
    return read_lease_prompts(job.store, job.plan.refs[root.lease_id], [row])[0].prompt_id


class _stop_on_signals:
    """SIGTERM and SIGINT ask the scheduler to stop; a second one ends the process at once."""

    def __init__(self, events: "queue.SimpleQueue[ClusterEvent]") -> None:
        self._events = events
        self._previous: dict[int, Any] = {}
        self._asked = False

    def __enter__(self) -> "_stop_on_signals":
        self.install()
        return self

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                previous = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread: whoever runs us handles signals
                return
            self._previous.setdefault(number, previous)

    def _on_signal(self, number: int, _frame: Any) -> None:
        from hsray.events import StopRequested

        if self._asked:
            os._exit(int(ExitCode.INTERRUPTED))
        self._asked = True
        log.warning("%s: committing what is complete; once more ends at once", signal.Signals(number).name)
        self._events.put(StopRequested())

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------- the end


def _conclude(job: Job, finished: "Finished | None") -> tuple[ExitCode, str]:
    from hsray.finish import finish_run
    from hsray.ledger import account

    if finished is None or finished.reason == "complete":
        resolutions = job.ledger.resolutions()
        summary = finish_run(job.store, job.ledger, job.record, account(job.plan.leases, resolutions), resolutions)
        code, _ = _judge(job, summary)
        _say(f"Complete: {_describe_summary(summary)}")
        _say(f"  {job.store.url}")
        _say(_reading_hint(job))
        return code, "complete"
    detail = f"{finished.reason}: {finished.detail}"
    summary = _summary(job)
    _say(f"Stopped: {detail}")
    _say(f"  {_describe_summary(summary)}; {summary.left:,} prompts left. The same command resumes.")
    if finished.reason == "stopped":
        return ExitCode.INTERRUPTED, detail
    return (ExitCode.FAILED if finished.reason == "no_capacity" else ExitCode.INCOMPLETE), detail


def _summary(job: Job) -> "RunSummary":
    from hsray.finish import summarize
    from hsray.ledger import account

    resolutions = job.ledger.resolutions()
    return summarize(job.record, account(job.plan.leases, resolutions), resolutions)


def _judge(job: Job, summary: "RunSummary") -> "tuple[ExitCode, RunSummary]":
    """Complete, or complete with more dead or rejected rows than the configuration allows."""
    budgets = job.config.budgets
    dead = summary.dead / max(1, summary.committed + summary.dead)
    rejected = summary.rejected / max(1, summary.rows)
    over = dead > budgets.max_dead_fraction or rejected > budgets.max_rejected_fraction
    return (ExitCode.INCOMPLETE if over else ExitCode.COMPLETE), summary


def _describe_summary(summary: "RunSummary") -> str:
    from hsray.progress import format_bytes

    text = (
        f"{summary.rows:,} rows = {summary.committed:,} committed + {summary.rejected:,} rejected + "
        f"{summary.dead:,} dead"
    )
    if summary.left:
        text += f" + {summary.left:,} left"
    return f"{text}; {summary.tokens:,} tokens, {format_bytes(summary.stored_bytes)} in {summary.shards:,} shards"


def _reading_hint(job: Job) -> str:
    site = job.sites[0].name
    return (
        "Read it:\n"
        "    from hsray.reader import open_run\n"
        f"    run = open_run({job.store.url!r})\n"
        "    row = next(iter(run))\n"
        f"    print(len(run), row.prompt_id, row[{site!r}].shape)\n"
        f"    states = row.tensor({site!r})  # torch.{job.config.capture.dtype}"
    )


def _record_exit(job: Job, code: ExitCode, detail: str) -> None:
    """`ray job submit` flattens exit codes to 0 and 1, so the run keeps its last one."""
    try:
        job.ledger.write_last_exit(
            {"exit_code": int(code), "name": code.name.lower(), "detail": detail, "time": datetime.now(UTC).isoformat()}
        )
    except StoreError as err:
        log.warning("could not record the exit code in the run: %s", err)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's output


if __name__ == "__main__":
    sys.exit(main())
