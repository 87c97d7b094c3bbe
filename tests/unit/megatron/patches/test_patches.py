"""What rltool changes in Megatron-core is still there in the installed version, in the form that the changes expect."""

from __future__ import annotations

from importlib.metadata import version
from types import ModuleType

import pytest
import torch

from rltool.megatron import patches
from rltool.megatron.patches.cpu_mode import CUDA_FUNCTIONS, replacements
from rltool.megatron.patches.registry import RELIED_ON, VERSIONS, replace


def test_the_installed_megatron_has_everything_that_is_patched():
    assert patches.broken_targets(version("megatron-core")) == []


def test_another_version_is_reported_before_anything_else():
    assert patches.broken_targets("0.99.1")[0].startswith("Megatron-core 0.99.1 is none of 0.16, 0.19")


def test_every_patch_names_its_versions_reason_and_targets():
    assert {patch.name for patch in patches.PATCHES} == {
        "cpu_mode",
        "use_group_step_adamw",
        "use_multi_tensor_kernels",
        "save_without_manager_process",
        "unsharded_state_kept",
        "route_without_transformer_engine",
        "recompute_without_transformer_engine",
        "fuse_weight_gradients",
        "rotate_in_one_kernel",
        "dispatch_without_atomics",
    }
    for patch in patches.PATCHES:
        assert set(patch.versions) <= set(VERSIONS) and len(patch.reason) > 60 and patch.targets


def test_the_cpu_mode_replaces_exactly_what_it_declares():
    (declared,) = [patch.targets for patch in patches.PATCHES if patch.name == "cpu_mode"]
    assert {target.path for target in declared} == {f"{owner.__name__}:{name}" for owner, name, _ in replacements()}


ATTENTION = "megatron.core.transformer.attention"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (patches.Target("megatron.core.no_such_module:x"), "does not exist"),
        (patches.Target(f"{ATTENTION}:no_such_function"), "does not exist"),
        (patches.Target(f"{ATTENTION}:no_such_function", used="no_such_function(", may_be_absent=True), "any more"),
        (patches.Target(f"{ATTENTION}:apply_rotary_pos_emb", used="query = something_else("), "any more"),
        (patches.Target(f"{ATTENTION}:Attention.forward", ("self", "no_such_argument")), "first"),
    ],
)
def test_a_target_that_is_gone_or_changed_is_found(monkeypatch, target, problem):
    assert problem in target.problem()
    monkeypatch.setattr("rltool.megatron.patches.registry.RELIED_ON", (*RELIED_ON, target))
    (line,) = patches.broken_targets(version("megatron-core"))
    assert problem in line


def test_a_patch_whose_target_is_gone_is_not_applied_in_silence(monkeypatch):
    from megatron.core.transformer import attention

    monkeypatch.delattr(attention, "apply_rotary_pos_emb")
    with pytest.raises(
        patches.PatchTargetMissing, match=r"has no megatron\.core\.transformer\.attention\.apply_rotary_pos_emb"
    ):
        patches.rotate_in_one_kernel()
    assert not hasattr(attention, "apply_rotary_pos_emb")


def test_replacing_needs_something_to_replace():
    module = ModuleType("somewhere")
    with pytest.raises(patches.PatchTargetMissing, match=r"no somewhere\.there"):
        replace(module, "there", 1)


def test_outside_of_the_cpu_mode_torch_is_untouched():
    before = {name: getattr(torch.cuda, name) for name in CUDA_FUNCTIONS}
    with patches.cpu_mode():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert all(getattr(torch.cuda, name) is not function for name, function in before.items())
    assert {name: getattr(torch.cuda, name) for name in before} == before
