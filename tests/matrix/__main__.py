"""`python -m tests.matrix [NAME ...] [--set all|version|ci] [--folder DIR]`: run cases and print the table.

A NAME is part of a case's name. Exit code 1 if a case has a problem.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.matrix.cases import SETS
from tests.matrix.runner import run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --matrix", description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose name has one of these in it")
    parser.add_argument("--set", choices=sorted(SETS), default="all", help="default: all")
    parser.add_argument("--folder", type=Path, help="where models, logs and matrix.json go; default: a new one")
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    options = parser.parse_args()
    cases = [c for c in SETS[options.set] if not options.names or any(name in c.name for name in options.names)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        parser.error(f"no case has {' or '.join(options.names)} in its name; see --list")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hsray-matrix-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = run_all(cases, folder, folder / "matrix.json")
    failed = [result["name"] for result in results if result["problems"]]
    print(f"{len(results) - len(failed)} of {len(results)} cases ok; results in {folder / 'matrix.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
