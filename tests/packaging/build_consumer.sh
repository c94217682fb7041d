#!/usr/bin/env bash
# Configures, builds and runs one consumer. Usage: build_consumer.sh <source> <build> <cmake> <options...>
set -euo pipefail
source_dir=$1 build_dir=$2 cmake=$3
shift 3
rm -rf "$build_dir"
"$cmake" -S "$source_dir" -B "$build_dir" -G Ninja "$@"
"$cmake" --build "$build_dir"
"$build_dir/consumer"
