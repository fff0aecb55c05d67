#!/usr/bin/env bash
set -euo pipefail

burnish=${BURNISH:-burnish}
model=${1:-runs/tiny-sft-model}
runs=${2:-runs/tiny-iterative}

$burnish evaluate recipes/tiny_evaluate.yaml model.path="$model" run_dir="$runs/before"
for round in 1 2; do
  $burnish generate recipes/tiny_iterative_1_pairs.yaml \
    model.path="$model" run_dir="$runs/pairs-$round" seed="$round"
  $burnish preference recipes/tiny_iterative_2_dpo.yaml \
    model.path="$model" run_dir="$runs/dpo-$round" data.sources="[$runs/pairs-$round/generated.jsonl]"
  model=$runs/model-$round
  $burnish export "$runs/dpo-$round" --out "$model"
  $burnish evaluate recipes/tiny_evaluate.yaml model.path="$model" run_dir="$runs/after-$round"
done
