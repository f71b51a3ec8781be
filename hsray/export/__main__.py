"""`python -m hsray.export URL FORMAT OUT`."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from hsray.errors import ConfigError, ExitCode, HsrayError
from hsray.export import FORMATS, export_run
from hsray.export.job import THREADS
from hsray.export.specforge import METHODS
from hsray.log import configure_logging
from hsray.verify.__main__ import parse_options

log = logging.getLogger("hsray.export")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all exported, 3 some prompts were left out, 4 a wrong argument, 5 the store."""
    formats = "\n".join(f"  {name:<13}{meaning}" for name, meaning in FORMATS.items())
    parser = argparse.ArgumentParser(
        prog="python -m hsray.export",
        description=f"Export a run to what a trainer reads. The same command resumes.\n\nformats:\n{formats}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the output.url of the run")
    parser.add_argument("format", metavar="FORMAT", help="one of the above")
    parser.add_argument("out", metavar="OUT", help="an empty folder, or s3://bucket/prefix, gs://, az://")
    parser.add_argument("--sites", metavar="A,B,C", help="which sites (default: every residual site of the run)")
    parser.add_argument("--method", choices=METHODS, help="of specforge (default: eagle3)")
    parser.add_argument("--model-name", metavar="NAME", help="of deepspec: the target's name in its training config")
    parser.add_argument("--draft-vocab-size", type=int, metavar="N", help="of vocabulary: tokens of the draft")
    parser.add_argument("--incomplete", action="store_true", help="export what an unfinished run has committed")
    parser.add_argument(
        "--threads", type=int, default=THREADS, help="files written side by side (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE", help="of URL")
    parser.add_argument("--out-storage-option", action="append", default=[], metavar="NAME=VALUE", help="of OUT")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        if args.threads < 1:
            raise ConfigError(f"--threads: {args.threads} is not a number of files")
        result, text = export_run(
            args.url,
            args.format,
            args.out,
            sites=None if args.sites is None else [name.strip() for name in args.sites.split(",")],
            method=args.method,
            model_name=args.model_name,
            draft_vocab_size=args.draft_vocab_size,
            incomplete=args.incomplete,
            threads=args.threads,
            storage_options=parse_options(args.storage_option),
            out_storage_options=parse_options(args.out_storage_option),
        )
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)
    except KeyboardInterrupt:
        log.error("interrupted; the same command goes on")
        return int(ExitCode.INTERRUPTED)
    print(json.dumps(result.to_json()) if args.json else text)  # noqa: T201
    return int(ExitCode.INCOMPLETE if result.left_out else ExitCode.COMPLETE)


if __name__ == "__main__":
    sys.exit(main())
