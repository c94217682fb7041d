#!/usr/bin/env bash
# Checks that the code of the pages is the code of the tests, and that links between pages lead somewhere.
#   scripts/check_docs.sh [page.md ...]      default: README.md, docs/*.md and docs/adr/*.md
# A fenced block behind a line `<!-- slice: tests/docs/x.cpp#name -->` must equal the lines of that file between
# `// [doc:name]` and `// [/doc:name]`, common indentation taken off; several parts of one name are joined by an empty line.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- README.md docs/*.md docs/adr/*.md

slice() { # file, name
  awk -v open="// [doc:$2]" -v shut="// [/doc:$2]" '
    { mark = $0; sub(/^ +/, "", mark) }
    mark == open { if (inside) exit 1; inside = 1; if (n++) line[++count] = ""; next }
    mark == shut { if (!inside) exit 1; inside = 0; next }
    inside { line[++count] = $0 }
    END {
      if (inside || n == 0) exit 1
      least = 1000
      for (i = 1; i <= count; ++i) { match(line[i], /^ */); if (line[i] != "" && RLENGTH < least) least = RLENGTH }
      for (i = 1; i <= count; ++i) print substr(line[i], least + 1)
    }' "$1"
}
block() { # page, number of the line behind which it begins: the fenced block that follows at once
  awk -v from="$2" 'NR <= from { next } NR == from + 1 { if ($0 !~ /^```/) exit 1; next } /^```/ { closed = 1; exit } { print }
    END { if (!closed) exit 1 }' "$1"
}

failed=0 slices=0
complain() { echo "$1" >&2; failed=1; }
for page in "$@"; do
  while IFS=: read -r number file name; do
    slices=$((slices + 1))
    if [ ! -f "$file" ] || ! code=$(slice "$file" "$name"); then
      complain "$page:$number: $file has no whole slice [doc:$name]"
    elif ! shown=$(block "$page" "$number"); then
      complain "$page:$number: no fenced block follows this line"
    elif ! difference=$(diff <(echo "$code") <(echo "$shown")); then
      complain "$page:$number: differs from $file#$name (< test, > page)"$'\n'"$difference"
    fi
  done < <(sed -n '/^<!-- slice: .* -->$/{=;s/^<!-- slice: \(.*\)#\(.*\) -->$/\1:\2/p}' "$page" | paste -d : - -)
  while read -r number; do
    complain "$page:$number: a block of C++ without its slice on the line above"
  done < <(awk '/^```cpp/ && before !~ /^<!-- slice: / { print NR } { before = $0 }' "$page")
  while read -r target; do
    [ -e "$(dirname "$page")/$target" ] || complain "$page: a link leads to $target, which is not there"
  done < <(awk '/^```/ { fenced = !fenced } !fenced' "$page" | sed 's/`[^`]*`//g' | grep -o ']([^)#]*' | sed 's/^](//' | grep -v '^$\|^http\|^mailto' || true)
done
[ "$slices" -gt 0 ] || complain "no slice was found in: $*"
[ "$failed" -eq 0 ] && echo "$slices slices of $# pages are as in the tests"
exit "$failed"
