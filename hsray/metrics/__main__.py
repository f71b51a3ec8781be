"""`python -m hsray.metrics DIR`: the dashboard, the alert rules and a Prometheus configuration, as files."""

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hsray.errors import ExitCode

DASHBOARD = "hsray_grafana_dashboard.json"
ALERTS = "hsray_alerts.yml"
PROMETHEUS = "prometheus.yml"


def provision(directory: Path) -> list[Path]:
    """Write the three files, replacing what was there under their names. Returns their paths. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name in (DASHBOARD, ALERTS, PROMETHEUS):
        path = directory / name
        path.write_bytes(files("hsray.metrics").joinpath("provision", name).read_bytes())
        written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 4 if the folder cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m hsray.metrics", description=__doc__)
    parser.add_argument("directory", type=Path, help="folder for them; made if it is not there")
    args = parser.parse_args(argv)
    try:
        written = provision(args.directory)
    except OSError as err:
        print(f"{args.directory}: {err.strerror}: choose a folder that can be written", file=sys.stderr)  # noqa: T201
        return int(ExitCode.CONFIG)
    folder = args.directory.resolve()
    print(  # noqa: T201
        "\n".join(
            [
                *(f"wrote {path}" for path in written),
                "",
                "On the head, before `ray start --head`, so that Ray's Grafana configuration names this folder:",
                f"  export RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR={folder}",
                "Then, on the head (or see docs/metrics.md for one that runs elsewhere):",
                f"  prometheus --config.file={folder / PROMETHEUS} --storage.tsdb.path=/var/tmp/hsray-prometheus",
                "  grafana-server --homepath /usr/share/grafana "
                "--config /tmp/ray/session_latest/metrics/grafana/grafana.ini",
            ]
        )
    )
    return int(ExitCode.COMPLETE)


if __name__ == "__main__":
    sys.exit(main())
