"""Our AdamW against torch's, and the form of its state that Megatron relies on."""

import copy

import pytest
import torch

from rltool.megatron.adamw import GroupStepAdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,))]


def groups(params):
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


def step(optimizer, params, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_steps_are_those_of_torch_bit_for_bit():
    ours, theirs = parameters(), parameters()
    mine, reference = GroupStepAdamW(groups(ours), **SETTINGS), torch.optim.AdamW(groups(theirs), **SETTINGS)
    for seed in range(4):
        step(mine, ours, seed)
        step(reference, theirs, seed)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_moments_that_were_made_before_the_first_step_are_those_that_it_would_make():
    ours, early = parameters(), parameters()
    mine, made = GroupStepAdamW(groups(ours), **SETTINGS), GroupStepAdamW(groups(early), **SETTINGS)
    made.make_moments()
    assert [len(made.state[p]) for p in early] == [2, 2]
    for seed in range(2):
        step(mine, ours, seed)
        step(made, early, seed)
        made.make_moments()  # what is there stays
    assert all(torch.equal(a, b) for a, b in zip(ours, early, strict=True))


def test_the_step_stands_in_the_group_and_survives_a_round_trip():
    ours, again = parameters(), parameters()
    mine = GroupStepAdamW(groups(ours), **SETTINGS)
    for seed in range(3):
        step(mine, ours, seed)
    assert [group["step"] for group in mine.param_groups] == [3, 3]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in mine.state.values())
    restored = GroupStepAdamW(groups(again), **SETTINGS)
    restored.load_state_dict(copy.deepcopy(mine.state_dict()))
    with torch.no_grad():
        for old, new in zip(ours, again, strict=True):
            new.copy_(old)
    for optimizer, params in ((mine, ours), (restored, again)):
        step(optimizer, params, 9)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_what_it_cannot_do_is_refused():
    for option in ({"adam_w_mode": False}, {"capturable": True}):
        with pytest.raises(ValueError, match="decoupled weight decay"):
            GroupStepAdamW(parameters(), **option)
