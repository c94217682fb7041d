#!/usr/bin/env bash
# The main job's programs on small text: the whole way to the tables, bad input, and that an interrupted study resumes
# to the same bits. Usage: limited_domain.sh <folder of the programs> <work folder>
set -euo pipefail
programs=$(cd "$1" && pwd) work=$2
rm -rf "$work"
mkdir -p "$work/folders"
cd "$work"
fail() { echo "limited_domain.sh: $*"; exit 1; }

# Lines that differ, a different alphabet a domain.
for domain in docs books code_c code_python faq; do
  mkdir -p "folders/$domain"
  awk -v seed="${#domain}" -v name="$domain" 'BEGIN { srand(seed); for (i = 0; i < 300; i++) {
    line = name " " i; n = 8 + int(4 * rand()); for (w = 0; w < n; w++) line = line " w" int(90 * rand()) substr(name, 1 + int(4 * rand()), 2);
    print line } }' > "folders/$domain/text.txt"
done
"$programs/prepare_text" cache --data folders --in-domain docs --out text --least 1000 >prepare.log
small=(--text text --batch 2 --block 32 --chunk 4 --threads 1)

# The whole way.
"$programs/limited_domain" "${small[@]}" --out whole --steps 4 >whole.log
for file in plan.json points.csv gaps.csv summary.jsonl plot.png plot.svg top1_chunk.safetensors; do
  [ -s "whole/$file" ] || fail "whole/$file is missing"
done
grep -q 'Base-capability gap against transformer_pp' whole.log || fail 'no table of gaps'
[ "$(wc -l <whole/summary.jsonl)" = 5 ] || fail 'summary.jsonl has not one line an architecture'
grep -q '^mamba2 .* no ' whole.log || fail 'mamba2 should not select arbitrarily'

# Killed at any moment and resumed: the same log and the same weights as without a break.
"$programs/limited_domain" "${small[@]}" --out broken --steps 4 --arch mamba2 >/dev/null &
victim=$!
for _ in $(seq 200); do [ -s broken/mamba2.jsonl ] && break; sleep 0.02; done
kill -9 "$victim" 2>/dev/null || true
wait "$victim" 2>/dev/null || true
"$programs/limited_domain" "${small[@]}" --out broken --steps 4 --arch mamba2 --resume >resumed.log
cmp broken/mamba2.jsonl whole/mamba2.jsonl || fail 'the log of the resumed study differs'
cmp broken/mamba2.safetensors whole/mamba2.safetensors || fail 'the weights of the resumed study differ'

# Bad input: one sentence that names the thing, exit status 1 or CLI11's, nothing destroyed.
refused() { # text, arguments...
  local text=$1
  shift
  if "$programs/limited_domain" "$@" >refused.log 2>&1; then fail "accepted: $*"; fi
  grep -qF -- "$text" refused.log || { cat refused.log; fail "without the text '$text': $*"; }
}
refused "unknown architecture 'lstm'" "${small[@]}" --out new --arch lstm
refused 'is close to full attention' --text text --batch 2 --block 32 --threads 1 --out new --chunk 16
refused 'cannot open nowhere/domains.json' --text nowhere --out new
refused 'holds a study already' "${small[@]}" --out whole --steps 4
refused 'seed is 2 now and was 1' "${small[@]}" --out whole --resume --seed 2
refused 'nothing to resume' "${small[@]}" --out new --resume
refused '--minutes' "${small[@]}" --out new --minutes -1
refused '--bogus' "${small[@]}" --bogus
cp -r text short && head -c 20 text/docs/train.txt >short/docs/train.txt
refused 'short/docs/train.txt' --text short --batch 2 --block 32 --chunk 4 --threads 1 --out new --steps 2
cp -r text empty && : >empty/faq/test.txt
refused 'empty/faq/test.txt' --text empty --batch 2 --block 32 --chunk 4 --threads 1 --out new --steps 2
cmp broken/mamba2.safetensors whole/mamba2.safetensors || fail 'a refused run changed a finished study'
echo 'limited_domain.sh: all right'
