#!/usr/bin/env bash
# Builds the benchmarks, runs them and prints which of the promised speeds were reached (docs/performance.md).
#   benchmarks/run.sh [--repetitions N] [--kernels]
#     --repetitions N   of everything, in random order among one another; medians are compared (default: 9)
#     --kernels         the kernels alone too, and decoding
# Every repetition as JSON: build/benchmarks/<program>.json. Leave the machine alone meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,6s/^# \{0,1\}//p' benchmarks/run.sh; }

repetitions=9 kernels=no
while [ $# -gt 0 ]; do
  case "$1" in
    --repetitions)
      repetitions=${2:-}
      [[ $repetitions =~ ^[1-9][0-9]*$ ]] ||
        { echo "benchmarks/run.sh: --repetitions: expected a number of at least 1, got '$repetitions'" >&2; exit 2; }
      shift
      ;;
    --kernels) kernels=yes ;;
    --help) usage; exit 0 ;;
    *) echo "benchmarks/run.sh: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

tree=build/benchmarks
cmake -S . -B "$tree" -DCMAKE_BUILD_TYPE=Release -DSEQMIX_TESTS=OFF -DSEQMIX_EXAMPLES=OFF -DSEQMIX_INSTALL=OFF \
  -DCMAKE_MESSAGE_LOG_LEVEL=WARNING
cmake --build "$tree" --parallel

run() { # program, its repetitions
  "$tree/benchmarks/$1" --benchmark_repetitions="$2" --benchmark_enable_random_interleaving=true \
    --benchmark_min_time=0.5 --benchmark_out="$tree/$1.json" --benchmark_out_format=json
}

grep -m 1 'model name' /proc/cpuinfo 2>/dev/null || true
printf '%s, %s processors, load %s\n' "$(date -u +%F)" "$(nproc)" "$(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo unknown)"
if [ "$kernels" = yes ]; then
  for program in kernels recurrences decode; do
    if [ -x "$tree/benchmarks/$program" ]; then run "$program" "$repetitions"; fi
  done
fi
run train_step "$repetitions"
