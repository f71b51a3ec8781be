"""`python -m hsray.verify URL`."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from hsray.errors import ConfigError, HsrayError
from hsray.log import configure_logging
from hsray.verify import verify_run


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """`--storage-option name=value ...` as `storage_options`. Raises ConfigError."""
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ConfigError(f"--storage-option {pair!r} is not of the form name=value, for example allow_http=true")
        options[name] = yaml.safe_load(value)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all right, 3 problems, 4 a wrong argument, 5 the store."""
    parser = argparse.ArgumentParser(prog="python -m hsray.verify", description="Check a run.")
    parser.add_argument("url", help="the output.url of the run")
    parser.add_argument("--full", action="store_true", help="read every byte: hashes, and that values are finite")
    parser.add_argument("--parity", type=int, default=0, metavar="N", help="recompute N prompts with transformers")
    parser.add_argument("--codec-report", action="store_true", help="measure what each codec loses on these states")
    parser.add_argument("--model", metavar="PATH", help="model for --parity and --codec-report (default: the run's)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="relative error that --parity allows")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        report = verify_run(
            args.url,
            parse_options(args.storage_option),
            full=args.full,
            parity=args.parity,
            model_path=args.model,
            tolerance=args.tolerance,
            codec_report=args.codec_report,
        )
    except HsrayError as err:
        print(f"{type(err).__name__}: {err}", file=sys.stderr)  # noqa: T201
        return err.exit_code
    print(json.dumps(report.to_json(), indent=2) if args.json else report)  # noqa: T201
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
