#!/usr/bin/env bash
# GPT-2 124M on ten billion tokens of FineWeb-Edu: build-nanogpt's run, from a machine with an NVIDIA GPU of 80 GB, a network and
# 60 GB of free disk to a folder that transformers loads. It has not yet been run; docs/reproduction.md says what it should take.
#     bash examples/gpt2_124m.sh FOLDER
# Interrupted or killed, the same command goes on where it was.
set -euo pipefail
mkdir -p "${1:?usage: bash examples/gpt2_124m.sh FOLDER}"
cd "$1"

barellm doctor
[ -f shards/shards.json ] || barellm prepare fineweb-edu:10BT --out shards
[ -f hellaswag_val.jsonl ] || curl -fL --retry 5 -o hellaswag_val.part \
  https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl
[ -f hellaswag_val.jsonl ] || mv hellaswag_val.part hellaswag_val.jsonl

# 524,288 tokens a step in 8 micro-batches, 19,073 steps; HellaSwag every 250 steps. With less memory: --batch 16 --train.gradient_accumulation_steps 32.
again=()
[ -d run/checkpoints ] && again=(--resume)
barellm train build-nanogpt --device cuda --data shards/ --batch 64 --train.gradient_accumulation_steps 8 \
  --train.hellaswag hellaswag_val.jsonl --train.hellaswag_every 250 --out run "${again[@]}"

barellm eval run --device cuda --hellaswag hellaswag_val.jsonl --json > hellaswag.json
barellm plot run --out loss.png
barellm plot run --y hellaswag --out hellaswag.png
barellm export run --format huggingface --out huggingface
