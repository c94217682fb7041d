# What the scripts of the CUDA tests and benchmarks share. Sourced by bash, from the root of the repository.

die() { echo "$script: $*" >&2; exit 2; }

# Sets nvcc, its version and where its headers lie; fails where there is no nvcc.
find_toolkit() {
  local folder
  nvcc=$(command -v nvcc) ||
    for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
      if [ -n "$folder" ] && [ -x "$folder/bin/nvcc" ]; then nvcc=$folder/bin/nvcc && break; fi
    done
  [ -n "$nvcc" ] || return 1
  nvcc_version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  mapfile -t toolkit_includes < <("$nvcc" --dryrun -x cu -c /dev/null -o /dev/null 2>&1 |
    sed -n 's/^#\$ \(SYSTEM_\)\?INCLUDES=//p' | tr -d '"' | tr ' ' '\n' | sed -n 's/^-I//; /^\//p' | sed 's/^/-isystem/')
}

checked_jobs() { # value of --jobs
  [[ $1 =~ ^[1-9][0-9]*$ ]] || die "--jobs: expected a number of at least 1, got '$1'"
  echo "$1"
}
checked_architectures() { # value of --arch
  [[ $1 =~ ^[0-9]+[a-z]?(,[0-9]+[a-z]?)*$ ]] || die "--arch: expected numbers like 80,90, got '$1'"
  echo "$1"
}
known_architectures() { "$nvcc" --list-gpu-code | sed 's/^sm_//'; }

# Sets nvcc's options for a list like 80,90: device code for each, and PTX that any later GPU and the emulator can take.
# One call of nvcc is the cheapest way to all of them.
choose_architectures() { # list
  local known one ptx=no
  known=$(known_architectures | tr '\n' ' ')
  generate=() architectures=()
  IFS=, read -r -a architectures <<<"$1"
  for one in "${architectures[@]}"; do
    case " $known " in *" $one "*) ;; *) die "--arch: nvcc $nvcc_version knows no sm_$one; it knows $known" ;; esac
    if [ "$one" = 80 ]; then ptx=yes; fi
    generate+=(-gencode "arch=compute_$one,code=$([ "$one" = 80 ] && echo '[compute_80,sm_80]' || echo "sm_$one")")
  done
  [ $ptx = yes ] || generate+=(-gencode arch=compute_80,code=compute_80)
}

# g++'s part of cmake/warnings.cmake; a machine with a GPU need not have CMake.
host_warnings() {
  awk '/MATCHES "Clang"/ { exit } /^ *#/ { next }
    { while (match($0, /-W[a-z0-9=-]+/)) { print substr($0, RSTART, RLENGTH); $0 = substr($0, RSTART + RLENGTH) } }
  ' cmake/warnings.cmake
}

# ---- tasks, a number of them side by side

running=0
task() { # command: in the background, as soon as there is room
  if [ "$running" -ge "$jobs" ]; then wait -n; running=$((running - 1)); fi
  "$@" &
  running=$((running + 1))
}
all_done() { wait; running=0; }

tenths() { local now=${EPOCHREALTIME/[.,]/}; echo $((now / 100000)); }
seconds() { printf '%d.%d' $(($1 / 10)) $(($1 % 10)); } # of tenths

up_to_date() { # object, command
  [ -f "$1" ] && [ -f "$1.d" ] && [ "$(cat "$1.command")" = "$2" ] || return 1
  local -a needed
  read -r -d '' -a needed < <(sed 's/^[^:]*://; s/\\$//' "$1.d")
  [ -z "$(find "${needed[@]}" -newer "$1" -print -quit 2>&1)" ]
}

# Runs a compiler unless its object is newer than all that went into it. Beside the object: its log, and the tenths of a
# second that it took.
compile() { # object, command without -c, -o and the options for dependencies
  local object=$1 begin
  shift
  if up_to_date "$object" "$*"; then return 0; fi
  begin=$(tenths)
  rm -f "$object"
  if "$@" -MD -MF "$object.d" -c -o "$object.$$.o" >"$object.log" 2>&1; then mv "$object.$$.o" "$object"; fi
  echo "$*" >"$object.command"
  echo $(($(tenths) - begin)) >"$object.tenths"
}

nvcc_options() { # one a line
  printf '%s\n' -std=c++20 -O2 -lineinfo -no-compress -cudart none -ccbin g++ -Xcompiler -Wall,-Wextra,-Werror,-Wno-restrict \
    --Werror all-warnings -Xptxas -v
}

without_ptxas_figures() { grep -v '^ptxas info\|^    [0-9]* bytes stack' "$1"; } # log

# ---- where programs run

# Prints the architecture of the GPU, like 90; fails where no CUDA device answers.
gpu_architecture() { # folder to build in
  [ -x "$1/probe" ] || "$nvcc" -ccbin g++ -cudart static -x c++ - -o "$1/probe" >"$1/probe.log" 2>&1 <<'END' || return 1
#include <cstdio>
#include <cuda_runtime_api.h>
int main() {
  int devices = 0, major = 0, minor = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) != cudaSuccess)
    return 77;
  std::printf("%d%d\n", major, minor);
}
END
  "$1/probe"
}
has_cublaslt() { # folder to build in
  "$nvcc" -ccbin g++ -cudart static -x c++ - -lcublasLt -o "$1/cublaslt" >"$1/cublaslt.log" 2>&1 <<'END'
#include <cublasLt.h>
int main() { return cublasLtGetVersion() == 0; }
END
}

# Builds the emulator from a copy of its sources; one script at a time.
build_emulator() { # folder with the sources, folder to build in
  mkdir -p "$2"
  (
    flock 9
    for file in ptxemu.cpp ptxemu.hpp cudart.cpp Makefile; do
      cmp -s "$1/$file" "$2/$file" || install -m 644 "$1/$file" "$2/$file"
    done
    make -s -C "$2" CUDA="$(dirname "$(dirname "$(realpath "$nvcc")")")" libptxemu.a
  ) >"$2/log" 2>&1 9>"$2/lock"
}
