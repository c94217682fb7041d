#!/usr/bin/env bash
# Rules for headers that no compiler checks. Usage: rules.sh <include folder>
set -u
cd "$1" || exit 1
failed=0

forbid() { # rule, command that prints the offending lines
  local rule=$1 lines
  shift
  lines=$("$@")
  if [ -n "$lines" ]; then
    printf '%s:\n%s\n' "$rule" "$lines"
    failed=1
  fi
}

search=(grep -rnE --include=*.hpp)
[ -n "$(find . -name '*.hpp' -print -quit)" ] || { echo "no headers in $1"; exit 1; }
forbid 'no #pragma once' grep -rL --include='*.hpp' '^#pragma once' .
forbid 'a standard header that costs too much' "${search[@]}" '#include <(iostream|regex|functional|ranges)>' .
forbid 'using namespace at namespace scope' "${search[@]}" '^using namespace' .
forbid 'a macro that changes code or layout' "${search[@]}" '__CUDA_ARCH__|NDEBUG' .
exit $failed
