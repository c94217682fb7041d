#!/usr/bin/env bash
# What a mixer costs nvcc in a user's program: one .cu file with forward and backward of one kind of mixer, one storage
# type, device code for one GPU.
#   benchmarks/cuda/compile_time.sh [--arch N] [--units a,b,...]
#     --arch N         the GPU (default: 90)
#     --units a,b,...  only these (default: all)
# Times are the processor's, the memory is the largest process's. Budget: 15 s. Leave the machine alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
script=benchmarks/cuda/compile_time.sh
source tests/cuda/support/toolkit.sh

usage() { sed -n '2,7s/^# \{0,1\}//p' benchmarks/cuda/compile_time.sh; }

# name, headers beside the mixers', mixer
units='
mamba1        kernels/cuda/affine_scan.cuh,gates/mamba1.hpp                     recurrence<states::outer_product, gates::mamba1>
hgrn          kernels/cuda/affine_scan.cuh,gates/hgrn.hpp                       recurrence<states::elementwise, gates::hgrn>
mamba2        kernels/cuda/recurrence.cuh,gates/mamba2.hpp                      recurrence<states::outer_product, gates::mamba2>
gla           kernels/cuda/recurrence.cuh,gates/gla.hpp                         recurrence<states::outer_product, gates::gla>
gated_delta   kernels/cuda/recurrence.cuh,gates/gdn.hpp                         recurrence<states::delta_rule, gates::gdn>
softmax       kernels/cuda/attention.cuh,kernels/cuda/history.cuh               attention<select<all, softmax>>
window        kernels/cuda/attention.cuh,kernels/cuda/history.cuh               attention<select<window, softmax>>
top1_element  kernels/cuda/top1_attention.cuh,kernels/cuda/history.cuh          attention<top1_element<>>
top1_chunk    kernels/cuda/routed_attention.cuh,kernels/cuda/history.cuh        attention<top1_chunk<>>
'
mapfile -t all < <(awk 'NF { print $1 }' <<<"$units")

arch=90 chosen=("${all[@]}")
while [ $# -gt 0 ]; do
  case "$1" in
    --arch | --units)
      [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value"
      if [ "$1" = --arch ]; then arch=$(checked_architectures "$2"); else IFS=, read -r -a chosen <<<"$2"; fi
      shift
      ;;
    --help) usage; exit 0 ;;
    *) die "unknown option '$1'" ;;
  esac
  shift
done
for name in "${chosen[@]}"; do
  case " ${all[*]} " in *" $name "*) ;; *) die "--units: there is no $name; there are ${all[*]}" ;; esac
done
find_toolkit || { echo 'CUDA compile time: not run: no nvcc'; exit 0; }
choose_architectures "$arch"
[ "${#architectures[@]}" -eq 1 ] || die "--arch: one GPU, got '$arch'"

work=build/cuda/compile_time
mkdir -p "$work"
g++ -std=c++20 -O1 tests/compile_time/measure.cpp -o "$work/measure"

grep -m 1 'model name' /proc/cpuinfo 2>/dev/null || true
printf '%s, load %s, nvcc %s, sm_%s\n\n' "$(date -u +%F)" "$(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo unknown)" \
  "$nvcc_version" "$arch"
printf '%-20s %8s %8s   %s\n' unit seconds MiB 'budget: 15 s'
over=0
for name in "${chosen[@]}"; do
  read -r _ headers mixer < <(grep "^$name " <<<"$units")
  {
    tr ',' '\n' <<<"$headers,mixers/cuda_instance.hpp" | sed 's|.*|#include <seqmix/&>|'
    printf 'namespace seqmix {\nusing namespace selectors;\nusing unit = %s;\n}\ntemplate struct seqmix::cuda_instance<seqmix::unit, seqmix::bfloat16>;\n' "$mixer"
  } >"$work/$name.cu"
  "$work/measure" "$nvcc" -std=c++20 -O2 -ccbin g++ -arch="sm_$arch" -I include -c "$work/$name.cu" -o "$work/unit.o" 2>"$work/log" ||
    { cat "$work/log" >&2; exit 1; }
  read -r seconds _ peak < <(tail -n 1 "$work/log")
  judged=$(awk -v s="$seconds" 'BEGIN { print (s <= 15 ? "within" : "OVER") }')
  [ "$judged" = within ] || over=$((over + 1))
  printf '%-20s %8s %8s   %s\n' "$name" "$seconds" "$peak" "$judged"
done
printf '\n%d of %d units over the budget\n' "$over" "${#chosen[@]}"
