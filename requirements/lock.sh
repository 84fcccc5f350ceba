#!/usr/bin/env bash
# Writes requirements/cpu.lock from cpu.in and overrides.txt, for Python 3.11 on x86-64 Linux.
#
# Pins that still fit are kept; `requirements/lock.sh --upgrade` takes the newest instead. Arguments
# go to `uv pip compile`. uv does not read pip's configuration, so its indexes and wheel folders are
# handed over here, all equally trusted as pip does; none of them is written to the lock.
set -euo pipefail

cd "$(dirname "$0")"
uv=${UV:-../.venv-lock/bin/uv}

sources=()
pip_setting() { python3 -m pip config get "global.$1" 2>/dev/null || true; }
for value in $(pip_setting find-links) ${PIP_FIND_LINKS:-}; do sources+=(--find-links "$value"); done
for value in $(pip_setting index-url); do sources+=(--default-index "$value"); done
for value in $(pip_setting extra-index-url); do sources+=(--index "$value"); done
certificates=$(pip_setting cert)

pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
{ grep -v '^#' cpu.lock || true; } >"$pins" 2>/dev/null
SSL_CERT_FILE=${SSL_CERT_FILE:-$certificates} "$uv" pip compile cpu.in --override overrides.txt \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --index-strategy unsafe-best-match --no-config --no-header --no-annotate --quiet \
    "${sources[@]}" "$@" --output-file "$pins" >/dev/null

{
    cat <<'HEADER'
# Written by `make lock` from cpu.in and overrides.txt; do not edit.
# Install with `pip install --no-deps -r requirements/cpu.lock`: the packages that overrides.txt
# leaves out are still named in the dependencies of others, and pip would bring them back.
HEADER
    LC_ALL=C sort -t= -k1,1 "$pins"
} >cpu.lock
