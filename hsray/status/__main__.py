"""How a run stands, from storage alone: `python -m hsray.status URL [--watch] [--json]`.

Works before anything is committed, while drivers are at work, afterwards, and without the cluster. Exit codes: 0
complete or under way, 3 complete with more dead or rejected rows than allowed, 4 no run at this URL, 5 the store, 75
not complete and nobody at work; else the code with which the last driver ended.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence

from rich.live import Live

from hsray.errors import HsrayError
from hsray.log import configure_logging
from hsray.ranges import RETRY_SECONDS
from hsray.status.show import make_console, one_line, render, timestamp
from hsray.status.survey import RunStatus, Survey
from hsray.store import open_store
from hsray.verify.__main__ import parse_options

log = logging.getLogger("hsray.status")  # also when run as __main__


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hsray.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the output.url of the run")
    parser.add_argument("--watch", action="store_true", help="look again and again until the run ends")
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="seconds between looks (default: 5)")
    parser.add_argument("--json", action="store_true", help="for programs; with --watch one line per look")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    configure_logging("warning")
    try:
        options = parse_options(args.storage_option)
        survey = Survey(open_store(args.url, options, retry_seconds=RETRY_SECONDS))
        status = _watch(survey, args) if args.watch else survey.look(time.time())
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)
    except KeyboardInterrupt:
        return 0
    if not args.watch:
        if args.json:
            print(json.dumps(status.to_json(), indent=2))  # noqa: T201 - the command's output
        else:
            make_console().print(render(status))
    return int(status.exit_code)


def _watch(survey: Survey, args: argparse.Namespace) -> RunStatus:
    """Look until the run is complete or has been stopped. A silent driver may be replaced: that is waited for."""
    console = make_console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not args.json else None
    if live is not None:
        live.start()
    try:
        while True:
            status = survey.look(time.time())
            if live is not None:
                live.update(render(status), refresh=True)
            elif args.json:
                print(json.dumps(status.to_json()), flush=True)  # noqa: T201
            else:
                print(f"{timestamp(status.now)} {one_line(status)}", flush=True)  # noqa: T201
            if status.state in ("complete", "stopped"):
                return status
            time.sleep(max(0.5, args.interval))
    finally:
        if live is not None:
            live.stop()


if __name__ == "__main__":
    sys.exit(main())
