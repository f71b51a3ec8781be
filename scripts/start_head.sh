#!/usr/bin/env bash
# Starts the head node of a Ray cluster for hsray. Arguments go to `ray start`, and win over what is set here.
#
#   scripts/start_head.sh --num-gpus=0                       the driver and no replicas
#   scripts/start_head.sh --num-gpus=8 --labels=hsray.io/pool=bw     a GPU node that is the head as well
#   scripts/start_head.sh --port=6380 --block                another port; stay in the foreground (systemd)
#
# Then scripts/start_worker.sh HEAD on every other node, and `python -m hsray.extract CONFIG.yaml --print-submit`.
# The dashboard and `ray job submit` are at http://127.0.0.1:8265 (from elsewhere: ssh -L 8265:127.0.0.1:8265 HEAD).
# Environment: clusters/node_env.sh, and RAY_PROMETHEUS_HOST, RAY_GRAFANA_HOST, RAY_GRAFANA_IFRAME_HOST (Grafana as
# the browser reaches it). To stop: `ray stop` on each node, which ends every Ray on that machine.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=clusters/node_env.sh
. "$root/clusters/node_env.sh"

export RAY_PROMETHEUS_HOST=${RAY_PROMETHEUS_HOST:-http://127.0.0.1:9090}
export RAY_GRAFANA_HOST=${RAY_GRAFANA_HOST:-http://127.0.0.1:3000}
export RAY_GRAFANA_IFRAME_HOST=${RAY_GRAFANA_IFRAME_HOST:-$RAY_GRAFANA_HOST}
# Ray empties its own folder of dashboards at each start, and leaves one that is named here alone: ours is beside
# Ray's in Grafana's "Ray" folder (docs/metrics.md).
export RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR=${RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR:-$HOME/hsray-grafana}
python -m hsray.metrics "$RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR" > /dev/null ||
  echo "warning: no dashboard and alert rules in $RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR" >&2

exec ray start --head --port=6379 --metrics-export-port=8080 \
  --object-store-memory="$HSRAY_OBJECT_STORE_BYTES" "$@"
