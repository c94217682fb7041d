#!/usr/bin/env bash
# Usage: check.sh <case.cpp> <compiler> <flags...>
set -u
export LC_ALL=C
file=$1
shift
compile() { "$@" -fsyntax-only -fmessage-length=0 "$file" 2>&1; }

mapfile -t expected < <(sed -n 's|^// EXPECT: ||p' "$file")
[ "${#expected[@]}" -gt 0 ] || { echo "$file: the first line must be // EXPECT: <text>"; exit 1; }
head -n 1 "$file" | grep -q '^// EXPECT: ' || { echo "$file: the first line must be // EXPECT: <text>"; exit 1; }

if ! output=$(compile "$@" -DSEQMIX_TWIN); then
  printf '%s\n%s\n' "$output" "The twin must compile, and does not."
  exit 1
fi
if output=$(compile "$@"); then
  echo "Compiled, but must not."
  exit 1
fi
for text in "${expected[@]}"; do
  if ! grep -qF -- "$text" <<<"$output"; then
    printf '%s\n%s\n' "$output" "Refused as it must be, but without the text: $text"
    exit 1
  fi
done
grep -F -- "${expected[0]}" <<<"$output" | head -n 1
