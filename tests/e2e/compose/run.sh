#!/usr/bin/env bash
# `make compose-test`: the tests here, with the engine that is there or a private one.
#
#   WHEELS=DIRECTORY run.sh [PYTEST ARGUMENT...]
#
# WHEELS: a directory with a CPU wheel of torch for Python 3.11. With it the image of the real worker is built and tested,
# too. The wheel lies in the build context meanwhile, and not longer.
# Exit code: pytest's; 0, with a banner, where no engine can be had (REQUIRE_ENGINE=1: 75).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

NO_ENGINE=75
context=deploy/docker/wheels
what="compose and not model"
lent=()

take_back() { ((${#lent[@]} == 0)) || rm -f "${lent[@]}"; }
trap take_back EXIT

if [ -n "${WHEELS:-}" ]; then
  what=compose
  for wheel in "$WHEELS"/torch-*cp311-*"$(uname -m)".whl; do
    [ -e "$wheel" ] || { echo "no torch wheel for Python 3.11 on $(uname -m) in $WHEELS" >&2; exit 2; }
    [ ! -e "$context/${wheel##*/}" ] || continue
    lent+=("$context/${wheel##*/}")
    cp --reflink=auto "$wheel" "$context/"
  done
fi

tests/e2e/compose/with_engine.sh pytest tests/e2e/compose -m "$what" "$@"
code=$?
if [ $code = $NO_ENGINE ] && [ -z "${REQUIRE_ENGINE:-}" ]; then
  cat >&2 <<'BANNER'

  ************************************************************************
  *  NOT RUN: the tests of `docker compose up`                           *
  *  No Docker engine runs here, and none could be started (see above).  *
  *  Nothing is known about images and compose files of this checkout.   *
  ************************************************************************

BANNER
  exit 0
fi
exit $code
