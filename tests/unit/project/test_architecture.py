"""Imports point one way, and heavy packages stay in the rooms that own them. Read from source: nothing is imported."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rltool.config.serve import ENGINES

ROOT = Path(__file__).resolve().parents[3]

LEVELS = (
    {"errors", "masking", "terminal"},
    {"config", "processes", "templates", "report"},
    {"engines", "router", "algorithms", "models"},
    {"megatron"},
    {"rollout", "weights", "checkpoints"},
    {"chat"},
    {"environments", "gateway"},
    {"agents"},
    {"training"},
    {"tinker"},
    {"quickstart", "doctor", "api"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
"""commands -> tinker -> training -> agents -> {environments, gateway} -> chat -> {rollout, weights, checkpoints} ->
megatron -> {engines, router, algorithms, models} -> {config, processes}; the quickstart and the doctor serve their
verbs alone; api is for users. A room imports what is below it, and none of its own level."""
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

SAME_LEVEL = {
    ("engines", "models"): "serve-engines refuses files that are cut off as the trainer does (weight_files, no torch)",
    ("router", "engines"): "a router fronts engines: it reads their addresses and has the same HTTP client",
}
"""Imports between rooms of one level, each with its reason. The reverse of one of these would be a circle."""

OWNERS = {
    "ray": {"training": "actors and placement"},
    "megatron": {"megatron": "the trainer", "checkpoints": "dist_checkpointing and the model that it fills"},
    "vllm": {
        "engines/plugin": "what runs inside a vLLM server",
        "megatron/exact.py": "its kernels, for the trainer that is to give the same bits",
        "weights/verify/layers.py": "its layers, for the error that names the first that differs",
    },
    "starlette": {"engines/plugin/server.py": "what runs inside a vLLM server"},
    "sglang": {},
    "sglang_router": {"router/main.py": "the router's own process"},
    "torch": {
        "algorithms": "pure tensor functions",
        "models": "tensors are merged and cut",
        "megatron": "the trainer",
        "weights": "tensors are sent",
        "checkpoints": "tensors are saved and compared",
        "training": "the driver shards batches",
        "engines/plugin": "what runs inside a vLLM server",
        "engines/transfer/wire.py": "the wire contract, which trainer and plugin share",
        "engines/delta": "patches of tensors, which trainer, plugin and followers share",
        "engines/transfer/shards.py": "the plan of sharded transfers, which trainer and plugin share",
        "engines/transfer/fp8.py": "the format of quantised weights, which trainer and plugin share",
        "engines/transfer/nccl.py": "communicators, which trainer and plugin share",
        "engines/transfer/ipc.py": "memory that the trainer shares with the plugin",
        "rollout/batching.py": "samples become tensors",
        "quickstart/tiny_model.py": "makes a model",
    },
    "transformers": {
        "rollout/tokenizer.py": "the tokenizer",
        "rollout/pictures.py": "the image processor",
        "megatron/pictures.py": "the vision tower and its image processor",
        "checkpoints/logits.py": "the logits to compare with",
        "checkpoints/family_check.py": "the tiny model to compare with",
        "quickstart/tiny_model.py": "makes a model",
    },
    "typer": {"commands": "verbs", "cli.py": "verbs"},
    "boto3": {"engines/delta/store.py": "S3-compatible stores"},
    "botocore": {"engines/delta/store.py": "its errors and settings"},
    "aiohttp": {
        "engines/client.py": "generation and control calls",
        "rollout/generate.py": "the session of own generate functions",
        "rollout/rewards/remote.py": "a reward over HTTP",
        "training/run_server.py": "the driver's endpoint",
        "engines/metrics_text.py": "what engines measure, with bounds on replies",
        "tinker/server.py": "what tinker's client speaks to",
        "gateway/server.py": "what agents speak to",
        "gateway/bodies.py": "its requests",
        "gateway/agent_routes.py": "its routes for remote agents",
        "gateway/main.py": "its process",
    },
    "huggingface_hub": {"models/hub.py": "models by name"},
    "datasets": {"rollout/data/hub.py": "data sets by name"},
    "math_verify": {"rollout/rewards/shipped.py": "a reward"},
    "verifiers": {"agents/verifiers_env.py": "its environments"},
    "harbor": {"agents/harbor_env.py": "its tasks", "agents/harbor_local.py": "an environment for them"},
    "nemo_gym": {"agents/nemo_gym_env.py": "its environments"},
    "requests": {"engines/sync_client.py": "one-shot calls of the command line"},
}
"""Heavy or owned package -> where it may be imported (a room, a room within a room, or one file) and why."""

GATEWAY_IMPORTS = {
    "chat": "conversations, the chat template, parsers",
    "config": "its settings",
    "engines": "addresses, requests and replies, the HTTP client",
    "errors": "",
    "models": "which of them take pictures, and how",
    "terminal": "what it prints",
    "processes": "run directory, keys, starting",
    "rollout": "the tokenizer, and the data plane with what continues a response",
}
"""Rooms that the gateway may import, and for what: it trains nothing, and knows no weights."""

LAZY_ONLY = {"boto3", "botocore", "transformers", "sglang_router", "reasoning_gym", "pyarrow", "sglang",
    "huggingface_hub", "datasets", "math_verify", "verifiers", "nemo_gym",
}  # fmt: skip
"""Packages that take seconds to import, or belong to one feature: inside functions only."""

IMPORTS_NOTHING_HEAVY = (
    "cli.py", "errors.py", "masking.py", "terminal.py", "doctor.py", "config", "processes", "templates", "report",
    "commands", "router", "engines", "models/weight_files.py", "models/hub.py",
)  # fmt: skip
"""Modules that load in the base installation. Of engines: all but the plugin, and those of TORCH_ALONE."""

TORCH_ALONE = (
    "engines/transfer/wire.py", "engines/transfer/nccl.py", "engines/transfer/ipc.py", "engines/transfer/fp8.py",
    "engines/transfer/shards.py", "engines/delta/",
)  # fmt: skip
"""What trainer and plugin share; it needs torch."""
WITH_TORCH = ("wire", "nccl", "fp8", "shards")


class Import(NamedTuple):
    file: str  # relative to rltool/
    module: str
    lazy: bool

    @property
    def room(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def imports_of(text: str, file: str) -> Iterator[Import]:
    """Every import in the source, those inside functions and under TYPE_CHECKING too (lazy: not executed at import)."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(file, alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}: relative imports hide where they point"
                names = (
                    [f"rltool.{alias.name}" for alias in child.names] if child.module == "rltool" else [child.module]
                )
                yield from (Import(file, name, lazy) for name in names)
            else:
                yield from visit(child, lazy or is_function(child) or is_type_checking(child))

    yield from visit(ast.parse(text), False)


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def all_imports() -> list[Import]:
    package = ROOT / "rltool"
    files = sorted(package.rglob("*.py"))
    return [
        found
        for file in files
        for found in imports_of(file.read_text(encoding="utf-8"), file.relative_to(package).as_posix())
    ]


def wrong_directions(imports: list[Import]) -> list[str]:
    wrong = []
    for found in imports:
        parts = found.module.split(".")
        # `from rltool import __version__`, and `import rltool` for it, are for everybody
        if (
            parts[0] != "rltool"
            or len(parts) == 1
            or parts[1].startswith("__")
            or found.room == parts[1]
            or found.file == "__init__.py"
        ):
            continue
        if LEVEL[found.room] <= LEVEL[parts[1]] and (found.room, parts[1]) not in SAME_LEVEL:
            wrong.append(f"{found.file} imports {found.module}")
    return wrong


def misplaced(imports: list[Import]) -> list[str]:
    return [
        f"{found.file} imports {found.module}"
        for found in imports
        if found.package in OWNERS
        and not any(found.file == place or found.file.startswith(f"{place}/") for place in OWNERS[found.package])
    ]


def test_every_room_has_a_level():
    rooms = {
        path.name.removesuffix(".py")
        for path in (ROOT / "rltool").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert rooms - {"__init__"} == set(LEVEL)


def test_imports_point_one_way():
    assert wrong_directions(all_imports()) == []


def test_every_exception_is_still_needed():
    pairs = {
        (found.room, found.module.split(".")[1])
        for found in all_imports()
        if found.package == "rltool" and "." in found.module
    }
    assert set(SAME_LEVEL) <= pairs
    assert not {(b, a) for a, b in SAME_LEVEL} & pairs
    for package, places in OWNERS.items():
        files = [found.file for found in all_imports() if found.package == package]
        unused = [place for place in places if not any(file == place or file.startswith(f"{place}/") for file in files)]
        assert unused == [], f"{package} is not imported in {unused} any more"


def test_heavy_packages_are_imported_only_where_they_belong():
    assert misplaced(all_imports()) == []


def test_slow_and_optional_packages_are_imported_inside_functions():
    assert [
        f"{found.file} imports {found.module}"
        for found in all_imports()
        if found.package in LAZY_ONLY and not found.lazy
    ] == []


def test_the_base_installation_imports_nothing_heavy_at_the_top():
    heavy = {"torch", "ray", "megatron", "vllm", "transformers", "numpy", "safetensors", "sglang_router"}
    heavy_rooms = {"training", "rollout", "weights", "checkpoints", "megatron", "algorithms", "models"}
    wrong = []
    for found in all_imports():
        if found.lazy or found.file.startswith(("engines/plugin/", *TORCH_ALONE)):
            continue
        if not any(found.file == place or found.file.startswith(f"{place}/") for place in IMPORTS_NOTHING_HEAVY):
            continue
        if found.module in ("rltool.models.weight_files", "rltool.models.hub"):  # which are looked at here themselves
            continue
        room = found.module.split(".")[1] if found.package == "rltool" and "." in found.module else ""
        shared = found.module.startswith(
            tuple(f"rltool.engines.{part}" for part in (*(f"transfer.{name}" for name in WITH_TORCH), "delta"))
        )
        if found.package in heavy or room in heavy_rooms or shared:
            wrong.append(f"{found.file} imports {found.module}")
    assert wrong == []


FLOORS = {
    "engines": ({"transfer"}, {"delta"}, {"plugin"}, {"dialects"}, {"fleet"}, {"launch"}),
    "rollout": ({"data", "serving"}, {"rewards"}, {"measure"}),
    "weights": ({"delta", "verify"}, {"send", "transports"}),
    "training": ({"cluster", "checks"}, {"ranks", "observe"}, {"manager"}),
}
"""Folders within a room, the lowest first. One imports those below it, and none of its own floor. Files beside the
folders are what several of these share, or what puts them together."""
ONE_CONTRACT = {("plugin", "dialects"): "the plugin and vLLM's dialect share the form of sampling masks"}


def test_folders_within_a_room_import_downward():
    for room, floors in FLOORS.items():
        folders = {path.name for path in (ROOT / "rltool" / room).iterdir() if (path / "__init__.py").exists()}
        assert folders == set().union(*floors)
        floor = {folder: number for number, names in enumerate(floors) for folder in names}
        for found in all_imports():
            above, below = found.file.split("/"), found.module.split(".")
            if above[0] != room or below[:2] != ["rltool", room] or len(below) < 3:
                continue
            if above[1] not in folders or below[2] not in folders or above[1] == below[2]:
                continue
            if (above[1], below[2]) not in ONE_CONTRACT:
                assert floor[above[1]] > floor[below[2]], f"{found.file} imports {found.module}"


MOST_FILES = 20
MORE_FILES = {
    "commands": (26, "a verb each"),
    "config": (23, "a section each"),
    "megatron": (39, "a part of the model each"),
    "models": (38, "a family each"),
    "processes": (31, "small and many-sided"),
}
"""Folders with more files, at most so many, and why."""


def test_no_folder_is_too_full_to_read():
    package = ROOT / "rltool"
    found = {
        file.parent.relative_to(package).as_posix(): len(list(file.parent.glob("*.py")))
        for file in package.rglob("__init__.py")
    }
    allowed = {folder: limit for folder, (limit, _) in MORE_FILES.items()}
    assert {folder: n for folder, n in found.items() if n > allowed.get(folder, MOST_FILES)} == {}
    assert [folder for folder in MORE_FILES if found[folder] <= MOST_FILES] == []  # no exception any more


PASSED_AROUND = {
    "engines": {"arrays", "types", "weight_version"},
    "gateway": {"errors", "sampling"},
    "rollout": {"contracts", "groups", "sample", "tokenizer"},
    "weights": {"transport"},
}
"""Modules beside a room's folders that hold what these pass to each other: tests of any folder import them."""


def misplaced_test(text: str, file: str, folders: set[str]) -> str:
    """Why a file of tests/unit/ROOM does not lie where it belongs; "" where it does. file: relative to tests/unit;
    folders: of rltool/ROOM.

    A file which, of its room, imports from one folder alone (what is passed around apart) lies in the folder of that
    name. What lies in a folder imports from the one of that name. All others lie where they like."""
    room, *inner = file.split("/")[:-1]
    modules = [
        module
        for node in ast.walk(ast.parse(text))
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    found = {module.split(".")[2] for module in modules if module.startswith(f"rltool.{room}.")}
    found -= PASSED_AROUND.get(room, set())
    if inner and inner[0] not in folders:
        return f"tests/unit/{file}: there is no rltool/{room}/{inner[0]}"
    if inner and inner[0] not in found:
        return f"tests/unit/{file} imports nothing of rltool/{room}/{inner[0]}"
    if len(found) == 1 and found <= folders and inner != [*found]:
        return f"tests/unit/{file} belongs into {room}/{found.pop()}"
    return ""


def test_unit_tests_lie_in_the_folders_of_what_they_test():
    tests, wrong = ROOT / "tests" / "unit", []
    for room in sorted(path.name for path in tests.iterdir() if (ROOT / "rltool" / path.name).is_dir()):
        folders = {file.parent.name for file in (ROOT / "rltool" / room).glob("*/__init__.py")}
        wrong += [
            misplaced_test(file.read_text(encoding="utf-8"), file.relative_to(tests).as_posix(), folders)
            for file in sorted((tests / room).rglob("test_*.py"))
        ]
    assert len(wrong) > 150 and [reason for reason in wrong if reason] == []


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("engines/test_a.py", "from rltool.engines.delta import store", "belongs into engines/delta"),
        ("engines/test_a.py", "from rltool.engines import plugin, types", "belongs into engines/plugin"),
        ("engines/plugin/test_a.py", "import rltool.engines.delta.store", "imports nothing of rltool/engines/plugin"),
        ("engines/other/test_a.py", "import rltool.engines.plugin", "there is no rltool/engines/other"),
        ("engines/plugin/test_a.py", "from rltool.engines import plugin, delta", ""),
        ("engines/test_a.py", "from rltool.engines import plugin, delta", ""),
        ("engines/test_a.py", "from rltool.engines import plugin, endpoints", ""),
        ("engines/test_a.py", "from rltool.engines.types import Lease", ""),
    ],
)
def test_a_unit_test_in_a_wrong_folder_is_found(file, text, reason):
    found = misplaced_test(text, file, {"plugin", "delta"})
    assert reason in found and bool(found) == bool(reason)


def test_the_plugin_needs_nothing_of_the_trainer():
    allowed = {
        "rltool",
        "rltool.__version__",
        "rltool.engines",
        "rltool.engines.types",
        "rltool.engines.dialects.sampling_mask",
        "rltool.engines.transfer",
    }
    found = {i.module for i in all_imports() if i.file.startswith("engines/plugin/") and i.package == "rltool"}
    shared = (
        "rltool.engines.plugin",
        "rltool.engines.transfer.wire",
        "rltool.engines.transfer.nccl",
        "rltool.engines.transfer.shards",
        "rltool.engines.delta",
    )
    assert {module for module in found if not module.startswith(shared)} <= allowed


WALL_CLOCK = {
    "processes/run_directory.py": "names of runs, and when they were made",
    "processes/files.py": "how far the clock of a shared disk is from this host's",
    "gateway/registry.py": "sessions outlive the process that measured when they were used last",
    "gateway/turns.py": "when a turn was, for its record",
    "report/page.py": "when a page was made",
    "training/observe/loggers.py": "MLflow wants the time of each value",
    "tinker/journal.py": "when a call was carried out, for the report",
    "training/observe/report.py": "when a run was started, for its report",
    "tinker/books.py": "when a model was used last, for people",
    "tinker/service.py": "as above, and when a checkpoint is to expire",
    "tinker/saved.py": "checkpoints expire at a date, which outlives the process",
}


def wall_clocks(text: str) -> list[str]:
    """Where the time of day is asked for."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now")
    ]


def test_no_wait_depends_on_the_time_of_day_which_may_jump():
    package = ROOT / "rltool"
    found = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if wall_clocks(file.read_text(encoding="utf-8"))
    }
    assert found == set(WALL_CLOCK)
    assert wall_clocks("import time\nends = time.time() + 5") == ["time.time"]


def compared_engines(text: str) -> list[str]:
    """Where the name of an engine is compared, or is a key of a table."""
    nodes = list(ast.walk(ast.parse(text)))
    asks: list[tuple[ast.AST, list[ast.AST]]] = [(n, [n]) for n in nodes if isinstance(n, ast.Compare | ast.MatchValue)]
    asks += [(n, [key for key in n.keys if key is not None]) for n in nodes if isinstance(n, ast.Dict)]
    return [
        ast.unparse(node)
        for node, parts in asks
        if any(
            isinstance(each, ast.Constant) and each.value in ENGINES for part in parts for each in ast.walk(part)
        )
    ]


def test_what_differs_between_engines_is_in_their_dialects():
    package = ROOT / "rltool"
    found = {
        file.relative_to(package).as_posix(): len(compared_engines(file.read_text(encoding="utf-8")))
        for file in sorted(package.rglob("*.py"))
    }
    # the tables of dialects, of packages by what cannot be imported, of engines by transport
    tables = {"config/serve.py": 1, "cli.py": 1, "weights/transport.py": 1}
    assert {file: places for file, places in found.items() if places} == tables
    assert len(compared_engines('a == "vllm" or b in ("x", "sglang") or {"vllm": 1}[c] or {1: "vllm"}')) == 3


def past_the_terminal(text: str) -> list[str]:
    """Where text may reach a terminal past rltool/terminal.py, or be read as rich's markup: there, a prompt's escape
    sequence would be obeyed, and `[/INST]` or the host of `http://[::1]:80` lost."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rich":
            found += [a.name for a in node.names if a.name in {"Console", "get_console", "print", "print_json"}]
            found += ["rich.markup"] * (node.module == "rich.markup")
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name in {"rich", "rich.console", "rich.markup"}]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout.write", "sys.stderr.write"}:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and node.attr == "from_markup":
            found.append("from_markup")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MARKUP.search(node.value):
            found.append(node.value)
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            found += ["print"] * ((isinstance(node.func, ast.Name) and name == "print") or name == "echo")
            found += [f"{name}(markup)"] * (options.get("markup", "False") != "False")
            found += [name] * (name == "TextColumn" and options.get("markup") != "False")
    return found


MARKUP = re.compile(r"\[/?(?:not )?(?:bold|dim|italic|underline|red|yellow|green|blue|cyan|magenta)\b[\w ]*\]")

TERMINAL_EXCEPTIONS = {"cli.py": ["rich.markup"]}
"""Typer prints help as markup, so it is escaped there."""


def test_what_people_read_goes_through_the_one_console():
    package = ROOT / "rltool"
    texts = {file.relative_to(package).as_posix(): file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    found = {file: past_the_terminal(text) for file, text in texts.items() if file != "terminal.py"}
    assert {file: places for file, places in found.items() if places} == TERMINAL_EXCEPTIONS


@pytest.mark.parametrize(
    "text",
    [
        "from rich.console import Console", "import rich.console", "from rich import print", "print(f'{reply}')",
        "typer.echo(line)", "sys.stdout.write(line)", "console.print(line, markup=True)", "Text.from_markup(line)",
        "console.print(f'[yellow]leaving {line}[/yellow]')", "console.print(f'[bold cyan]{line}')",
        "Progress(TextColumn('{task.description}'))", "from rich.markup import render",
    ],
)  # fmt: skip
def test_a_way_past_the_one_console_is_found(text):
    assert past_the_terminal(text)


def task_makers(text: str) -> list[str]:
    """Calls that make tasks which nobody may hear of. A gather makes some, too, and is fine where it is awaited on the
    spot."""
    tree = ast.parse(text)
    awaited = {id(node) for wait in ast.walk(tree) if isinstance(wait, ast.Await) for node in ast.walk(wait)}
    makers = {"create_task", "ensure_future", "run_coroutine_threadsafe", "TaskGroup"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(call, ast.unparse(call.func)) for call in calls]
    return [
        ast.unparse(call)
        for call, name in names
        if name.rpartition(".")[2] in makers or (name == "asyncio.gather" and id(call) not in awaited)
    ]


def test_tasks_are_made_in_one_place_which_hears_of_their_end():
    package = ROOT / "rltool"
    found = {
        file.relative_to(package).as_posix(): calls
        for file in package.rglob("*.py")
        if (calls := task_makers(file.read_text(encoding="utf-8")))
    }
    assert set(found) == {"processes/tasks.py"}, found


@pytest.mark.parametrize(
    "text",
    [
        "asyncio.create_task(work())",
        "x = asyncio.ensure_future(work())",
        "loop.create_task(work())",
        "from asyncio import create_task\ncreate_task(work())",
        "async def f():\n    async with asyncio.TaskGroup() as group:\n        pass",
        "async def f():\n    both = asyncio.gather(a(), b())\n    await c()\n    await both",
    ],
)
def test_a_task_made_elsewhere_is_found(text):
    assert len(task_makers(text)) == 1
    assert task_makers("async def f():\n    x = await asyncio.gather(asyncio.gather(a()), *others)") == []


def test_the_gateway_imports_few_rooms_and_of_rollout_the_tokenizer_and_what_generates():
    found = [i for i in all_imports() if i.room == "gateway" and i.package == "rltool" and "." in i.module]
    assert {i.module.split(".")[1] for i in found} == {"gateway", *GATEWAY_IMPORTS}
    modules = {i.module.removeprefix("rltool.rollout.") for i in found if i.module.startswith("rltool.rollout")}
    serving = {"serving.data_plane", "serving.monitor", "serving.versions"}
    assert modules == {"tokenizer", "generate", "sample", "stop_strings", "pictures", *serving}
    models = {i.module.removeprefix("rltool.models.") for i in found if i.module.startswith("rltool.models")}
    assert models == {"pictures", "registry"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config/a.py", "from rltool.engines.types import Bucket"),
        ("weights/a.py", "from rltool.rollout import sample"),
        ("engines/a.py", "def f():\n    import rltool.router.launch"),
        ("megatron/a.py", "from rltool import weights"),
        (
            "training/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rltool.commands.train import train",
        ),
    ],
)
def test_an_import_that_points_back_is_found(file, text):
    assert len(wrong_directions(list(imports_of(text, file)))) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("rollout/data.py", "import torch"),
        ("weights/a.py", "def f():\n    from ray import get"),
        ("engines/dialects/vllm.py", "import vllm.version"),
    ],
)
def test_a_heavy_import_in_a_wrong_place_is_found(file, text):
    assert len(misplaced(list(imports_of(text, file)))) == 1


def in_circles(imports: list[Import]) -> list[str]:
    """Modules that import themselves by way of others."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        graph.setdefault("rltool." + found.file.removesuffix(".py").replace("/", "."), set()).add(found.module)

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            new = graph.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    return sorted(module for module in graph if module in reached(module))


def test_no_module_of_the_configuration_imports_itself_by_way_of_others_not_even_for_types():
    assert in_circles([found for found in all_imports() if found.room == "config"]) == []
    back = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rltool.config.train import TrainConfig"
    circle = [*imports_of("from rltool.config.rules import RULES", "config/train.py"),
              *imports_of(back, "config/rules.py")]  # fmt: skip
    assert in_circles(circle) == ["rltool.config.rules", "rltool.config.train"]


MOST_PARAMETERS = 7
"""Of a constructor: what belongs together is one value before that."""


def test_no_constructor_takes_more_than_seven_parameters():
    """Fields of dataclasses and of configuration have names of their own, and do not count."""
    found = {}
    for file in sorted((ROOT / "rltool").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                found[f"{file.relative_to(ROOT)}:{node.lineno}"] = len(given) - 1
    assert len(found) > 100
    assert {place: count for place, count in found.items() if count > MOST_PARAMETERS} == {}
