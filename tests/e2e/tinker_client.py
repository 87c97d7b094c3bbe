"""The released tinker client, unmodified, in its own environment: URL KEY SCRIPT. Prints what it found, as JSON.

It is run by RLTOOL_CLIENTS_PYTHON, which has neither rltool nor torch; `compared` by RLTOOL_COOKBOOK_PYTHON.
"""

import io
import json
import os
import sys
import time
import urllib.request
from contextlib import redirect_stdout

import numpy as np

sys.path += [os.environ["TORCH_AT"]] if "TORCH_AT" in os.environ else []

import tinker
from tinker import types

VOCAB = 120


def data_of(seed, policy=False, sizes=(5, 9), marked=False):
    draw = np.random.default_rng(seed)
    data = []
    for size in sizes:
        tokens = draw.integers(0, VOCAB, size + 1)
        inputs = {"target_tokens": tokens[1:], "weights": draw.random(size).astype(np.float32)}
        if policy:
            inputs["logprobs"] = (-5 + 0.3 * draw.standard_normal(size)).astype(np.float32)
            inputs["advantages"] = draw.standard_normal(size).astype(np.float32)
        if marked:
            inputs["sequence_ratio_mask"] = (np.arange(size) > 1).astype(np.float32)
        tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=tensors))
    return data


def flat(output):
    arrays = [each[name].to_numpy() for each in output.loss_fn_outputs for name in ("logprobs", "elementwise_loss")]
    return [float(value) for array in arrays for value in array]


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train(client, steps, losses=("cross_entropy",)):
    """Steps in turn, pipelined: a step's calls go out before their results are asked for."""
    found = []
    for step in range(steps):
        loss = losses[step % len(losses)]
        config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2} if loss == "gspo" else None
        data = data_of(step, loss != "cross_entropy", marked=loss == "gspo")
        both = client.forward_backward(data, loss, config), client.optim_step(types.AdamParams(learning_rate=1e-2))
        output, optim = (each.result() for each in both)
        found.append([output.metrics["loss:sum"], optim.metrics["grad_norm"], *flat(output)])
        print(f"step {step}", file=sys.stderr, flush=True)
    return found


def steps(service):
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    client = service.create_lora_training_client("tiny", rank=4, seed=seed).result()
    return {"steps": train(client, 8), "end": flat(client.forward(data_of(99), "cross_entropy").result())}


def surface(service):
    client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    before = flat(client.forward(data_of(99), "cross_entropy").result())
    found = {"info": client.get_info().model_data.model_name, "before": before}
    found["capabilities"] = [each.model_name for each in service.get_server_capabilities().supported_models]
    train(client, 5, ("importance_sampling", "ppo", "cispo", "dro", "gspo"))
    path = client.save_state("one").result().path
    saved = flat(client.forward(data_of(99), "cross_entropy").result())
    found |= {"path": path, "saved": saved}
    found["went_on"] = train(client, 1)
    client.load_state_with_optimizer(path).result()
    found["loaded"] = flat(client.forward(data_of(99), "cross_entropy").result())
    found["went_on_again"] = train(client, 1)
    other = service.create_lora_training_client("tiny", rank=4, seed=2).result()
    found["other"] = flat(other.forward(data_of(99), "cross_entropy").result())
    long = data_of(0, sizes=(80,))
    found["errors"] = {
        "loss": message(lambda: client.forward_backward(data_of(0), "stable_reinforce").result()),
        "inputs": message(lambda: client.forward_backward(data_of(0), "ppo").result()),
        "long": message(lambda: client.forward_backward(long, "cross_entropy").result()),
        "rank": message(lambda: service.create_lora_training_client("tiny", rank=0).result()),
        "model": message(lambda: service.create_lora_training_client("Qwen/Qwen3-8B", rank=4).result()),
        "name": message(lambda: client.save_state("one").result()),
        "ttl": message(lambda: client.save_state("two", ttl_seconds=5).result()),
        "sampler": message(lambda: client.save_weights_for_sampler("s").result()),
    }
    found["after_errors"] = train(client, 1)
    return found | {"rest": rest(service, client, path)}


def rest(service, client, path):
    """Lists, times to live, what weights are of, a client made of a checkpoint, deletion."""
    asked = service.create_rest_client()
    short = client.save_state("short", ttl_seconds=4000).result().path
    run = client.model_id

    def listed():
        kept = asked.list_checkpoints(run).result().checkpoints
        return [[each.tinker_path, each.checkpoint_type, each.expires_at is None, each.size_bytes > 0] for each in kept]

    found = {"short": short, "run": run, "listed": [listed()]}
    asked.set_checkpoint_ttl_from_tinker_path(short, None).result()
    found["listed"].append(listed())
    weights = asked.get_weights_info_by_tinker_path(path).result()
    found["info"] = [weights.base_model, weights.is_lora, weights.lora_rank, weights.train_unembed, weights.train_mlp]
    made = service.create_training_client_from_state_with_optimizer(path).result()
    found["made"] = flat(made.forward(data_of(99), "cross_entropy").result())
    found["made_went_on"] = train(made, 1)
    asked.delete_checkpoint_from_tinker_path(path).result()
    found["listed"].append(listed())
    one = asked.get_training_run(run).result()
    found["last"] = [one.base_model, one.model_owner, one.lora_rank, one.last_checkpoint.tinker_path]
    every = asked.list_training_runs(limit=2).result()
    found["runs"] = [len(every.training_runs), every.cursor.total_count, every.training_runs[0].training_run_id]
    page = asked.list_user_checkpoints(limit=1).result()
    found["page"] = [[each.tinker_path for each in page.checkpoints], page.cursor.total_count]
    found["made_model"] = made.model_id
    found["errors"] = [
        message(lambda: client.load_state(path).result()),
        message(lambda: asked.delete_checkpoint_from_tinker_path(f"tinker://{run}/weights/none").result()),
        message(lambda: asked.publish_checkpoint_from_tinker_path(short).result()),
    ]
    return found


def stranger(service):
    """Of a path that is another client's."""
    client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    path, asked = sys.argv[4], service.create_rest_client()
    return {
        "errors": [
            message(lambda: client.load_state(path).result()),
            message(lambda: asked.get_weights_info_by_tinker_path(path).result()),
            message(lambda: asked.delete_checkpoint_from_tinker_path(path).result()),
            message(lambda: asked.set_checkpoint_ttl_from_tinker_path(path, None).result()),
            message(lambda: asked.list_checkpoints(path.split("/")[2]).result()),
        ],
        "checkpoints": len(asked.list_user_checkpoints().result().checkpoints),
    }


def ids(*tokens):
    return types.ModelInput.from_ints(list(tokens))


PROMPT = (5, 17, 40, 3)


def sampled(sampler, prompt=PROMPT, n=1, *, max_tokens=8, **given):
    params = types.SamplingParams(max_tokens=max_tokens, **given)
    return sampler.sample(ids(*prompt), n, params).result()


def scored(client, prompt, tokens):
    """The trainer's log-probabilities of tokens behind a prompt."""
    every = [*prompt, *tokens]
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(tokens), np.float32)
    inputs = {"target_tokens": np.array(every[1:]), "weights": weights}
    tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
    datum = types.Datum(model_input=ids(*every[:-1]), loss_fn_inputs=tensors)
    output = client.forward([datum], "cross_entropy").result()
    return [float(each) for each in output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]]


def both(sampler, client):
    """Log-probabilities of one sample, by the engine and by the trainer."""
    [sequence] = sampled(sampler, seed=3).sequences
    return {"sampled": sequence.logprobs, "trainer": scored(client, PROMPT, sequence.tokens)}


def sampling(service):
    client = service.create_lora_training_client("tiny", rank=8, seed=1).result()
    base = service.create_sampling_client(base_model="tiny")
    found = {"base": both(base, client)}
    train(client, 3, ("cross_entropy", "importance_sampling", "ppo"))
    sampler = client.save_weights_and_get_sampling_client()
    found["trained"] = both(sampler, client)
    path = client.save_weights_for_sampler("one").result().path
    saved = service.create_sampling_client(model_path=path)
    found["base_model"] = saved.get_base_model()
    found["saved"] = both(saved, client)
    tokens = [5, 17, 40, 3, 90, 61]
    found["scored"] = {
        "sampled": sampler.compute_logprobs(ids(*tokens)).result()[1:],
        "trainer": scored(client, tokens[:1], tokens[1:]),
    }
    found["last_n"] = sampler.compute_logprobs(ids(*tokens), prompt_logprobs_last_n=2).result()
    several = [[list(each.tokens) for each in sampled(sampler, n=3, seed=seed).sequences] for seed in (1, 1, 2)]
    found["several"] = several
    found["top_1"] = [list(sampled(sampler, seed=seed, top_k=1).sequences[0].tokens) for seed in (1, 2, 3)]
    found["not_asked"] = sampled(sampler).prompt_logprobs
    tokenizer = sampler.get_tokenizer()
    [long] = sampled(sampler, temperature=0.0, max_tokens=24).sequences
    text = tokenizer.decode(long.tokens)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    [short] = sampled(sampler, temperature=0.0, max_tokens=24, stop=[stop]).sequences
    found["stop_text"] = [stop, text, tokenizer.decode(short.tokens), short.stop_reason]
    found["seeded"] = [list(sampled(sampler, seed=seed).sequences[0].tokens) for seed in (1, 1, 2)]
    [greedy] = sampled(sampler, temperature=0.0, max_tokens=4).sequences
    [stopped] = sampled(sampler, temperature=0.0, max_tokens=4, stop=[greedy.tokens[0]]).sequences
    found["stopped"], found["length"] = [stopped.stop_reason, len(stopped.tokens)], greedy.stop_reason
    params = types.SamplingParams(max_tokens=1, temperature=0.0)
    every = ids(*PROMPT, *greedy.tokens)
    table = sampler.sample(every, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    found["topk"] = table.topk_prompt_logprobs[1:]
    found["greedy"] = list(greedy.tokens)
    found["topk_of_greedy"] = [row[0][0] for row in table.topk_prompt_logprobs[len(PROMPT) :]]
    before = list(sampled(sampler, temperature=0.0).sequences[0].tokens)
    for _ in range(3):  # more than the engine has places
        train(client, 1)
        sampled(client.save_weights_and_get_sampling_client())
    found["old_and_new"] = [before, list(sampled(sampler, temperature=0.0).sequences[0].tokens)]
    found["errors"] = {
        "long": message(lambda: sampled(sampler, max_tokens=200)),
        "alternatives": message(
            lambda: sampler.sample(every, 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2).result()
        ),
        "rank": message(lambda: service.create_lora_training_client("tiny", rank=16).result()),
        "path": message(lambda: sampled(service.create_sampling_client(model_path=path.replace("sampler_", "")))),
        "gone": message(lambda: sampled(service.create_sampling_client(model_path=path + "x"))),
        "top_p": message(lambda: sampled(sampler, top_p=0.0)),
    }
    return found


def custom(service):
    """Two clients with the same adapter take three steps: one by importance sampling as the server has it, one by a
    loss of its own that is the same, a function twice and a traced graph once; then what both give for the same data,
    and a loss that the server has not."""
    import torch

    found = {"steps": []}

    def own(data, logprobs):
        losses = []
        for datum, new in zip(data, logprobs, strict=True):
            names = ("weights", "logprobs", "advantages")
            weights, old, advantages = (datum.loss_fn_inputs[name].to_torch() for name in names)
            losses.append(-(weights * (new - old).exp() * advantages).sum())
        return torch.stack(losses).sum(), {"own": float(len(data))}

    def traced(logprobs, weights, old, advantages):
        loss = -(weights * torch.exp(logprobs - old) * advantages).sum()
        return loss, {"custom/own:sum": torch.ones_like(loss)}

    def squared(data, logprobs):
        return sum((each**2).sum() for each in logprobs), {}

    theirs, ours = (service.create_lora_training_client("tiny", rank=4, seed=1).result() for _ in range(2))
    # Adam of a small eps would make whole steps of gradients that are rounding alone.
    adam = types.AdamParams(learning_rate=1e-2, eps=1e-2)
    names = ("logprobs", "weights", "old", "advantages")
    graph = service.create_custom_loss(traced, dict.fromkeys(names, 1)).result()
    for seed, loss in ((1, own), (2, own), (4, graph)):
        data = data_of(seed, True)
        given = theirs.forward_backward(data, "importance_sampling").result()
        for datum in data:
            datum.loss_fn_inputs["old"] = datum.loss_fn_inputs["logprobs"]
        made = ours.forward_backward_custom(data, loss).result()
        norms = [each.optim_step(adam).result().metrics["grad_norm"] for each in (theirs, ours)]
        count = made.metrics["custom/own:sum" if loss is graph else "own"]
        found["steps"].append([[given.metrics["loss:sum"], made.metrics["loss:sum"]], norms, count])
    found["ends"] = [flat(each.forward(data_of(99), "cross_entropy").result()) for each in (theirs, ours)]
    found["paths"] = [each.save_state(f"end-{i}").result().path for i, each in enumerate((theirs, ours))]
    [before] = [scored(ours, PROMPT[:1], PROMPT[1:])]
    data = data_of(3)
    for _ in range(3):
        ours.forward_backward_custom(data, squared).result()
        ours.optim_step(adam)
    found["moved"] = [before, scored(ours, PROMPT[:1], PROMPT[1:])]
    return found


def raw(path, body):
    """What the client has no method for."""
    request = urllib.request.Request(f"{url}/api/v1/{path}", json.dumps(body).encode(), {"X-API-Key": key})
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read())


def same(sampler):
    """Of a fixed seed."""
    [sequence] = sampled(sampler, seed=3).sequences
    return [list(sequence.tokens), [float(each) for each in sequence.logprobs]]


def full(service):
    """All weights are trained and sampled with, by version; the test kills the server where a line says "ahead"."""
    client = service.create_lora_training_client("tiny", rank=0).result()
    base = service.create_sampling_client(base_model="tiny")
    found = {"base": both(base, client), "info": [client.get_info().is_lora, client.get_info().lora_rank]}
    before = same(base)
    train(client, 3, ("cross_entropy", "importance_sampling", "ppo"))
    one = client.save_weights_and_get_sampling_client()
    found["one"] = both(one, client)
    state = client.save_state("state", ttl_seconds=4000).result().path
    named = client.save_weights_for_sampler("named").result().path
    there = flat(client.forward(data_of(99), "cross_entropy").result())
    first = same(one)
    went_on = train(client, 1)
    print("ahead", file=sys.stderr, flush=True)
    time.sleep(float(sys.argv[4]))  # the server is killed and serves again
    found["first"] = [first, same(one), same(service.create_sampling_client(model_path=named))]
    two = client.save_weights_and_get_sampling_client()
    found["two"] = both(two, client)
    second = same(two)
    held = flat(client.forward(data_of(99), "cross_entropy").result())
    samplers = {"base": base, "one": one, "two": two}
    params = types.SamplingParams(max_tokens=8, seed=3)
    futures = [(name, each.sample(ids(*PROMPT), 1, params)) for _ in range(3) for name, each in samplers.items()]
    found["mixed"] = [[name, list(each.result().sequences[0].tokens)] for name, each in futures]
    found["versions"] = {"base": before, "one": first, "two": second}
    table = one.sample(ids(*PROMPT), 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True).result()
    found["prompt"] = table.prompt_logprobs[1:]
    print("engine", file=sys.stderr, flush=True)
    time.sleep(float(sys.argv[4]))  # the engine is killed, and gets the weights again
    found["again"] = same(two)
    found["undisturbed"] = [held, flat(client.forward(data_of(99), "cross_entropy").result())]
    client.load_state_with_optimizer(state).result()
    found["prompt_of_one"] = scored(client, PROMPT[:1], PROMPT[1:])
    found["loaded"] = [there, flat(client.forward(data_of(99), "cross_entropy").result())]
    found["went_on"] = [went_on, train(client, 1)]
    found["errors"] = {
        "second": message(lambda: service.create_lora_training_client("tiny", rank=0).result()),
        "adapter": message(lambda: service.create_lora_training_client("tiny", rank=4).result()),
        "part": message(lambda: service.create_lora_training_client("tiny", rank=0, train_mlp=False).result()),
    }
    asked = service.create_rest_client()
    info = asked.get_weights_info_by_tinker_path(state).result()
    kept = asked.list_checkpoints(client.model_id).result().checkpoints
    found["weights_info"] = [info.is_lora, info.lora_rank, len(kept), kept[0].expires_at is not None]
    raw("retrieve_future", raw("unload_model", {"model_id": client.model_id}))
    found["errors"]["unloaded"] = message(lambda: client.forward(data_of(99), "cross_entropy").result())
    made = service.create_training_client_from_state_with_optimizer(state).result()
    found["made"] = [there, flat(made.forward(data_of(99), "cross_entropy").result())]
    found["still"] = [first, same(one)]
    return found | {"state": state, "made_model": made.model_id}


def full_state(service):
    """The log-probability of the last of some tokens, by a checkpoint of `train`; then a step."""
    tokens = [int(each) for each in sys.argv[6].split(",")]
    raw("retrieve_future", raw("unload_model", {"model_id": sys.argv[5]}))
    client = service.create_lora_training_client("tiny", rank=0).result()
    begun = scored(client, tokens[:-1], tokens[-1:])
    client.load_state_with_optimizer(sys.argv[4]).result()
    found = {"begun": begun, "loaded": scored(client, tokens[:-1], tokens[-1:])}
    return found | {"step": train(client, 1)[0][1], "model": client.model_id}


def rounds(service, count=3):
    """Of training and sampling: what was sampled, with its log-probabilities to five digits."""
    client = service.create_lora_training_client("tiny", rank=4, seed=int(sys.argv[4])).result()
    found = []
    for i in range(count):
        train(client, 1)
        [sequence] = sampled(client.save_weights_and_get_sampling_client(), seed=i).sequences
        found.append([list(sequence.tokens), [round(float(each), 5) for each in sequence.logprobs]])
        print(f"round {i}", file=sys.stderr, flush=True)
    path = client.save_weights_for_sampler("last").result().path
    return {"rounds": found, "path": path}


def long_rounds(service):
    sys.argv[4:] = ["5"]
    return {"rounds": [tokens for tokens, _ in rounds(service, 8)["rounds"]]}


def when_there_is_room(service):
    """A model of a rank, once it is not refused; what it is refused with; a sample of it."""
    rank, seconds, refused = int(sys.argv[4]), float(sys.argv[5]), []
    ends = time.monotonic() + seconds
    while True:
        try:
            client = service.create_lora_training_client("tiny", rank=rank, seed=1).result()
            break
        except Exception as error:
            refused.append(str(error))
            if time.monotonic() > ends:
                raise
            time.sleep(1)
    train(client, 1)
    return both(client.save_weights_and_get_sampling_client(), client) | {"refused": refused}


def chaos(service):
    """Steps of many kinds, drawn by a seed, until a file appears (tests/chaos/served.py): results, and samples of this
    version and of older ones beside the trainer's log-probabilities of them."""
    draw = np.random.default_rng(int(sys.argv[4]))
    client = service.create_lora_training_client("tiny", rank=4, seed=int(sys.argv[4])).result()
    results, samples, saved, samplers, steps = [], [], [], [], 0
    losses = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
    while steps < int(sys.argv[5]) and not os.path.exists(sys.argv[6]):
        chosen, seeds = draw.choice(losses, draw.integers(1, 4)), draw.integers(0, 1000, 3)
        called = [
            client.forward_backward(data_of(int(seed), loss != "cross_entropy"), str(loss))
            for loss, seed in zip(chosen, seeds, strict=False)
        ]
        called.append(client.optim_step(types.AdamParams(learning_rate=float(draw.uniform(1e-3, 1e-2)))))
        saving, loading, publishing = (draw.random() < share for share in (0.3, 0.2, 0.5))
        which = draw.random()
        if saving:
            called.append(client.save_state(f"step-{steps}"))
        found = [each.result() for each in called]
        results += [["forward_backward", *flat(each)] for each in found[: len(chosen)]]
        results.append(["optim_step", found[len(chosen)].metrics["grad_norm"]])
        if saving:
            saved.append(found[-1].path)
        if loading and saved:
            client.load_state_with_optimizer(saved[int(which * len(saved))]).result()
            results.append(["load", *flat(client.forward(data_of(99), "cross_entropy").result())])
        if publishing:
            sampler = client.save_weights_and_get_sampling_client()
            [sequence] = sampled(sampler, seed=steps).sequences
            tokens = list(sequence.tokens)
            trainer = scored(client, PROMPT, tokens)
            given = [float(each) for each in sequence.logprobs]
            samples.append({"of": steps, "at": steps, "tokens": tokens, "sampled": given, "trainer": trainer})
            samplers = [*samplers, (steps, sampler, tokens, trainer)][-3:]
            for of, older, tokens, trainer in samplers:
                logprobs = older.compute_logprobs(ids(*PROMPT, *tokens)).result()[len(PROMPT) :]
                samples.append({"of": of, "at": steps, "tokens": tokens, "sampled": logprobs, "trainer": trainer})
        steps += 1
        print(f"step {steps}", file=sys.stderr, flush=True)
    path = client.save_weights_for_sampler("end").result().path
    results.append(["end", *flat(client.forward(data_of(99), "cross_entropy").result())])
    return {"results": results, "samples": samples, "steps": steps, "path": path}


def stranger_sampler(service):
    return {"error": message(lambda: sampled(service.create_sampling_client(model_path=sys.argv[4])))}


def own_loop(_):
    """examples/own_loop.py on a small task, with a reward that random weights earn: samples, loss, norm."""
    task, steps, examples, rate = sys.argv[4:]
    os.environ |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": key}
    sys.path.insert(0, examples)
    import own_loop as example

    found, update = [], example.update

    def recorded(client, groups, _):
        loss, norm = update(client, groups, float(rate))
        sampled = [[prompt, [[s.tokens, s.logprobs] for s in group], earned] for prompt, group, earned in groups]
        found.append({"groups": sampled, "loss": loss, "norm": norm})
        return loss, norm

    example.update, example.PROMPTS, example.SAMPLES = recorded, 8, 4
    example.reward = lambda _, text: sum(each.islower() for each in text) / example.MAX_TOKENS
    with redirect_stdout(io.StringIO()) as said:
        example.main(example.Path(task), int(steps))
    return {"updates": found, "path": said.getvalue().split()[-1]}


def both_states(service):
    """Log-probabilities of the same data from two checkpoints."""
    client = service.create_lora_training_client("tiny", rank=4).result()
    found = [flat(client.forward(data_of(99), "cross_entropy").result())]
    for path in sys.argv[4:]:
        client.load_state_with_optimizer(path).result()
        found.append(flat(client.forward(data_of(99), "cross_entropy").result()))
    return {"states": found}


def compared(service):
    """The procedure of the cookbook's tests/compare_sampling_training_logprobs.py, with a text for its document: its
    mean square of what a sampler's log-probabilities differ by; losses before and after three steps."""
    import torch
    from tinker_cookbook.supervised.common import datum_from_model_input_weights

    client = service.create_lora_training_client(base_model=sys.argv[4]).result()
    tokens = client.get_tokenizer().encode(sys.argv[5])
    document = types.ModelInput.from_ints(tokens)
    weights = torch.ones(len(tokens), dtype=torch.float32)
    weights[0] = 0.0
    datum = datum_from_model_input_weights(document, weights)
    losses = []
    for _ in range(3):
        output = client.forward_backward([datum], loss_fn="cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(-output.result().loss_fn_outputs[0]["logprobs"].to_torch().mean().item())
    trained = client.forward([datum], loss_fn="cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    client.save_state(name="compared", ttl_seconds=604800).result()
    sampler = client.save_weights_and_get_sampling_client(name="compared")
    sampled = torch.tensor(sampler.compute_logprobs(document).result()[1:])
    mse = ((sampled - trained) ** 2).mean().item()
    return {"mse": mse, "begun": losses[0], "trained": -trained.mean().item()}


if __name__ == "__main__":
    url, key, script = sys.argv[1:4]
    try:
        result = globals()[script](tinker.ServiceClient(base_url=url, api_key=key))
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(result), flush=True)
