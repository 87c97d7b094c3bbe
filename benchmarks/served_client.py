"""The client of benchmarks/served_overhead.py, in the released client's environment: URL KEY DATA RANK. For each line
of its input it makes a step with the data of that number, and prints its loss, gradient norm and seconds."""

import json
import sys
import time

import numpy as np
import tinker
from tinker import types


def main(url, key, data, rank):
    held = np.load(data)
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client("20M", rank=int(rank), seed=0).result()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        rows = {name: held[name][int(line)] for name in held.files}
        began = time.perf_counter()
        batch = []
        for i, tokens in enumerate(rows["tokens"]):
            inputs = {name: types.TensorData.from_numpy(values[i]) for name, values in rows.items() if name != "tokens"}
            batch.append(types.Datum(model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs))
        adam = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.98, eps=1e-8, grad_clip_norm=1.0)
        output, step = client.forward_backward(batch, "ppo"), client.optim_step(adam)
        loss, norm = output.result().metrics["loss:sum"], step.result().metrics["grad_norm"]
        print(json.dumps([loss, norm, time.perf_counter() - began]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
