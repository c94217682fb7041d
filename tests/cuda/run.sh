#!/usr/bin/env bash
# Builds the tests of the CUDA kernels and runs them: on the GPU where there is one, else in the emulator where its
# sources are given, else not at all. Needs the CUDA toolkit and g++, nothing else; without nvcc it does nothing.
#   tests/cuda/run.sh [--jobs N] [--arch LIST] [--ptxemu DIR] [--only LIST]
#     --jobs N       compile and run N things side by side (default: one for each processor)
#     --arch LIST    device code for these GPUs (default: 80,90)
#     --ptxemu DIR   where the emulator's sources are (default: $SEQMIX_PTXEMU); built in a copy
#     --only LIST    only these families (or `example`), with * for any text: --only 'history,recurrence*'
# Warnings, spilled registers, races and results that differ between two runs are failures.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
script=tests/cuda/run.sh
source tests/cuda/support/toolkit.sh

usage() { sed -n '2,9s/^# \{0,1\}//p' tests/cuda/run.sh; }

jobs=$(nproc) arch=80,90 emulator=${SEQMIX_PTXEMU:-} only='*'
while [ $# -gt 0 ]; do
  case "$1" in
    --jobs | --arch | --ptxemu | --only)
      [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value"
      case "$1" in
        --jobs) jobs=$(checked_jobs "$2") || exit 2 ;;
        --arch) arch=$(checked_architectures "$2") || exit 2 ;;
        --ptxemu) emulator=$2 ;;
        --only) only=$2 ;;
      esac
      shift
      ;;
    --help) usage; exit 0 ;;
    *) echo "$script: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

# A family is <name>.cu, what it instantiates of the library, and <name>.cpp, its cases.
mapfile -t every < <(cd tests/cuda && ls -- *.cu *.cpp 2>/dev/null | sed 's/\.[a-z]*$//' | sort -u)
[ "${#every[@]}" -gt 0 ] || die "tests/cuda holds no tests"
families=() example=no  # the example program as it stands goes by the name of `example`
IFS=, read -r -a patterns <<<"$only"
for pattern in "${patterns[@]}"; do
  found=no
  for name in "${every[@]}"; do
    # shellcheck disable=SC2053  # the right side is a pattern
    if [[ $name == $pattern ]]; then families+=("$name") found=yes; fi
  done
  # shellcheck disable=SC2053
  if [[ example == $pattern ]]; then example=yes found=yes; fi
  [ $found = yes ] || die "--only: there is no family '$pattern'; there are ${every[*]} example"
done
mapfile -t families < <(printf '%s\n' "${families[@]}" | sed '/^$/d' | sort -u)
[ -z "$emulator" ] || [ -f "$emulator/ptxemu.cpp" ] || die "--ptxemu: there is no ptxemu.cpp in '$emulator'"

find_toolkit || { echo 'CUDA tests: not run: no nvcc'; exit 0; }
choose_architectures "$arch"

work=build/cuda/tests
mkdir -p "$work"
begin=$SECONDS failed=0

# ---- where to run

if gpu_architecture "$work" >/dev/null; then where=gpu
elif [ -n "$emulator" ]; then where=emulator
else where=nowhere
fi
case $where in
  gpu) runs=(first second) told='run on the GPU, twice' ;;
  emulator) runs=(0 1 2) told="run in the emulator, schedules ${runs[*]}, races fatal" ;;
  nowhere) runs=() told='not run: no GPU and no emulator (--ptxemu)' ;;
esac
printf '== CUDA tests: nvcc %s, device code for%s; %s\n' "$nvcc_version" "$(printf ' sm_%s' "${architectures[@]}")" "$told"

# ---- compile

includes=(-Iinclude -Itests/cuda -Itests)
mapfile -t device_options < <(nvcc_options)
mapfile -t warnings < <(host_warnings)
host=(g++ -std=c++20 -O1 "${warnings[@]}" -Werror "${includes[@]}" "${toolkit_includes[@]}"
  -DSEQMIX_GOLDEN_DIR="\"$PWD/tests/golden\"")
[ $where != emulator ] || task build_emulator "$emulator" build/cuda/ptxemu
# The longest first, as far as one can tell from outside.
for name in $(cd tests/cuda && for f in "${families[@]}"; do if [ -f "$f.cu" ]; then echo "$f"; fi; done | sort -r); do
  task compile "$work/$name.cu.o" "$nvcc" "${device_options[@]}" "${generate[@]}" "${includes[@]}" "tests/cuda/$name.cu"
done
[ $example = no ] ||
  task compile "$work/example.o" "$nvcc" "${device_options[@]}" "${generate[@]}" "${includes[@]}" examples/cuda_mixer/main.cu
for name in "${families[@]}"; do
  if [ -f "tests/cuda/$name.cpp" ]; then task compile "$work/$name.cpp.o" "${host[@]}" "tests/cuda/$name.cpp"; fi
done
task compile "$work/main.o" "${host[@]}" tests/cuda/support/main.cpp
all_done
[ -f "$work/main.o" ] || { cat "$work/main.o.log"; exit 1; }
[ $where != emulator ] || [ -f build/cuda/ptxemu/libptxemu.a ] || { cat build/cuda/ptxemu/log; die '--ptxemu: it does not build'; }

# ---- link and run

objects() { local f; for f in "$work/$1.cu.o" "$work/$1.cpp.o"; do if [ -f "$f" ]; then echo "$f"; fi; done; }
compiled() { # family
  { [ ! -f "tests/cuda/$1.cu" ] || [ -f "$work/$1.cu.o" ]; } && { [ ! -f "tests/cuda/$1.cpp" ] || [ -f "$work/$1.cpp.o" ]; }
}
link() { # program, objects
  local program=$work/$1
  shift
  rm -f "$program"
  case $where in
    emulator) g++ "$@" build/cuda/ptxemu/libptxemu.a -o "$program" ;;
    *) "$nvcc" -ccbin g++ -cudart static "$@" -o "$program" ;;
  esac >"$program.link.log" 2>&1
}
run() { # family, run
  local begin
  begin=$(tenths)
  PTXEMU_RACES=2 PTXEMU_ARCH=80 PTXEMU_SEED=$2 timeout 900 "$work/$1" >"$work/$1.run.$2" 2>&1
  echo $? $(($(tenths) - begin)) >"$work/$1.status.$2"
}
link_and_run() { # family
  local one parts
  mapfile -t parts < <(objects "$1")
  link "$1" "${parts[@]}" "$work/main.o" || return
  for one in "${runs[@]}"; do run "$1" "$one"; done
}
for name in "${families[@]}"; do
  rm -f "$work/$name".status.* "$work/$name".run.*
  if compiled "$name"; then task link_and_run "$name"; fi
done
run_example() {
  rm -f "$work"/example "$work"/example.run.* "$work"/example.status.*
  link example "$work/example.o" || return
  [ $where = nowhere ] || run example "${runs[0]}"
}
if [ $example = yes ] && [ -f "$work/example.o" ]; then task run_example; fi
all_done

# ---- what ptxas says of each kernel

# family, kernel, architecture, registers, shared memory, stack, spilled bytes: one line each
figures() {
  local name
  for name in "${families[@]}"; do
    [ -f "$work/$name.cu.o" ] && c++filt <"$work/$name.cu.o.log" | awk -v family="$name" '
      function put() { if (kernel != "") printf "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", family, kernel, arch, registers, shared, stack, spilled }
      function number_before(what) { return match($0, "[0-9]+ " what) ? substr($0, RSTART) + 0 : 0 }
      /Compiling entry function/ {
        put(); kernel = $0; sub(/^[^\047]*\047/, "", kernel); sub(/\047 for \047sm_.*/, "", kernel)
        arch = $0; sub(/.* for \047sm_/, "", arch); sub(/\047.*/, "", arch)
        registers = shared = stack = spilled = 0
      }
      /bytes stack frame/ {
        if (number_before("bytes stack frame") > stack) stack = number_before("bytes stack frame")
        spilled += number_before("bytes spill stores") + number_before("bytes spill loads")
      }
      / Used [0-9]+ registers/ { registers = number_before("registers"); shared = number_before("bytes smem") }
      END { put() }'
  done
}
figures >"$work/kernels.txt"

# The most of each number over all instances of a kernel.
print_figures() {
  awk -F '\t' -v archs="${architectures[*]}" '
    {
      name = $2
      sub(/^void /, "", name)
      # Template arguments and parameters, the innermost brackets first.
      while (gsub(/<[^<>()]*>|\([^<>()]*\)/, "", name)) {}
      sub(/.*::/, "", name)
      key = $1 "\t" name
      if (!(key in instances)) order[++count] = key
      ++instances[key]
      if ($4 > registers[key, $3]) registers[key, $3] = $4
      if ($5 > shared[key]) shared[key] = $5
      if ($6 > stack[key]) stack[key] = $6
      spilled[key] += $7
    }
    END {
      n = split(archs, arch, " ")
      if (count == 0) exit
      printf "%-18s %-34s %9s", "family", "kernel", "instances"
      for (i = 1; i <= n; ++i) printf " %9s", "regs sm_" arch[i]
      printf " %9s %7s %8s\n", "shared B", "stack B", "spills B"
      for (k = 1; k <= count; ++k) {
        key = order[k]
        split(key, part, "\t")
        printf "%-18s %-34s %9d", part[1], part[2], instances[key] / n
        for (i = 1; i <= n; ++i) printf " %10d", registers[key, arch[i]]
        printf " %9d %7d %8d\n", shared[key], stack[key], spilled[key]
      }
    }' "$work/kernels.txt"
}
spilled() { awk -F '\t' -v family="$1" '$1 == family && $7 > 0 { print "  " $2 ", sm_" $3 ": " $7 " bytes" }' "$work/kernels.txt"; }

# ---- judge

table=() total_build=0 total_run=0 total_cases=0 total_checks=0
judge() { # family; sets result, cases, checks, ran, digest
  local one status took line log
  result=passed cases=0 checks=0 ran=0 digest=
  if ! compiled "$1"; then
    result='FAILED to compile'
    for log in "$work/$1.cu.o.log" "$work/$1.cpp.o.log"; do
      if [ -f "$log" ] && [ ! -f "${log%.log}" ]; then without_ptxas_figures "$log"; fi
    done
    return
  fi
  if [ ! -x "$work/$1" ]; then result='FAILED to link'; cat "$work/$1.link.log"; return; fi
  if [ -n "$(spilled "$1")" ]; then result='FAILED: spills'; echo "$1: registers are spilled"; spilled "$1"; fi
  [ $where != nowhere ] || { [ "$result" != passed ] || result='compiled, not run'; return; }
  for one in "${runs[@]}"; do
    read -r status took <"$work/$1.status.$one"
    ran=$((ran + took))
    line=$(grep -a ' cases, .* failed; bits ' "$work/$1.run.$one" | tail -n 1)
    if [ "$status" -ne 0 ] || [ -z "$line" ]; then
      result="FAILED in run $one"
      printf -- '-- %s, run %s: exit status %s\n' "$1" "$one" "$status"
      tail -n 60 "$work/$1.run.$one"
      return
    fi
    read -r cases _ checks _ <<<"$line"
    [ "$cases" -gt 0 ] || { result='FAILED: no cases'; return; }
    [ -z "$digest" ] || [ "$digest" = "${line##* }" ] || {
      result='FAILED: bits differ'
      echo "$1: run $one came to other bits than run ${runs[0]}: ${line##* }, $digest"
      return
    }
    digest=${line##* }
  done
}

for name in "${families[@]}"; do
  judge "$name"
  built=0
  for object in "$work/$name.cu.o" "$work/$name.cpp.o"; do
    if [ -f "$object.tenths" ]; then built=$((built + $(cat "$object.tenths"))); fi
  done
  case $result in FAILED*) failed=1 ;; esac
  total_build=$((total_build + built)) total_run=$((total_run + ran))
  total_cases=$((total_cases + cases)) total_checks=$((total_checks + checks))
  table+=("$(printf '%-22s %8s %8s %7d %9d   %-20s %s' "$name" "$(seconds $built)" "$(seconds $ran)" "$cases" "$checks" \
    "$result" "$digest")")
done

if [ $example = yes ]; then
  result=passed ran=0
  if [ ! -f "$work/example.o" ]; then
    result='FAILED to compile'
    without_ptxas_figures "$work/example.o.log"
  elif [ ! -x "$work/example" ]; then
    result='FAILED to link'
    cat "$work/example.link.log"
  elif [ $where = nowhere ]; then
    result='compiled, not run'
  else
    read -r status ran <"$work/example.status.${runs[0]}"
    if [ "$status" -ne 0 ] || ! grep -q 'tokens forward and backward' "$work/example.run.${runs[0]}"; then
      result='FAILED in the run'
      cat "$work/example.run.${runs[0]}"
    fi
  fi
  case $result in FAILED*) failed=1 ;; esac
  built=$(cat "$work/example.o.tenths" 2>/dev/null || echo 0)
  total_build=$((total_build + built)) total_run=$((total_run + ran))
  table+=("$(printf '%-22s %8s %8s %7s %9s   %s' example "$(seconds "$built")" "$(seconds "$ran")" - - "$result")")
fi

printf '\n== kernels, the most over their instances; every one: %s\n' "$work/kernels.txt"
print_figures
printf '\n== summary, %d s in all:%s; %s\n' $((SECONDS - begin)) "$(printf ' sm_%s' "${architectures[@]}")" "$told"
printf '%-22s %8s %8s %7s %9s   %-20s %s\n' family 'build s' 'run s' cases checks result bits
printf '%s\n' "${table[@]}"
printf '%-22s %8s %8s %7d %9d   %s\n' total "$(seconds $total_build)" "$(seconds $total_run)" $total_cases $total_checks \
  "$([ $failed = 0 ] && echo 'no failure' || echo FAILED)"
exit $failed
