"""Held-out accuracy of Hugging Face directories, sampled at temperature 1 by transformers; one line each.

python -m recipes.arithmetic.accuracy runs/arithmetic-warm-start/hf/step_*
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.arithmetic.reward import is_last_number


def accuracy(model_directory: Path, rows: list[dict], seed: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16).to(device)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True) for row in rows]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    torch.manual_seed(seed)
    sampled = model.generate(**prompts, max_new_tokens=16, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    answers = tokenizer.batch_decode(sampled[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(is_last_number(text, row["label"]) for text, row in zip(answers, rows, strict=True)) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, default=Path("runs/arithmetic/data/held_out.jsonl"))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.data.read_text().splitlines()]
    for directory in chosen.models:
        print(f"{directory}  {accuracy(directory, rows, chosen.seed):.3f}", flush=True)


if __name__ == "__main__":
    main()
