"""Extract hidden states: `python -m hsray.extract CONFIG.yaml [key=value ...]`.

The same command starts and resumes a run; without arguments it runs the quickstart. Exit codes are
`hsray.errors.ExitCode`. Nothing heavy is imported before the configuration is known to be good.
"""

import argparse
import dataclasses
import logging
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsray.config import Config, load_config, redact_overrides
from hsray.crash_points import crash_point
from hsray.errors import ConfigError, ExitCode, FingerprintMismatch, HsrayError, StoreError
from hsray.log import configure_logging, first_line
from hsray.quickstart import quickstart_config

if TYPE_CHECKING:
    from hsray.checkpoint import ModelFacts
    from hsray.driver import Job
    from hsray.events import Finished
    from hsray.finish import RunSummary
    from hsray.records import JsonDict
    from hsray.store import Store

log = logging.getLogger("hsray.extract")  # also when run as __main__


def main(argv: Sequence[str] | None = None, *, engine_class: str = "hsray.engine:SGLangEngine") -> int:
    """Returns the exit code. `engine_class` is for tests: `hsray.testing:FakeEngine`."""
    parser = argparse.ArgumentParser(prog="python -m hsray.extract", description=__doc__)
    parser.add_argument("config", nargs="?", help="YAML file; without one, the quickstart runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example cluster.replicas=2")
    parser.add_argument("--print-submit", action="store_true", help="only print the `ray job submit` line for this run")
    args = parser.parse_intermixed_args(argv)
    configure_logging("info")
    try:
        if args.config is None or "=" in args.config:
            overrides = [a for a in (args.config, *args.overrides) if a is not None]
            path = None
        else:
            overrides = args.overrides
            path = args.config
        config = load_config(path or quickstart_config(), overrides)
        if args.print_submit:
            _print_submit(path, overrides, config)
            return int(ExitCode.COMPLETE)
        if path is None:
            _say(f"No configuration given: running the quickstart, {quickstart_config()}")
        configure_logging(config.log.level, config.log.format)
        return int(run(config, engine_class=engine_class))
    except HsrayError as err:
        log.error("%s", err)
        log.debug("traceback", exc_info=True)
        return int(err.exit_code)
    except KeyboardInterrupt:
        log.error("interrupted before any work was given out; the same command starts again")
        return int(ExitCode.INTERRUPTED)


def _print_submit(path: str | None, overrides: Sequence[str], config: Config) -> None:
    from hsray.submit import submit_command, submit_notes

    _say(submit_command(path, overrides, config))
    for note in submit_notes(config):
        log.warning("%s", note)


def run(config: Config, *, engine_class: str = "hsray.engine:SGLangEngine") -> ExitCode:
    """Start or resume the run of `config`, to its end or until it is stopped.

    Args:
        engine_class: `module:Class` of the engine; tests put a fake here.

    Raises:
        HsrayError: configuration, fingerprint, store or engine; the exit code is the error's.
    """
    return resume(prepare(config), engine_class)


def resume(job: "Job", engine_class: str = "hsray.engine:SGLangEngine") -> ExitCode:
    """Do what is left of a run, to its end or until it is stopped. Arguments and errors as those of `run`."""
    from hsray.driver import work
    from hsray.status.recorder import StatusRecorder

    started = time.monotonic()
    recorder: StatusRecorder | None = None
    code: ExitCode | None = ExitCode.FAILED
    detail = "ended by an error"
    try:
        if job.ledger.is_complete():
            code, summary = _judge(job, _summary(job))
            detail = "already complete"
            _say(f"Complete already: {_describe_summary(summary)} at {job.store.url}")
            return code
        command, directory = _command(sys.argv), str(Path.cwd())
        recorder = StatusRecorder(job.store, job.record["run_id"], command=command, directory=directory)
        recorder.start()
        finished = work(job, engine_class, recorder)
        recorder.finishing()
        code, detail = _conclude(job, finished)
        elapsed = time.monotonic() - started
        log.info("exit %d (%s) after %.0f s: %s", code, code.name.lower(), elapsed, first_line(detail))
        return code
    except FingerprintMismatch:
        code = None  # another run's prefix is not ours to mark
        if recorder is not None:
            recorder.abandon()
        raise
    except StoreError as err:
        code = None  # a store that does not work takes no note of it either
        if recorder is not None:
            recorder.close(err.exit_code, str(err))
        raise
    except HsrayError as err:
        code, detail = err.exit_code, str(err)
        raise
    except Exception as err:
        detail = f"{detail}: {type(err).__name__}: {err}"
        raise
    finally:
        if code is not None:
            _record_exit(job, code, detail)
            if recorder is not None:
                recorder.close(code, detail)


def _command(argv: Sequence[str]) -> str:
    """What was called, for whoever wants to resume: without secrets."""
    program = Path(argv[0])
    module = f"hsray.{program.stem}" if program.parent.name == "hsray" else str(program)
    return shlex.join(["python", *(["-m"] if module.startswith("hsray.") else []), module, *redact_overrides(argv[1:])])


# ------------------------------------------------------------------- prepare


def prepare(config: Config) -> "Job":
    """Everything before the first replica: store, model, sites, plan. Creates the run or checks that it is ours."""
    from hsray.checkpoint import model_fingerprint, read_facts
    from hsray.driver import Job
    from hsray.engine import check_arguments
    from hsray.ledger import Ledger
    from hsray.plan import build_plan, check_has_work, delete_plan, fingerprint, load_plan, run_record
    from hsray.prompts import load_tokenizer, read_prompts, tokenizer_fingerprint
    from hsray.resolve import longest_prompt, resolve_names
    from hsray.schema import bytes_per_token
    from hsray.site_storage import describe_storage, resolve_storage
    from hsray.sites import describe_sites, resolve_sites
    from hsray.store import open_store

    check_arguments(config.engine.args)
    config = resolve_names(config)
    facts = read_facts(config.model.path)
    sites = resolve_sites(config.capture.sites, facts.num_layers, config.capture.final)
    per_token = bytes_per_token(len(sites), facts.hidden_size, config.capture.dtype)
    _say(f"Model {facts.name} ({facts.architecture}): {facts.num_layers} layers, hidden size {facts.hidden_size}")
    _say(describe_sites(sites))
    _say(f"  {per_token:,} bytes per token as {config.capture.dtype}")
    storage = resolve_storage(config.capture.codec, config.capture.tokens, sites, facts.num_layers)
    for line in describe_storage(storage):
        _say(f"  {line}")

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
        storage=storage,
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
            config.prompts, tokenizer, vocab_size=facts.vocab_size, max_tokens=longest_prompt(config, facts)
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
            storage=storage,
            fingerprint=mine,
            plan=plan_record,
            inputs=inputs,
        )
        crash_point("before_run_record")
        stored = ledger.create_run(proposed)
        crash_point("after_run_record")
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
    ledger = Ledger(store, stored["run_id"])
    return Job(config, store, ledger, stored, load_plan(store, record), facts, sites, config.model.path)


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


# ------------------------------------------------------------------- the end


def _conclude(job: "Job", finished: "Finished | None") -> tuple[ExitCode, str]:
    from hsray.finish import finish_run

    if finished is None or finished.reason == "complete":
        found, accounting = job.ledger.account(job.plan.leases)
        if accounting.open:
            return ExitCode.INTERRUPTED, "dead prompts were re-opened meanwhile; the same command goes on"
        summary = finish_run(
            job.store, job.ledger, job.record, accounting, found, before_success=lambda: _write_report(job)
        )
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


def _write_report(job: "Job") -> None:
    """A page for people; the run is no less complete without it."""
    try:
        from hsray.report import write_report

        write_report(job.store, job.config.output.storage_options, time.time(), finishing=True)
    except Exception as err:
        log.warning("report.html could not be written (%s: %s)", type(err).__name__, err)
        log.warning("`python -m hsray.report %s` tries again", job.store.url)
        log.debug("traceback", exc_info=True)


def _summary(job: "Job") -> "RunSummary":
    from hsray.finish import summarize

    found, accounting = job.ledger.account(job.plan.leases)
    return summarize(job.record, accounting, found)


def _judge(job: "Job", summary: "RunSummary") -> "tuple[ExitCode, RunSummary]":
    """Complete, or complete with more dead or rejected rows than the configuration allows."""
    budgets = job.config.budgets
    dead = summary.dead / max(1, summary.committed + summary.dead)
    rejected = summary.rejected / max(1, summary.rows)
    over = dead > budgets.max_dead_fraction or rejected > budgets.max_rejected_fraction
    return (ExitCode.INCOMPLETE if over else ExitCode.COMPLETE), summary


def _describe_summary(summary: "RunSummary") -> str:
    from hsray.units import format_bytes

    text = (
        f"{summary.rows:,} rows = {summary.committed:,} committed + {summary.rejected:,} rejected + "
        f"{summary.dead:,} dead"
    )
    if summary.left:
        text += f" + {summary.left:,} left"
    return f"{text}; {summary.tokens:,} tokens, {format_bytes(summary.stored_bytes)} in {summary.shards:,} shards"


def _reading_hint(job: "Job") -> str:
    site = job.sites[0].name
    return (
        "Read it:\n"
        "    from hsray.reader import open_run\n"
        f"    run = open_run({job.store.url!r})\n"
        "    row = next(iter(run))\n"
        f"    print(len(run), row.prompt_id, row[{site!r}].shape)\n"
        f"    states = row.tensor({site!r})  # torch.{job.config.capture.dtype}"
    )


def _record_exit(job: "Job", code: ExitCode, detail: str) -> None:
    """`ray job submit` flattens exit codes to 0 and 1, so the run keeps its last one."""
    from hsray.driver import exit_record

    try:
        job.ledger.write_last_exit(exit_record(code, detail))
    except StoreError as err:
        log.warning("could not record the exit code in the run: %s", err)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's output


if __name__ == "__main__":
    code = main()
    if code == ExitCode.STORE:
        # Commits that are still being retried run in threads the interpreter would wait for.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
