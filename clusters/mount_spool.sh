#!/usr/bin/env bash
# Mounts a tmpfs for the spool (`spool.path`), apart from /dev/shm, which Ray's object store and NCCL use. Does
# nothing where it is mounted already; another size is set in place. Run before every start: mounts end with a reboot.
#
#   clusters/mount_spool.sh SIZE [DIR]            SIZE as mount takes it (200g); default DIR: /mnt/hsray
#
# SIZE is a limit, not a reservation: arenas take memory, the rest is free. `spool.bytes: auto` gives a replica six
# shards, and at most a quarter of what is free, divided by the replicas of the node. So that all get their six:
# SIZE = 4 x 6 x output.shard_bytes x replicas per node: 24 GB for one replica of eight GPUs, 192 GB for eight of one.
set -euo pipefail
size=${1:?usage: clusters/mount_spool.sh SIZE [DIR]}
dir=${2:-/mnt/hsray}
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

if mountpoint -q "$dir"; then
  kind=$(findmnt -n -o FSTYPE --mountpoint "$dir" | tail -n 1)
  [ "$kind" = tmpfs ] || { echo "$dir is a mounted $kind, not a tmpfs: choose another folder" >&2; exit 1; }
  as_root mount -o "remount,size=$size" "$dir"
else
  as_root mkdir -p "$dir"
  as_root mount -t tmpfs -o "size=$size,mode=1777,nosuid,nodev" hsray-spool "$dir"
fi
df -h --output=target,size,avail "$dir" | tail -n 1
