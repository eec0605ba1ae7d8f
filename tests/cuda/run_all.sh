#!/usr/bin/env bash
# All checks that need a GPU, in order: parity of the kernels, a detour in bfloat16, tokens per second.
#
#   tests/cuda/run_all.sh SECONDS [OPTIONS of detour_curve.py and throughput.py, such as --attention sdpa]
#
# Stops after SECONDS and says what was not reached. The last thing printed is a Markdown table, which also goes into
# $OUT/results.md where OUT is set. Needs torch, transformers, lightning and pytest; no network. Fails if a check does.
set -uo pipefail
limit="${1:?usage: tests/cuda/run_all.sh SECONDS [OPTIONS]}"
shift
cd "$(dirname "$0")/../.."
deadline=$((SECONDS + limit))
python="${PYTHON:-python3}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" LIT_ENCODERS_ROWS=1
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
failed=0

row() { echo "| $1 | $2 | $3 |" | tee -a "$log"; }

# part NAME COMMAND...: run it in the time that is left; rows of the table are lines that begin with "| ".
part() {
  local name="$1" left=$((deadline - SECONDS)) code
  shift
  if ((left <= 0)); then
    row "$name" "all" "not reached"
    return
  fi
  # An interrupt lets Python print what it has; who does not listen is ended ten seconds later.
  timeout --signal=INT --kill-after=10 "$left" "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  if ((SECONDS >= deadline)); then
    row "$name" "the rest" "not reached: stopped after $limit seconds"
  elif ((code != 0)); then
    row "$name" "exit status $code" "FAILED, see the output"
    failed=1
  fi
}

part install "$python" -m pip install -q --no-deps --no-build-isolation -e .
part parity "$python" -m pytest tests/cuda --ignore=tests/cuda/test_scripts_on_cpu.py -o addopts=--import-mode=importlib -q -rfEs --tb=short -p no:cacheprovider
part detour "$python" -W ignore tests/cuda/detour_curve.py --seconds "$((deadline - SECONDS))" "$@"
part throughput "$python" -W ignore tests/cuda/throughput.py --seconds "$((deadline - SECONDS))" "$@"

table() {
  echo "| check | setting | result |"
  echo "|---|---|---|"
  grep -E '^[0-9]+ (passed|failed|skipped|error).* in [0-9.]+s' "$log" | sed -E 's/^(.*)$/| parity | pytest tests\/cuda | \1 |/'
  grep '^| ' "$log"
}
echo
table | tee ${OUT:+"$OUT/results.md"}
exit "$failed"
