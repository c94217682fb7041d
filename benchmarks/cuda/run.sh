#!/usr/bin/env bash
# Builds the CUDA kernels, tests them, measures each at the shapes of docs/performance.md and prints one table. Needs the
# CUDA toolkit and g++, and a GPU: without one it builds, says so and ends. Under 6 minutes. Leave the GPU alone meanwhile.
#   benchmarks/cuda/run.sh [--jobs N] [--arch LIST] [--no-tests] [--smoke [--ptxemu DIR]]
#     --jobs N       compile N things side by side (default: one for each processor)
#     --arch LIST    device code for these GPUs (default: the one that is there, else 80,90)
#     --no-tests     measure without testing first
#     --smoke        tiny shapes, everything once: to see that it works
#     --ptxemu DIR   with --smoke, where there is no GPU: run in the emulator with these sources (tests/cuda/run.sh)
# The table is kept in build/cuda/benchmarks/table.md.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
script=benchmarks/cuda/run.sh
source tests/cuda/support/toolkit.sh

usage() { sed -n '2,10s/^# \{0,1\}//p' benchmarks/cuda/run.sh; }

jobs=$(nproc) arch= tests=yes smoke= emulator=
while [ $# -gt 0 ]; do
  case "$1" in
    --jobs | --arch | --ptxemu)
      [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value"
      case "$1" in
        --jobs) jobs=$(checked_jobs "$2") || exit 2 ;;
        --arch) arch=$(checked_architectures "$2") || exit 2 ;;
        --ptxemu) emulator=$2 ;;
      esac
      shift
      ;;
    --no-tests) tests=no ;;
    --smoke) smoke=--smoke ;;
    --help) usage; exit 0 ;;
    *) echo "$script: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ -z "$emulator" ] || [ -n "$smoke" ] || die '--ptxemu is for --smoke: times in an emulator mean nothing'
[ -z "$emulator" ] || [ -f "$emulator/ptxemu.cpp" ] || die "--ptxemu: there is no ptxemu.cpp in '$emulator'"

find_toolkit || { echo 'CUDA benchmarks: not run: no nvcc'; exit 0; }
work=build/cuda/benchmarks
mkdir -p "$work"
begin=$SECONDS

where=nowhere
if gpu=$(gpu_architecture "$work"); then where=gpu
elif [ -n "$emulator" ]; then where=emulator
fi
if [ -z "$arch" ]; then
  arch=80,90
  # A GPU that this nvcc does not know compiles the PTX itself.
  if [ $where = gpu ] && known_architectures | grep -qx "$gpu"; then arch=$gpu; fi
fi
choose_architectures "$arch"
printf '== CUDA benchmarks: nvcc %s, device code for%s\n' "$nvcc_version" "$(printf ' sm_%s' "${architectures[@]}")"

# ---- compile and link

mapfile -t device_options < <(nvcc_options)
mapfile -t warnings < <(host_warnings)
host=(g++ -std=c++20 -O1 "${warnings[@]}" -Werror -Iinclude "${toolkit_includes[@]}")
libraries=()
if [ $where != emulator ] && has_cublaslt "$work"; then
  host+=(-DSEQMIX_CUBLASLT)
  libraries=(-lcublasLt)
fi
[ $where != emulator ] || task build_emulator "$emulator" build/cuda/ptxemu
objects=()
for source in benchmarks/cuda/*.cu; do
  objects+=("$work/$(basename "$source").o")
  task compile "${objects[-1]}" "$nvcc" "${device_options[@]}" "${generate[@]}" -Iinclude "$source"
done
for source in benchmarks/cuda/*.cpp; do
  objects+=("$work/$(basename "$source").o")
  task compile "${objects[-1]}" "${host[@]}" "$source"
done
all_done
for object in "${objects[@]}"; do
  [ -f "$object" ] || { without_ptxas_figures "$object.log"; die "$(basename "$object" .o) does not compile"; }
done
[ $where != emulator ] || [ -f build/cuda/ptxemu/libptxemu.a ] || { cat build/cuda/ptxemu/log; die '--ptxemu: it does not build'; }
case $where in
  emulator) g++ "${objects[@]}" build/cuda/ptxemu/libptxemu.a -o "$work/kernels" ;;
  *) "$nvcc" -ccbin g++ -cudart static "${objects[@]}" "${libraries[@]}" -o "$work/kernels" ;;
esac || exit 1
printf 'built after %d s\n' $((SECONDS - begin))
if [ $where = nowhere ]; then
  echo 'not run: no GPU'
  exit 0
fi

# ---- test and measure

if [ $tests = yes ]; then
  bash tests/cuda/run.sh --jobs "$jobs" --arch "$arch" ${emulator:+--ptxemu "$emulator"} >"$work/tests.log" 2>&1 ||
    { cat "$work/tests.log"; die 'the tests failed, nothing is measured'; }
  sed -n '/^== summary/,$p' "$work/tests.log"
fi
printf '== measuring, after %d s\n' $((SECONDS - begin))
PTXEMU_ARCH=80 PTXEMU_RACES=2 "$work/kernels" $smoke | tee "$work/table.md"
status=${PIPESTATUS[0]}
printf '== %d s in all\n' $((SECONDS - begin))
exit "$status"
