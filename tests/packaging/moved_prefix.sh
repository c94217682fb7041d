#!/usr/bin/env bash
# Installs, moves the installed tree, and uses it from there.
# Usage: moved_prefix.sh <cmake> <source> <build> <work> <compiler>
set -euo pipefail
cmake=$1 source_dir=$2 build_dir=$3 work=$4 compiler=$5
rm -rf "$work"
"$cmake" --install "$build_dir" --prefix "$work/first" >/dev/null
mkdir -p "$work/second"
mv "$work/first" "$work/second/place"

if grep -rnF -e "$work/first" -e "$source_dir" -e "$build_dir" "$work/second/place"; then
  echo "An installed file names a path of the build."
  exit 1
fi
"$source_dir/tests/packaging/build_consumer.sh" "$source_dir/tests/packaging/find_package" "$work/build" "$cmake" \
  "-DCMAKE_CXX_COMPILER=$compiler" "-DCMAKE_PREFIX_PATH=$work/second/place"
