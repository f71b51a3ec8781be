"""Is a run what it says it is? `verify_run`, and `python -m hsray.verify URL`.

The default reads records, footers and token columns, which takes seconds per thousand shards; `--full` reads
every byte; `--parity N` recomputes prompts with transformers. Everything that is wrong is reported with its
key, row and prompt, not only the first thing. The records are followed here once more, independent of the
ledger and the reader, so that a mistake in those shows.
"""

import logging
from collections.abc import Mapping
from typing import Any

from hsray.ranges import RETRY_SECONDS, RangeReader
from hsray.reader import open_run
from hsray.store import open_store
from hsray.verify.codec_report import CodecError, measure_codecs
from hsray.verify.parity import SiteParity, check_parity
from hsray.verify.records import RecordAudit, read_plan, read_record
from hsray.verify.report import CHECKS, Problem, Report
from hsray.verify.shards import ShardAudit

__all__ = [
    "CHECKS",
    "CodecError",
    "Problem",
    "Report",
    "SiteParity",
    "check_parity",
    "measure_codecs",
    "verify_run",
]

log = logging.getLogger(__name__)


def verify_run(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    full: bool = False,
    parity: int = 0,
    model_path: str | None = None,
    tolerance: float | None = None,
    codec_report: bool = False,
) -> Report:
    """Check a run. `CHECKS` says what is looked at.

    Args:
        full: read every byte.
        parity: recompute so many prompts with transformers (`parity.check_parity`).
        model_path: the model to do it with, if not the one in `hsray.json`.
        tolerance: relative error to allow, if not the default of `check_parity`.
        codec_report: measure what each codec loses on some of the states (`codec_report.measure_codecs`).

    Raises:
        ConfigError: the URL, an option or the model path is wrong.
        StoreError: the store refuses or does not answer. What is wrong with the run itself is in the report.
    """
    store = open_store(url, storage_options, retry_seconds=RETRY_SECONDS)
    report = Report(url)
    record = read_record(store, report)
    plan = None if record is None else read_plan(store, record, report)
    if record is None or plan is None:
        return report
    records = RecordAudit(store, record, plan, report)
    records.run()
    ranges = RangeReader(store, storage_options or {})
    ShardAudit(store, ranges, record, plan, records.standing, report, reopened=records.reopened, full=full).run()
    if not parity and not codec_report:
        return report
    if not report.is_ok:
        log.warning("parity and codecs are not looked at on a run with problems")
        return report
    run = open_run(url, storage_options)
    if codec_report:
        report.codecs = measure_codecs(run, model_path=model_path)
    if not parity:
        return report
    report.parity = check_parity(run, parity, model_path=model_path, tolerance=tolerance)
    for site in report.parity:
        report.count("parity", site.num_prompts)
        if not site.is_ok:
            report.add("parity", str(site))
    return report
