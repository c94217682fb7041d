#!/usr/bin/env bash
# Installs with apt what is missing, and only that.
#   scripts/install_dependencies.sh examples   what the example programs and their plots need
#   scripts/install_dependencies.sh tests      the same, and what tests and benchmarks need
# Asks for sudo only when something is missing and the user is not root.
set -euo pipefail

die() {
  printf 'seqmix: install: %s\n' "$*" >&2
  exit 1
}

# Each line: package, kind of check, what must be there.
examples='
g++                  program g++
cmake                program cmake
ninja-build          program ninja
nlohmann-json3-dev   header  nlohmann/json.hpp
libcli11-dev         header  CLI/CLI.hpp
libzstd-dev          header  zstd.h
zlib1g-dev           header  zlib.h
gnuplot-nox          program gnuplot
curl                 program curl
ca-certificates      file    /etc/ssl/certs/ca-certificates.crt
'
tests_only='
doctest-dev          header  doctest/doctest.h
make                 program make
libbenchmark-dev     header  benchmark/benchmark.h
clang                program clang++
libomp-dev           omp     clang++
'

case "${1:-}" in
  examples) wanted=$examples ;;
  tests) wanted=$examples$tests_only ;;
  *) die "expected 'examples' or 'tests', got '${1:-}'" ;;
esac

is_there() { # kind, thing
  case "$1" in
    program) command -v "$2" >/dev/null ;;
    file) [ -e "$2" ] ;;
    header) [ -e "/usr/include/$2" ] || [ -e "/usr/local/include/$2" ] ;;
    omp) command -v "$2" >/dev/null &&
      "$2" -fopenmp -fsyntax-only -x c++ - <<<'#include <omp.h>' 2>/dev/null ;;
  esac
}

missing_packages() {
  local package kind thing
  while read -r package kind thing; do
    if [ -n "$package" ] && ! is_there "$kind" "$thing"; then printf '%s\n' "$package"; fi
  done <<<"$wanted"
}

install_packages() {
  local as_root=()
  command -v apt-get >/dev/null ||
    die "apt-get was not found; install by hand what these Debian packages hold: $*"
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "not root and sudo was not found; as root: apt-get install $*"
    as_root=(sudo)
  fi
  printf 'seqmix: install: %s\n' "$*"
  local log
  log=$(mktemp)
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
  # The lists of a fresh machine are empty or old, so one failure is answered by an update.
  if ! "${apt[@]}" install --no-install-recommends "$@" >"$log" 2>&1 </dev/null &&
    ! { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    rm -f "$log"
    die "apt-get could not install $* (is the network up?)"
  fi
  rm -f "$log"
}

need_version() { # name, found, least
  [ "$(printf '%s\n%s\n' "$3" "$2" | sort -V | head -n 1)" = "$3" ] ||
    die "$1 $3 or newer is needed, found $2 (Debian 12 and Ubuntu 24.04 have it)"
}

mapfile -t missing < <(missing_packages)
if [ "${#missing[@]}" -gt 0 ]; then
  install_packages "${missing[@]}"
  mapfile -t missing < <(missing_packages)
  [ "${#missing[@]}" -eq 0 ] || die "still missing after the installation: ${missing[*]}"
fi

need_version g++ "$(g++ -dumpfullversion)" 12
need_version cmake "$(cmake --version | sed -n '1s/[^0-9]*//p')" 3.25
if [ "$1" = tests ]; then need_version clang++ "$(clang++ -dumpversion)" 14; fi
