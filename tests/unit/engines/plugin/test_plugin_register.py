"""What vLLM loads into every process of every server must be cheap, repeatable and without effect until asked for."""

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from rltool.engines import plugin
from rltool.engines.plugin import patches
from rltool.engines.plugin.worker import WeightUpdateRecovery


def modules_after(statement):
    code = f"{statement}; import sys; print(' '.join(sorted(m for m in sys.modules if '.' not in m)))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_plugin_imports_nothing_heavy():
    assert not {"vllm", "torch", "ray", "megatron", "typer", "aiohttp", "pydantic"} & set(
        modules_after("import rltool.engines.plugin")
    )


def test_the_middleware_needs_neither_ray_nor_megatron_nor_typer():
    assert not {"ray", "megatron", "typer"} & set(modules_after("import rltool.engines.plugin.server"))


def test_client_and_dialects_need_no_engine_package_and_no_torch():
    loaded = modules_after("import rltool.engines.client, rltool.engines.dialects.vllm, rltool.engines.endpoints")
    assert not {"vllm", "sglang", "torch", "ray", "megatron"} & set(loaded)


def test_registering_twice_registers_once(monkeypatch):
    class Factory:
        _registry = {}

        @classmethod
        def register_engine(cls, name, module, class_name):
            if name in cls._registry:
                raise ValueError("already registered")  # as vLLM's does
            cls._registry[name] = (module, class_name)

    module = types.ModuleType("vllm.distributed.weight_transfer.factory")
    module.WeightTransferEngineFactory = Factory
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", module)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    plugin.register()
    plugin.register()
    assert Factory._registry == {"rltool": ("rltool.engines.plugin.receiver", "WeightReceiver")}


class Condition:
    """Has what vLLM's SpinCondition has of it."""

    busy_loop_s = 1.0

    def __init__(self, quiet):
        self.last_read, self.asked = time.monotonic() - quiet, []

    def wait(self, timeout_ms=None):
        self.asked.append(timeout_ms)


@pytest.fixture
def condition(monkeypatch):
    """A new class, in the place where the plugin looks for vLLM's."""
    module = types.ModuleType("vllm.distributed.device_communicators.shm_broadcast")
    module.SpinCondition = type("SpinCondition", (Condition,), {"wait": Condition.wait})
    parts = module.__name__.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.SpinCondition


@pytest.mark.parametrize(("quiet", "naps"), [(0.0, False), (0.5, True), (2.0, False)])
def test_a_reader_naps_between_polling_and_the_socket(condition, monkeypatch, quiet, naps):
    slept = []
    monkeypatch.setattr(patches.time, "sleep", slept.append)
    for _ in range(2):  # vLLM loads plugins more than once in a process
        patches.limit_busy_loop({patches.BUSY_LOOP_VARIABLE: "0.1"})
    reader = condition(quiet)
    reader.wait(timeout_ms=7)
    assert slept == ([patches.NAP_SECONDS] if naps else []) and reader.asked == ([] if naps else [7])


def test_without_the_variable_readers_are_left_alone(condition):
    patches.limit_busy_loop({})
    assert condition.wait is Condition.wait


@pytest.mark.parametrize(
    ("variable", "asked", "version", "made"),
    [("1", 1, 3, 2), ("1", 7, 3, 7), ("1", 1, 4, 1), ("0", 1, 3, 1)],
)
def test_a_batch_invariant_server_attends_with_a_mask_also_where_every_query_is_one_token(
    monkeypatch, variable, asked, version, made
):
    module, called = types.ModuleType("vllm.v1.attention.backends.flash_attn"), []
    module.flash_attn_varlen_func = lambda *args, **options: called.append((args, options))
    parts = module.__name__.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
    sys.modules["vllm.v1.attention.backends"].flash_attn = module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):
        patches.keep_causal_blocks({patches.BATCH_INVARIANT_VARIABLE: variable})
    module.flash_attn_varlen_func("q", max_seqlen_q=asked, fa_version=version)
    assert called == [(("q",), {"max_seqlen_q": made, "fa_version": version})]


@pytest.mark.parametrize(
    ("capability", "said", "found"), [(90, None, "0"), (90, "1", "1"), (90, "0", "0"), (100, None, None)]
)
def test_a_worker_on_hopper_keeps_the_scales_that_it_is_sent_unless_the_environment_decides(capability, said, found):
    code = f"""
import os, sys, types
platforms = sys.modules["vllm.platforms"] = types.ModuleType("vllm.platforms")
platforms.current_platform = types.SimpleNamespace(is_device_capability=lambda asked: asked == {capability})
import rltool.engines.plugin.worker
print(os.environ.get("VLLM_USE_DEEP_GEMM_E8M0"))"""
    environment = {name: value for name, value in os.environ.items() if name != patches.E8M0_VARIABLE}
    environment |= {} if said is None else {patches.E8M0_VARIABLE: said}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"{found}\n"


@pytest.fixture
def system_utils(monkeypatch):
    """What the plugin looks for in vllm.utils.system_utils: a method that the platform has set, and what may override
    it."""
    module = types.ModuleType("vllm.utils.system_utils")
    module._maybe_force_spawn = lambda: None
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["vllm.utils"].system_utils = module
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr(patches.os, "register_at_fork", lambda **hooks: registered.append(hooks))
    module.registered = registered = []
    return module


def test_engine_processes_are_forked_where_the_variable_says_so(system_utils):
    for _ in range(2):
        patches.fork_engine_processes({patches.FORK_VARIABLE: "1"})
    system_utils._maybe_force_spawn()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert system_utils.registered == [{"after_in_child": patches.leave_servers_to_the_parent}]


def test_without_the_variable_they_are_started_as_vllm_likes(system_utils):
    before = system_utils._maybe_force_spawn
    patches.fork_engine_processes({})
    assert system_utils._maybe_force_spawn is before and system_utils.registered == []


SERVER = """
import os, socket
from rltool.engines.plugin.patches import leave_servers_to_the_parent
os.register_at_fork(after_in_child=leave_servers_to_the_parent)
server = socket.create_server(("127.0.0.1", 0))
inode = os.fstat(server.fileno()).st_ino
left, right = socket.socketpair()
if os.fork() == 0:
    left.send(b"connected sockets stay")
    left.recv(1)
    server.close()  # as the interpreter's end does
    os._exit(0)
said = right.recv(100).decode()
server.close()
print(inode, said, flush=True)  # the port is closed
input()
right.send(b".")
os.wait()
"""


def listening_inodes():
    """Of all TCP sockets of this host that listen: as /proc/net/tcp has them (state 0A)."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {row[9] for row in rows if row[3] == "0A"}


def test_a_forked_process_does_not_keep_its_parents_port():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, text=True) as process:
        inode, _, said = process.stdout.readline().strip().partition(" ")
        assert said == "connected sockets stay"
        # Not by a connection: in the meantime another process may have got the port.
        assert inode not in listening_inodes()
        process.communicate("\n")
    assert process.returncode == 0


class Receiver:
    def __init__(self, changed):
        self.changed, self.calls = changed, []

    def abandon(self):
        self.calls.append("abandon")

    def reset_weight_update_target(self):
        self.calls.append("reset target")


class Worker(WeightUpdateRecovery):
    """Has what vllm.v1.worker.gpu_worker.Worker has of it."""

    def __init__(self, engine, active):
        self.weight_transfer_engine, self._weight_update_active = engine, active


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("changed", [True, False])
def test_an_unfinished_update_is_ended_and_tells_whether_the_weights_are_mixed(active, changed):
    worker = Worker(Receiver(changed), active)
    assert worker.rltool_end_unfinished_update() is changed
    assert worker._weight_update_active is False
    assert worker.weight_transfer_engine.calls == ["abandon", "reset target"]


def test_a_worker_without_weight_transfer_has_nothing_to_end():
    assert Worker(None, False).rltool_end_unfinished_update() is False
