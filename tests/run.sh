#!/usr/bin/env bash
# Builds and runs all tests: g++ everything, clang++ everything built and the quick set run, the quick set under the
# address and undefined-behaviour sanitizers. Installs first what is missing.
#   tests/run.sh [--quick] [--jobs N]
#     --quick    g++ only, the quick set and the first packaging tests
#     --jobs N   compile and test with N processes (default: one for each processor)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

usage() { sed -n '2,6s/^# \{0,1\}//p' tests/run.sh; }

quick=no
jobs=$(nproc)
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=yes ;;
    --jobs)
      jobs=${2:-}
      [[ $jobs =~ ^[1-9][0-9]*$ ]] || { echo "tests/run.sh: --jobs: expected a number of at least 1, got '$jobs'" >&2; exit 2; }
      shift
      ;;
    --help) usage; exit 0 ;;
    *) echo "tests/run.sh: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

failed=0
summary=()
closing=()

# Cases and assertions of all test programs of the last ctest run in a build tree.
count_cases() {
  awk '/^\[doctest\] test cases:/ { cases += $4 } /^\[doctest\] assertions:/ { assertions += $3 }
       END { printf "%d test cases, %d assertions", cases, assertions }' "$1/Testing/Temporary/LastTest.log" 2>/dev/null
}

configure_and_build() { # preset, target
  cmake --preset "$1" -DCMAKE_MESSAGE_LOG_LEVEL=WARNING >/dev/null &&
    cmake --build "build/$1" --parallel "$jobs" --target "$2" -- --quiet -k 5
}

stage() { # name, preset, target to build, arguments that tell ctest what to run
  local name=$1 preset=$2 target=$3
  shift 3
  local tree="build/$preset" begin=$SECONDS built result=passed
  printf '\n== %s: building\n' "$name"
  if configure_and_build "$preset" "$target"; then
    built=$SECONDS
    printf '== %s: testing\n' "$name"
    ctest --test-dir "$tree" --output-on-failure --no-tests=error --parallel "$jobs" "$@" 2>&1 |
      tee "$tree/ctest.log" || result=FAILED
    closing+=("-- $name" "$(sed -n '/tests passed,/,$p' "$tree/ctest.log")")
    summary+=("$(printf '%-12s %-7s build %4d s   tests %4d s   %s' "$name" "$result" $((built - begin)) \
      $((SECONDS - built)) "$(count_cases "$tree")")")
  else
    result=FAILED
    summary+=("$(printf '%-12s FAILED  to build, after %d s' "$name" $((SECONDS - begin)))")
  fi
  [ "$result" = passed ] || failed=1
}

bash scripts/install_dependencies.sh tests || exit 1

if [ "$quick" = yes ]; then
  stage 'g++ quick' gcc seqmix_quick -L '^quick$'
else
  stage 'g++' gcc all
  stage 'clang++' clang all -L '^quick$'
  stage 'sanitizers' sanitize seqmix_quick -L '^quick$'
fi

printf '\n== summary, %d s in all\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
[ "${#closing[@]}" -eq 0 ] || printf '%s\n' "${closing[@]}"
exit $failed
