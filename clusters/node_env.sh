# shellcheck shell=bash
# What every Ray process of an hsray cluster inherits. Sourced by scripts/start_head.sh and scripts/start_worker.sh;
# whatever is set in the environment already is kept.
#
#   HSRAY_VENV      the virtual environment that clusters/setup_node.sh made        ($HOME/hsray-venv)
#   RAY_AUTH_MODE   disabled, or token: then ~/.ray/auth_token has to be the same file everywhere
HSRAY_VENV=${HSRAY_VENV:-$HOME/hsray-venv}
if [ -x "$HSRAY_VENV/bin/ray" ]; then
  # Jobs find this Python as `python`.
  export PATH="$HSRAY_VENV/bin:$PATH"
elif ! command -v ray > /dev/null; then
  echo "no ray in $HSRAY_VENV/bin nor in PATH: run clusters/setup_node.sh first, or set HSRAY_VENV" >&2
  exit 1
fi

# Unset, it depends on Ray's version and on a file in HOME whether nodes and jobs talk to each other. Disabled is for
# networks where everyone who reaches the ports may run code on the nodes: that is what the ports are for.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-disabled}
export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}

# A file descriptor per connection of every worker process; and arenas are page-locked for the GPU's copies.
ulimit -n 1048576 2> /dev/null || ulimit -n "$(ulimit -Hn)"
ulimit -l unlimited 2> /dev/null || true
if [ "$(ulimit -n)" != unlimited ] && [ "$(ulimit -n)" -lt 65536 ]; then
  echo "warning: only $(ulimit -n) open files allowed, Ray wants 65536 (nofile in /etc/security/limits.conf)" >&2
fi
# hsray puts nothing large into Ray's object store. Left alone, Ray takes 30% of the memory for it.
# shellcheck disable=SC2034
HSRAY_OBJECT_STORE_BYTES=2000000000
