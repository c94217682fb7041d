#!/usr/bin/env bash
# The main job: installs what is missing, fetches text, builds and runs the limited-domain study at demo size.
#   examples/run.sh [--minutes M] [--arch a,b,...] [--seed S] [--resume] [--data PATH] [--domains quick|all] [...]
# --program ablation_grid   that program instead, which is built then (minutes more); its --cells chooses what it trains
# --data PATH   a folder with one folder of text a domain, or SlimPajama .jsonl/.jsonl.zst files, instead of fetched text
#               (--in-domain NAME says which folder is trained on)
# Everything else goes to the program; --help shows its options.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${SEQMIX_CACHE:-$PWD/build/cache}
data= domains=quick in_domain= help=no resume=no program=limited_domain
pass=()
need() { [ $# -ge 2 ] || { echo "examples/run.sh: $1 needs a value" >&2; exit 2; }; }
while [ $# -gt 0 ]; do
  case "$1" in
    --data) need "$@"; data=$2; shift ;;
    --in-domain) need "$@"; in_domain=$2; shift ;;
    --domains) need "$@"; domains=$2; shift ;;
    --program) need "$@"; program=$2; shift ;;
    --help | -h) help=yes ;;
    --resume) resume=yes; pass+=("$1") ;;
    *) pass+=("$1") ;;
  esac
  shift
done
case "$program" in limited_domain | ablation_grid) ;; *) echo "examples/run.sh: --program: expected limited_domain or ablation_grid, got '$program'" >&2; exit 2 ;; esac
case "$domains" in quick | all) ;; *) echo "examples/run.sh: --domains: expected quick or all, got '$domains'" >&2; exit 2 ;; esac

begin=$SECONDS
say() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - begin)); }

say 'installing what is missing'
scripts/install_dependencies.sh examples

say 'building'
cmake --preset examples -DCMAKE_MESSAGE_LOG_LEVEL=WARNING >/dev/null
cmake --build build/examples --target "seqmix_example_$program" seqmix_example_prepare_text -- --quiet
programs=build/examples/examples
if [ "$help" = yes ]; then
  sed -n '2,7s/^# \{0,1\}//p' examples/run.sh
  exec "$programs/$program" --help
fi

text=$cache/text
if [ -n "$data" ]; then
  say "preparing the text of $data"
  text=$cache/text-of-$(printf '%s' "$(realpath -m "$data")$in_domain" | cksum | cut -d ' ' -f 1)
  [ "$resume" = yes ] && [ -e "$text/domains.json" ] ||
    "$programs/prepare_text" "$cache" --data "$data" ${in_domain:+--in-domain "$in_domain"} --out "$text"
elif [ "$resume" = yes ] && [ -e "$text/domains.json" ]; then
  say 'text as it was'
else
  say 'fetching and preparing text'
  examples/data/fetch_text.sh "$cache" "$domains"
  "$programs/prepare_text" "$cache" --own-docs README.md --own-docs docs
fi

# Waiting threads sleep: on a machine that does other work too, spinning ones would take the time of those that compute.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
say 'training and measuring'
exec "$programs/$program" --text "$text" ${pass[@]+"${pass[@]}"}
