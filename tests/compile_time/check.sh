#!/usr/bin/env bash
# The compiler's memory has a limit; its time is printed, not judged. Usage: check.sh <work folder> <include folder>
#   <all_headers.hpp's folder> <compiler and flags...>
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$1 include=$2 all_headers=$3
shift 3
rm -rf "$work"
mkdir -p "$work"
"$1" -std=c++20 -O1 "$here/measure.cpp" -o "$work/measure"
failed=0

compiled() { # what, budget in MiB, arguments...
  local what=$1 budget=$2 seconds wall peak
  shift 2
  "$work/measure" "$@" -std=c++20 -O2 -I "$include" -c -o "$work/unit.o" 2>"$work/log" ||
    { cat "$work/log"; echo "$what does not compile"; failed=1; return; }
  read -r seconds wall peak < <(tail -n 1 "$work/log")
  printf '%-44s %6s s %6s MiB of %s\n' "$what" "$seconds" "$peak" "$budget"
  [ "$peak" -le "$budget" ] || { echo "$what takes more memory than its budget"; failed=1; }
}

printf '#include <seqmix/mixers/mixer.hpp>\n' >"$work/one_mixer.cpp"
printf '#include <all_headers.hpp>\n' >"$work/everything.cpp"
compiled 'P-P2: a unit that includes the mixers' 700 "$@" "$work/one_mixer.cpp"
compiled 'P-P2: a unit that includes everything' 1500 "$@" -I "$all_headers" "$work/everything.cpp"
compiled 'rwkv6: forward, backward and step' 1000 "$@" -DSEQMIX_VARIANT=rwkv6 "$here/variant.cpp"
exit $failed
