#!/bin/bash
# First process of a guest: mounts, network, then the agent. IP, LAB, AGENT and PYTHON come from the kernel's command line.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
for folder in /run /mnt /dev/shm /var/lib/nfs; do mount -t tmpfs tmpfs "$folder"; done
mount -t devtmpfs dev /dev 2>/dev/null
for word in $(cat /proc/cmdline); do
  case $word in IP=* | LAB=* | AGENT=* | PYTHON=* | REPO=*) export "${word?}" ;; esac
done
hostname "nfs-client-${IP##*.}" # the server takes clients of one name for one client
for module in nfs nfsv3 nfsv4; do modprobe -d "$LAB/modroot" "$module"; done
ip link set lo up
ip addr add "$IP/24" dev vec0
ip link set vec0 up
export PYTHONPATH=$REPO PYTHONDONTWRITEBYTECODE=1 TMPDIR=/run HOME=/run
exec "$PYTHON" "$AGENT" "$IP"
