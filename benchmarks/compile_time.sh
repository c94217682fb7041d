#!/usr/bin/env bash
# What each architecture costs the compiler: a translation unit of its own with forward, backward and a single step in
# float, -O2 and the default -march; with the library's kernels compiled elsewhere (seqmix/precompiled.hpp), and alone.
#   benchmarks/compile_time.sh [--compiler C] [--variants a,b,...]
#     --compiler C      g++ or clang++ (default: g++)
#     --variants a,...  only these of models/variants.hpp (default: all)
# Times are the processor's. Budget of a variant with precompiled kernels: 5 s and 1 GB. Leave the machine alone.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,7s/^# \{0,1\}//p' benchmarks/compile_time.sh; }
die() { echo "benchmarks/compile_time.sh: $*" >&2; exit 2; }

compiler=g++ chosen=
while [ $# -gt 0 ]; do
  case "$1" in
    --compiler | --variants)
      [ $# -ge 2 ] || die "$1 needs a value"
      if [ "$1" = --compiler ]; then compiler=$2; else chosen=$2; fi
      shift
      ;;
    --help) usage; exit 0 ;;
    *) die "unknown option '$1'" ;;
  esac
  shift
done
command -v "$compiler" >/dev/null || die "--compiler: $compiler was not found"

# The aliases of the page, without templates and without the time mixes, which are parts of others.
mapfile -t all < <(awk '/^template/ { skip = 1; next } /^using / && !skip && $2 !~ /_time_mix$/ { print $2 } { skip = 0 }' \
  include/seqmix/models/variants.hpp)
variants=("${all[@]}")
if [ -n "$chosen" ]; then
  IFS=, read -r -a variants <<<"$chosen"
  for name in "${variants[@]}"; do
    case " ${all[*]} " in *" $name "*) ;; *) die "--variants: there is no $name; there are ${all[*]}" ;; esac
  done
fi

work=build/compile_time
rm -rf "$work"
mkdir -p "$work/all"
g++ -std=c++20 -O1 tests/compile_time/measure.cpp -o "$work/measure"
flags=(-std=c++20 -O2 -I include)

measured() { # arguments of the compiler; sets seconds and peak
  local wall
  "$work/measure" "$compiler" "${flags[@]}" "$@" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
  read -r seconds wall peak < <(tail -n 1 "$work/log")
}
verdict() { # seconds, MiB, their budgets
  awk -v s="$1" -v m="$2" -v bs="$3" -v bm="$4" 'BEGIN { print (s <= bs && m <= bm ? "within" : "OVER") }'
}

grep -m 1 'model name' /proc/cpuinfo 2>/dev/null || true
printf '%s, load %s, %s\n\n' "$(date -u +%F)" "$(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo unknown)" \
  "$("$compiler" --version | head -n 1)"

printf '%-30s %8s %8s   %s\n' unit seconds MiB budget
row() { # name, budget in seconds, in MiB; after measured
  printf '%-30s %8s %8s   %s s, %s MiB: %s\n' "$1" "$seconds" "$peak" "$2" "$3" "$(verdict "$seconds" "$peak" "$2" "$3")"
}
printf '#include <seqmix/mixers/mixer.hpp>\n' >"$work/one_mixer.cpp"
(cd include && grep -rLE '#include <(nlohmann/|zstd|seqmix/(io/json_lines|io/safetensors|data/zstd_lines|data/slimpajama|train/checkpoint|train/loop))' \
  --include='*.hpp' seqmix | sed 's|.*|#include <&>|') >"$work/everything.cpp"
measured -c "$work/one_mixer.cpp" -o "$work/unit.o"
row 'includes the mixers' 6 700
measured -c "$work/everything.cpp" -o "$work/unit.o"
row 'includes everything' 20 1500
sed 's/extern template/template/; /#pragma once/d' include/seqmix/precompiled.hpp >"$work/precompiled.cpp"
measured -c "$work/precompiled.cpp" -o "$work/precompiled.o"
printf '%-30s %8s %8s   once a program\n' 'the precompiled kernels' "$seconds" "$peak"

printf '\n%-30s %8s %8s   %-24s %8s %8s\n' variant seconds MiB 'budget: 5 s, 1000 MiB' 'alone, s' MiB
over=0
for name in "${variants[@]}"; do
  measured -DSEQMIX_VARIANT="$name" -DSEQMIX_UNIT_PRECOMPILED -c tests/compile_time/variant.cpp -o "$work/unit.o"
  with=$seconds with_peak=$peak judged=$(verdict "$seconds" "$peak" 5 1000)
  [ "$judged" = within ] || over=$((over + 1))
  measured -DSEQMIX_VARIANT="$name" -c tests/compile_time/variant.cpp -o "$work/unit.o"
  printf '%-30s %8s %8s   %-24s %8s %8s\n' "$name" "$with" "$with_peak" "$judged" "$seconds" "$peak"
done
printf '\n%d of %d variants over the budget\n' "$over" "${#variants[@]}"
