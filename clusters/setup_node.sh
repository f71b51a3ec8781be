#!/usr/bin/env bash
# Makes a machine ready to be a node: a virtual environment with this checkout of hsray, SGLang and Ray in the versions
# of clusters/versions.txt, and a look at its GPUs. Stops with an error where something does not fit, so that `ray up`
# stops, too. Again in seconds when nothing has changed.
#
#   clusters/setup_node.sh [--gpus N] [--compute-capability X.Y]
#
#   --gpus N                  the node must have N GPUs that work, of one kind
#   --compute-capability X.Y  and they must be of this kind: 12.0 for RTX PRO 6000 Blackwell
#
# Environment: HSRAY_VENV ($HOME/hsray-venv), PYTHON (python3; 3.11 or newer, the same on all nodes), pip's own
# (PIP_INDEX_URL, ...).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
venv=${HSRAY_VENV:-$HOME/hsray-venv}
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup_node: hsray needs Python 3.11 or newer, and $python is not: set PYTHON" >&2
  exit 1
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
cd "$root"
sources=(hsray pyproject.toml clusters/versions.txt)
stamp=$(find "${sources[@]}" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 cksum | cksum)
if [ "$(cat "$venv/.hsray-node" 2> /dev/null)" != "$stamp" ]; then
  rm -f "$venv/.hsray-node"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$here/versions.txt" "${root}[gpu]"
  echo "$stamp" > "$venv/.hsray-node"
fi
exec "$venv/bin/python" "$here/check_node.py" "$@"
