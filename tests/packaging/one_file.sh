#!/usr/bin/env bash
# One file and a compiler, nothing else. Usage: one_file.sh <program> <compiler and all its arguments...>
set -euo pipefail
program=$1
shift
"$@" -o "$program"
"$program"
