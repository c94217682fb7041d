#!/usr/bin/env bash
# Windows, the C library and logging libraries define some common names as macros. A header that uses one of them as a
# plain identifier, or calls std::min without parentheses, fails here. What the headers themselves include comes first,
# since other people's headers need not survive.
# Usage: poisoned.sh <include folder> <file that includes all headers> <compiler> <flags...>
set -euo pipefail
include_dir=$1 all_headers=$2
shift 2

macros='min(a,b) max(a,b) I small interface near far B0 CHECK(...) ASSERT(...) REQUIRE(...) LOG(...) ERROR'
{
  sed -n 's|^#include <\(seqmix/.*\)>|'"$include_dir"'/\1|p' "$all_headers" | xargs -d '\n' grep -h '^ *#include <' |
    grep -v '<seqmix/' | sed 's|^ *#include *\(<[^>]*>\).*|#if __has_include(\1)\n#include \1\n#endif|'
  for macro in $macros; do
    printf '#define %s the_macro_%s_was_used\n' "$macro" "${macro%%(*}"
  done
  cat "$all_headers"
} | grep -v '^#pragma once' | "$@" -fsyntax-only -I "$include_dir" -x c++ -
