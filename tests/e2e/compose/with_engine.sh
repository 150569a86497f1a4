#!/usr/bin/env bash
# Run a command with a Docker engine: the one that DOCKER_HOST or the default socket reaches, else a private one, started
# here and gone afterwards with all it made.
#
#   with_engine.sh COMMAND [ARGUMENT...]
#
# Exit code: the command's; 75 when no engine could be had (not root, no Debian, no kernel support). A private engine keeps
# everything under $WORK. Where it cannot pull BASE_IMAGES, they are made from Debian packages. KEEP=1 leaves $WORK, so that
# the next run finds base image and layers.
set -euo pipefail

NO_ENGINE=75
WORK=${WORK:-$(mktemp -d "${TMPDIR:-/tmp}/stepfence-engine.XXXXXX")}
KEEP=${KEEP:-}
BASE_IMAGES=${BASE_IMAGES:-python:3.11-slim-bookworm}
STARTED=$SECONDS
daemon=
is_network_changed=

say() { printf '[engine %4ds] %s\n' $((SECONDS - STARTED)) "$*" >&2; }
give_up() { say "no Docker engine: $*"; exit $NO_ENGINE; }

has_client() { docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

install_packages() {
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  command -v iptables >/dev/null || missing+=(iptables)
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  command -v ip >/dev/null || missing+=(iproute2)
  if ((${#missing[@]})); then
    say "installing ${missing[*]}"
    apt-get update -qq >/dev/null
    # RUNLEVEL=1: the package must not start a daemon of its own.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
  has_client || install_compose
}

# Debian 12 has neither compose v2 nor buildx; Debian 13's packages of them stand alone.
install_compose() {
  say "installing compose v2 and buildx"
  local apt=$WORK/apt mirror
  mkdir -p "$apt"/{lists/partial,cache/archives/partial,debs}
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 -E '/debian/?$' || true)
  [ -n "$mirror" ] || return 1
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$apt/sources.list"
  local options=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq >/dev/null
  (cd "$apt/debs" && apt-get "${options[@]}" download -qq docker-compose docker-buildx >/dev/null)
  dpkg -i "$apt"/debs/*.deb >/dev/null
}

start_daemon() {
  local link mtu driver
  mkdir -p "$WORK"/{run,exec,data,base,config}
  export DOCKER_HOST=unix://$WORK/run/docker.sock DOCKER_CONFIG=$WORK/config
  link=$(ip -o route show default | awk '{print $5; exit}')
  mtu=$(cat "/sys/class/net/$link/mtu" 2>/dev/null || echo 1500)
  iptables-save >"$WORK/iptables.before" 2>/dev/null || true
  cat /proc/sys/net/ipv4/ip_forward >"$WORK/ip_forward.before"
  is_network_changed=1
  for driver in overlay2 fuse-overlayfs vfs; do
    # Ends with this script, however that ends.
    setsid setpriv --pdeathsig TERM dockerd --pidfile "$WORK/run/docker.pid" \
      --data-root "$WORK/data" --exec-root "$WORK/exec" --host "$DOCKER_HOST" --storage-driver "$driver" --mtu "$mtu" --log-level warn >"$WORK/dockerd.log" 2>&1 &
    daemon=$!
    for _ in $(seq 150); do
      if docker info >/dev/null 2>&1; then
        say "engine up ($driver)"
        return 0
      fi
      kill -0 "$daemon" 2>/dev/null || break
      sleep 0.2
    done
    stop_daemon
  done
  tail -5 "$WORK/dockerd.log" >&2
  return 1
}

stop_daemon() {
  [ -n "$daemon" ] || return 0
  kill "$daemon" 2>/dev/null || true
  for _ in $(seq 100); do kill -0 "$daemon" 2>/dev/null || break; sleep 0.1; done
  kill -9 "$daemon" 2>/dev/null || true
  wait "$daemon" 2>/dev/null || true
  daemon=
}

make_base_images() {
  local image
  for image in $BASE_IMAGES; do
    docker image inspect "$image" >/dev/null 2>&1 && continue
    if [ -z "${NO_PULL:-}" ] && timeout 60 docker pull -q "$image" >/dev/null 2>&1; then
      say "pulled $image"
    else
      say "making a stand-in for $image from Debian packages"
      [ -s "$WORK/base/base.tar" ] || make_root_files || return 1
      import_base_image "$image" || return 1
      say "made $image"
    fi
  done
}

# Python on Debian 12, laid out like the official image as far as our Dockerfiles look at it: python and pip on the PATH,
# pip allowed to install. Trusts what this machine trusts, so that builds and containers reach the same package index.
make_root_files() {
  local root=$WORK/base/rootfs
  rm -rf "$root"
  mmdebstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv \
    --aptopt='Apt::Install-Recommends "false"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/{doc,man,locale}/*' \
    bookworm "$root" >"$WORK/base/bootstrap.log" 2>&1 || { tail -5 "$WORK/base/bootstrap.log" >&2; return 1; }
  rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
  ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
  ln -sf /usr/bin/pip3 "$root/usr/local/bin/pip"
  cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$root/etc/pip.conf"
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar -C "$root" --numeric-owner -cf "$WORK/base/base.part" . && mv "$WORK/base/base.part" "$WORK/base/base.tar"
  rm -rf --one-file-system "$root"
}

import_base_image() {
  docker import -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' -c 'ENV LANG=C.UTF-8' \
    -c 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' -c 'CMD ["python3"]' "$WORK/base/base.tar" "$1" >/dev/null
}

clean_up() {
  local code=$?
  trap - EXIT
  set +e
  [ -z "$daemon" ] || docker ps -aq | xargs -r docker rm -f >/dev/null 2>&1
  stop_daemon
  if [ -n "$is_network_changed" ]; then
    ip link show docker0 >/dev/null 2>&1 && ip link del docker0
    restore_network
    grep -o " $WORK/[^ ]*" /proc/mounts | tac | xargs -r -n1 umount -l 2>/dev/null
  fi
  [ -n "$KEEP" ] || rm -rf --one-file-system "$WORK"
  say "done, exit code $code"
  exit $code
}

restore_network() {
  local table
  if [ -s "$WORK/iptables.before" ]; then
    iptables-restore <"$WORK/iptables.before"
  else
    for table in filter nat; do iptables -t $table -F; iptables -t $table -X; done
    iptables -P FORWARD ACCEPT
  fi
  cat "$WORK/ip_forward.before" >/proc/sys/net/ipv4/ip_forward
}

# A function, so that bash has read all of this file before anything runs.
main() {
  trap clean_up EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  if has_client && docker info >/dev/null 2>&1; then
    say "using the engine that is there"
  else
    [ "$(id -u)" = 0 ] || give_up "none is running, and starting one takes root"
    command -v apt-get >/dev/null || give_up "none is running, and it is installed from Debian packages only"
    install_packages || give_up "the packages cannot be installed"
    start_daemon || give_up "dockerd does not start here (see above)"
    make_base_images || give_up "no base image: neither a registry nor a Debian mirror answers"
  fi
  "$@"
}

main "$@"
