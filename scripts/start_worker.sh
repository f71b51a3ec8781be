#!/usr/bin/env bash
# Joins this machine to a Ray cluster for hsray. Further arguments go to `ray start`, and win over what is set here.
#
#   scripts/start_worker.sh HEAD[:PORT]                              GPUs as Ray finds them
#   scripts/start_worker.sh HEAD --num-gpus=8 --labels=hsray.io/pool=bw
#   scripts/start_worker.sh HEAD --block                             stay in the foreground (systemd)
#
# Ray refuses a node with another version of Ray or Python than the head's. With a tmpfs of its own for the spool, run
# clusters/mount_spool.sh before. Environment: clusters/node_env.sh.
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0"; exit 0 ;;
  '' | -*) echo "usage: scripts/start_worker.sh HEAD[:PORT] [options of ray start]" >&2; exit 2 ;;
  *:*) head=$1 ;;
  *) head=$1:6379 ;;
esac
shift
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=clusters/node_env.sh
. "$root/clusters/node_env.sh"

exec ray start --address="$head" --metrics-export-port=8080 --object-store-memory="$HSRAY_OBJECT_STORE_BYTES" "$@"
