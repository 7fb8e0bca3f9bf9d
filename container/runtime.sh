#!/bin/sh
# The second stage: what /opt/stoker needs to run, sshd, and a user without privileges.
set -eu
export DEBIAN_FRONTEND=noninteractive

apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates openssh-client openssh-server python3 python3-distutils
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /etc/ssh/ssh_host_*

useradd --create-home --uid 1000 --shell /bin/bash stoker
install -m 755 "$(dirname "$0")/stoker-sshd" /usr/local/bin/stoker-sshd
# A session by ssh, as mpirun opens it, reads this file and not the image's environment.
echo 'PATH=/opt/stoker/bin:/usr/local/bin:/usr/bin:/bin' >>/etc/environment
# The pods of an MPIJob make their host keys when they start, so nobody can know them before. Only they have names that end so.
cat >/etc/ssh/ssh_config.d/kubernetes.conf <<'END'
Host *.svc *.svc.cluster.local
  Port 2222
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
END
