#!/usr/bin/env bash
# The ablation grid on small text: choosing cells, the way to the table, resuming to the same bits, bad input.
# Usage: ablation_grid.sh <folder of the programs> <work folder>; needs two compiled cells.
set -euo pipefail
programs=$(cd "$1" && pwd) work=$2
rm -rf "$work"
mkdir -p "$work/folders"
cd "$work"
fail() { echo "ablation_grid.sh: $*"; exit 1; }

for domain in docs books code_c faq; do
  mkdir -p "folders/$domain"
  awk -v seed="${#domain}" -v name="$domain" 'BEGIN { srand(seed); for (i = 0; i < 200; i++) {
    line = name " " i; n = 8 + int(4 * rand()); for (w = 0; w < n; w++) line = line " w" int(90 * rand()) substr(name, 1 + int(4 * rand()), 2);
    print line } }' > "folders/$domain/text.txt"
done
"$programs/prepare_text" cache --data folders --in-domain docs --out text --least 1000 >prepare.log
small=(--text text --batch 2 --block 32 --chunk 4 --threads 1)

# What is compiled in has names that --cells takes.
"$programs/ablation_grid" --list >list.txt
[ "$(wc -l <list.txt)" -ge 2 ] || fail 'fewer than two cells are compiled in'
first=$(sed -n 1p list.txt) second=$(sed -n 2p list.txt)

# The whole way.
"$programs/ablation_grid" "${small[@]}" --cells "$first,$second" --out whole --steps 3 >whole.log
for file in plan.json points.csv cells.csv cells.jsonl plot.png plot.svg "$first.safetensors" "$second.jsonl"; do
  [ -s "whole/$file" ] || fail "whole/$file is missing"
done
grep -q "^$second .* \(yes\|no\) " whole.log || fail 'no row for the second cell'
[ "$(wc -l <whole/cells.csv)" = 3 ] || fail 'cells.csv has not one line a cell'
[ "$(wc -l <whole/cells.jsonl)" = 2 ] || fail 'cells.jsonl has not one line a cell'
! grep -qi nan whole/cells.csv || fail 'a loss is not a number'

# A pattern and a part of a name choose the same cell, and it learns the same alone.
"$programs/ablation_grid" "${small[@]}" --cells "${second%-*}-*" --out alone --steps 3 >alone.log
cmp whole/"$second".safetensors alone/"$second".safetensors || fail 'a cell depends on the others'

# Killed and resumed: the same log and the same weights as without a break.
"$programs/ablation_grid" "${small[@]}" --cells "${second%-*}" --out broken --steps 3 >/dev/null &
victim=$!
for _ in $(seq 200); do [ -s "broken/$second.jsonl" ] && break; sleep 0.02; done
kill -9 "$victim" 2>/dev/null || true
wait "$victim" 2>/dev/null || true
"$programs/ablation_grid" "${small[@]}" --cells "${second%-*}" --out broken --steps 3 --resume >resumed.log
cmp "broken/$second.jsonl" "whole/$second.jsonl" || fail 'the log of the resumed study differs'
cmp "broken/$second.safetensors" "whole/$second.safetensors" || fail 'the weights of the resumed study differ'

# Bad input: one sentence that names the thing, nothing destroyed.
refused() { # text, arguments...
  local text=$1
  shift
  if "$programs/ablation_grid" "$@" >refused.log 2>&1; then fail "accepted: $*"; fi
  grep -qF -- "$text" refused.log || { cat refused.log; fail "without the text '$text': $*"; }
}
refused "no cell that is compiled in fits 'lstm'" "${small[@]}" --out new --cells "$first,lstm"
refused '--text: name the folder' --out new
refused 'cannot open nowhere/domains.json' --text nowhere --out new
refused 'holds a study already' "${small[@]}" --out whole --steps 3
refused 'seed is 2 now and was 1' "${small[@]}" --out whole --cells "$first,$second" --resume --seed 2
refused 'window is 4 now and was 8' "${small[@]}" --out whole --cells "$first,$second" --resume --window 4
refused 'nothing to resume' "${small[@]}" --out new --resume
refused '--window' "${small[@]}" --out new --window 0
cmp alone/"$second".safetensors whole/"$second".safetensors || fail 'a refused run changed a finished study'
echo 'ablation_grid.sh: all right'
