"""A training loop of your own: the quickstart's task by GRPO, over `rltool serve-trainer` (docs/own-loop.md).

    TINKER_BASE_URL=http://127.0.0.1:8300 TINKER_API_KEY=tml-... python examples/own_loop.py runs/demo/task 100 [SEED]
"""

import json
import random
import sys
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import tinker
from tinker import types

PROMPTS, SAMPLES, MAX_TOKENS, RANK, LR, WARMUP = 32, 8, 8, 4, 3e-3, 10


def reward(label, text):
    return float(text.strip() == label)


def sample(sampler, tokenizer, rows, n, seed):
    """For each row: tokens of the prompt, n samples, their rewards."""
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
    params = [types.SamplingParams(max_tokens=MAX_TOKENS, seed=seed + i) for i in range(len(rows))]
    asked = [sampler.sample(types.ModelInput.from_ints(p), n, each) for p, each in zip(prompts, params, strict=True)]
    found = [each.result().sequences for each in asked]
    texts = [[tokenizer.decode(s.tokens, skip_special_tokens=True) for s in sequences] for sequences in found]
    rewards = [[reward(row["label"], text) for text in group] for row, group in zip(rows, texts, strict=True)]
    return list(zip(prompts, found, rewards, strict=True))


def data_of(groups):
    """GRPO's advantages. The server adds losses up; the weights make that the mean over all sampled tokens."""
    total, data = sum(len(each.tokens) for _, sequences, _ in groups for each in sequences), []
    for prompt, sequences, rewards in groups:
        for each, earned in zip(sequences, rewards, strict=True):
            advantage, n = (earned - fmean(rewards)) / (stdev(rewards) + 1e-6), len(each.tokens)
            tokens, no_loss = [*prompt, *each.tokens], [0.0] * (len(prompt) - 1)
            inputs = {"weights": [1 / total] * n, "logprobs": each.logprobs, "advantages": [advantage] * n}
            arrays = {name: np.array([*no_loss, *values], np.float32) for name, values in inputs.items()}
            arrays["target_tokens"] = np.array(tokens[1:])  # the state after tokens[i] predicts tokens[i + 1]
            tensors = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors))
    return data


def update(client, groups, lr):
    """One optimizer step; returns its loss and the norm of its gradient."""
    adam = types.AdamParams(learning_rate=lr, beta1=0.9, beta2=0.98, eps=1e-8, grad_clip_norm=1.0)
    output, step = client.forward_backward(data_of(groups), "ppo"), client.optim_step(adam)
    return output.result().metrics["loss:sum"], step.result().metrics["grad_norm"]


def main(task, steps, seed=0):
    files = [task / "train.jsonl", task / "heldout.jsonl"]
    rows, heldout = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    service = tinker.ServiceClient()
    model = service.get_server_capabilities().supported_models[0].model_name
    client = service.create_lora_training_client(model, rank=RANK, seed=seed)
    tokenizer, draw = client.get_tokenizer(), random.Random(seed)
    for step in range(steps + 1):
        sampler = client.save_weights_and_get_sampling_client()
        if step % 20 == 0 or step == steps:
            answers = sample(sampler, tokenizer, heldout, 1, 0)
            print(f"step {step}: held out {fmean(earned for _, _, rewards in answers for earned in rewards):.3f}")
        if step < steps:
            groups = sample(sampler, tokenizer, draw.sample(rows, PROMPTS), SAMPLES, 10**6 * seed + PROMPTS * step)
            lr = LR * min(1, (2 * step + 1) / WARMUP) * (1 - 0.9 * step / steps)
            losses = [update(client, half, lr)[0] for half in (groups[::2], groups[1::2])]
            earned = fmean(earned for _, _, rewards in groups for earned in rewards)
            print(f"step {step}: reward {earned:.3f} loss {fmean(losses):.4f}", flush=True)
    print(client.save_state("trained").result().path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
