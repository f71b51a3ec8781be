"""Write `report.html` beside the data of a run, finished or not: `python -m hsray.report URL [--output FILE]`."""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hsray.errors import ConfigError, HsrayError
from hsray.log import configure_logging
from hsray.ranges import RETRY_SECONDS
from hsray.report import write_report
from hsray.report.facts import gather
from hsray.report.page import make_page
from hsray.schema import REPORT_KEY
from hsray.store import open_store
from hsray.units import format_bytes
from hsray.verify.__main__ import parse_options

log = logging.getLogger("hsray.report")  # also when run as __main__


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hsray.report", description=__doc__)
    parser.add_argument("url", help="the output.url of the run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there instead")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    configure_logging("warning")
    try:
        options = parse_options(args.storage_option)
        store = open_store(args.url, options, retry_seconds=RETRY_SECONDS)
        if args.output is None:
            nbytes, where = write_report(store, options, time.time()), store.locate(REPORT_KEY)
        else:
            page = make_page(gather(store, options, time.time())).encode()
            nbytes, where = _write(args.output, page), str(args.output)
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)
    print(f"{where} ({format_bytes(nbytes)})")  # noqa: T201 - the command's output
    return 0


def _write(path: Path, page: bytes) -> int:
    try:
        return path.write_bytes(page)
    except OSError as err:
        raise ConfigError(f"--output: cannot write {path}: {err.strerror or err}") from err


if __name__ == "__main__":
    sys.exit(main())
