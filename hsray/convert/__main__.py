"""`python -m hsray.convert FORMAT IN OUT`."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from hsray.convert import FORMATS, convert_files
from hsray.errors import ConfigError, ExitCode, HsrayError
from hsray.log import configure_logging
from hsray.units import format_bytes
from hsray.verify.__main__ import parse_options

log = logging.getLogger("hsray.convert")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all converted, 3 some files were rejected, 4 a wrong argument, 5 the store."""
    parser = argparse.ArgumentParser(
        prog="python -m hsray.convert",
        description="Make a run of another tool's hidden states. The same command resumes.",
    )
    parser.add_argument("format", metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("folder", metavar="IN", help="the folder of files")
    parser.add_argument("url", metavar="OUT", help="where the run goes: a path, s3://bucket/prefix, gs://, az://")
    parser.add_argument("--model", metavar="PATH", help="directory of the model whose states they are (required)")
    parser.add_argument("--sites", metavar="A,B,C", help="what the states are, in the order of the file (required)")
    parser.add_argument("--loss-mask", choices=["all"], help="for files without a loss mask: learn every token")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE", help="of OUT")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        if args.model is None:
            raise ConfigError("--model: the files do not say which model they are of. Give its directory")
        summary = convert_files(
            args.format,
            args.folder,
            args.url,
            model=args.model,
            sites=[name.strip() for name in (args.sites or "").split(",") if name.strip()],
            mask_all=args.loss_mask == "all",
            storage_options=parse_options(args.storage_option),
        )
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)
    except KeyboardInterrupt:
        log.error("interrupted; the same command goes on")
        return int(ExitCode.INTERRUPTED)
    if args.json:
        print(json.dumps(summary.to_json()))  # noqa: T201
    else:
        size = format_bytes(summary.stored_bytes)
        print(  # noqa: T201
            f"{summary.rows:,} files = {summary.committed:,} committed + {summary.rejected:,} rejected; "
            f"{summary.tokens:,} tokens, {size} in {summary.shards:,} shards at {args.url}"
        )
        for reason, count in summary.reject_reasons.items():
            print(f"  rejected {count:,}: {reason} (rejects/ lists them)")  # noqa: T201
    return int(ExitCode.INCOMPLETE if summary.rejected else ExitCode.COMPLETE)


if __name__ == "__main__":
    sys.exit(main())
