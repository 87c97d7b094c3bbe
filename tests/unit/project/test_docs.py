"""The documentation is checked against the code: commands, links, keys, names, quoted messages, examples."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rltool import api
from rltool.algorithms.contracts import check_advantage_function, check_loss_function
from rltool.chat.conversation import Message
from rltool.cli import VERBS, load_command
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.gateway import GatewayConfig
from rltool.config.rollout import DeadlinesConfig
from rltool.config.router import RouterConfig
from rltool.config.serve import ServeConfig
from rltool.config.train import TrainConfig
from rltool.engines.types import VersionSpan
from rltool.environments.protocol import Task
from rltool.models.registry import supported_architectures
from rltool.rollout.batching import samples_to_batch
from rltool.rollout.contracts import check_generate_function, check_reward_function, example_group
from rltool.rollout.sample import Sample

ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}

GENERATED = ("docs/cli.md", "docs/configuration.md", "docs/models.md", "docs/rooms.md", "docs/tinker-api.md")
MOST_WORDS = 40_000
DEFAULTS = {"router": "start", "models": "show"}
"""Of groups: what runs where no command of theirs is named."""


@cache
def generator():
    """docs/generate.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(text: str) -> list[str]:
    """Lines of indented or fenced code blocks, without their indent."""
    lines, fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip())
    return lines


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", "\n".join(line for line in text.splitlines() if not line.startswith("    ")))


def typed_commands() -> list[tuple[str, str]]:
    """(page, line) of every rltool command in a code block: what a reader will copy."""
    found = [(page, line.removeprefix("$ ")) for page, text in PAGES.items() for line in code_lines(text)]
    return [(page, line) for page, line in found if re.match(r"(\S*/)?rltool [a-z]", line)]


def mentioned_commands() -> list[tuple[str, str]]:
    return [
        (page, code) for page, text in PAGES.items() for code in inline_code(text) if re.match(r"rltool [a-z]", code)
    ]


def leaf(words: list[str]):
    """(command, its arguments) behind `rltool WORDS`; groups are descended into, by their default where none is
    named."""
    assert words[0] in VERBS, f"there is no verb {words[0]!r}"
    command, rest = load_command(words[0]), words[1:]
    if hasattr(command, "commands"):
        if rest and rest[0] in command.commands:
            return command.commands[rest[0]], rest[1:]
        if words[0] in DEFAULTS:
            return command.commands[DEFAULTS[words[0]]], rest
    return command, rest


def options(command) -> set[str]:
    return {"--help"} | {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


@pytest.mark.parametrize(("page", "line"), typed_commands())
def test_every_command_to_copy_parses(page, line):
    words = shlex.split(line, comments=True)[1:]
    command, arguments = leaf(words)
    # raises for an unknown option, a missing argument or a wrong value
    command.make_context(command.name, list(arguments))
    for before, word in pairwise(words):
        if before == "--set":
            assert word.partition("=")[0] in set(generator().keys(TrainConfig)), word


@pytest.mark.parametrize(("page", "code"), mentioned_commands())
def test_every_mentioned_command_has_its_verb_and_options(page, code):
    command, arguments = leaf(shlex.split(code)[1:])
    named = {word.partition("=")[0] for word in arguments if word.startswith("-") and word != "--"}
    assert named <= options(command)


def test_there_are_commands_to_check():
    assert len(typed_commands()) > 25
    assert {line.split()[1] for _, line in typed_commands()} >= {
        "serve-engines",
        "router",
        "convert-ckpt",
        "train",
        "debug",
        "engines",
        "status",
        "logs",
        "stop",
    }


@pytest.mark.parametrize("verb", [verb for verb in VERBS if hasattr(load_command(verb), "commands")])
def test_every_command_of_a_group_is_shown_once_as_it_is_typed(verb):
    typed = [words for _, line in typed_commands() if (words := shlex.split(line, comments=True)[1:])[0] == verb]
    used = {leaf(words)[0].name for words in typed}
    assert used == set(load_command(verb).commands)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_make_target_exists():
    used = {
        match[1]
        for text in PAGES.values()
        for code in (*code_lines(text), *inline_code(text))
        if (match := re.match(r"make ([a-z0-9-]+)", code))
    }
    assert used >= {"quickstart", "test"}
    assert used <= make_targets()


def test_the_licence_is_the_whole_of_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert re.findall(r"^   (\d)\. [A-Z]", text, re.MULTILINE) == [str(number) for number in range(1, 10)]
    assert "END OF TERMS AND CONDITIONS" in text and "APPENDIX: How to apply" in text


def test_the_readme_takes_sixty_seconds():
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 80
    assert [line.strip() for line in code_lines(text) if line.startswith("make ")] == [
        "make quickstart      # a tiny model learns to spell backward, end to end, in a few minutes",
        "make test            # all tests, on the real vLLM, SGLang, sglang-router, Ray and Megatron-core",
    ]
    pictures = re.findall(r"!\[[^\]]+\]\((\S+)\)", text)
    assert pictures == ["docs/processes.svg", "docs/arithmetic.svg"]
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_the_table_of_verbs_is_complete():
    assert re.findall(r"^\| `rltool ([a-z-]+)` \|", PAGES["docs/cli.md"], re.MULTILINE) == list(VERBS)


def test_the_command_line_reference_is_up_to_date():
    assert PAGES["docs/cli.md"] == generator().cli_page(), "run: python docs/generate.py cli"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.is_file(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{page} links to {target}"


def test_hand_written_pages_stay_short_enough_to_be_read():
    words = {page: len(text.split()) for page, text in PAGES.items() if page not in GENERATED}
    longest = sorted(words.items(), key=lambda item: -item[1])[:5]
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values())} words; cut as many as were added: {longest}"


FOLDERS = ("benchmarks", "containers", "examples", "recipes", "requirements", "rltool", "tests")
SENTENCES = {
    file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/*.md", ".github/*.md", *(f"{folder}/**/*.md" for folder in FOLDERS))
    for file in sorted(ROOT.glob(pattern))
    if file.relative_to(ROOT).as_posix() not in GENERATED
}
"""Hand-written pages, each line of whose prose is one sentence."""
SHORTENED = re.compile(r"\b(?:e\.g|i\.e|al|Dr|eqs?|cf|vs|etc|approx|no|fig|sec)\.|\.\.\.", re.IGNORECASE)
"""Full stops that end no sentence."""


def crowded_lines(text: str) -> list[str]:
    """Lines of prose in which another sentence begins, be it with a capital, a small letter or a digit. Lists, tables,
    headings and code may have several, and so may what a line begins with in bold."""
    found, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if fenced or re.match(r"    |\s*(?:[-*+] |\d+\. |[|#>])", line):
            continue
        prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "C", line))
        prose = SHORTENED.sub("", re.sub(r"^\*\*[^*]+\*\*\s*", "", prose))
        if re.search(r"[.!?][)\]\"'*]*\s+\S", prose):
            found.append(line)
    return found


def test_prose_has_one_sentence_a_line():
    assert {"README.md", "docs/loop.md", "recipes/tool_use/README.md"} < set(SENTENCES)
    crowded = {page: crowded_lines(text) for page, text in SENTENCES.items()}
    assert {page: lines for page, lines in crowded.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "crowded"),
    [
        ("One (a). Two.", True),
        ("It ends (here.) vLLM begins.", True),
        ("It ends. 0.16 begins.", True),
        ("**Said!** One. Two.", True),
        ("`x`. [A link](a.md) follows.", True),
        ("  Of an item. Another line's.", True),
        ("**Bold.** It is one sentence.", False),
        ("See `a. b`, run.toml, e.g. vLLM 0.32.1 (Ma et al. 2025, eq. 3), after 1, 2, ... seconds, 0.5 B.", False),
        ("- An item. It may have two.", False),
        ("| a cell. | It may. |", False),
        ("    code. More code", False),
    ],
)
def test_where_a_sentence_ends_is_known(line, crowded):
    assert crowded_lines(line) == ([line] if crowded else [])


def test_every_page_is_linked_from_the_readme():
    assert {page for page in PAGES if page.startswith("docs/")} == set(
        re.findall(r"\]\((docs/[a-z-]+\.md)\)", PAGES["README.md"])
    )


def about_us(page: str) -> str:
    """The page without what it says of others: the left column of the tables of coming-from.md."""
    if page != "docs/coming-from.md":
        return PAGES[page]
    return re.sub(r"^\| .*? \|(?= .* \|$)", "|", PAGES[page], flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_is_named_exists(page):
    known = set(generator().keys(TrainConfig))
    sections = {key.partition(".")[0] for key in known if "." in key}
    for code in inline_code(about_us(page)):
        match = re.match(r"([a-z]+)\.[a-z_]+(?=$| = |=)", code)
        if match and match[1] in sections:
            assert match[0] in known, f"{page}: {code}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_repository_that_is_named_exists(page):
    for code in inline_code(PAGES[page]):
        if re.fullmatch(r"(rltool|tests|docs|requirements)/[\w./-]*", code):
            assert (ROOT / code).exists(), f"{page}: {code}"


@pytest.mark.parametrize("page", PAGES)
def test_every_python_name_of_ours_that_is_named_exists(page):
    for code in inline_code(PAGES[page]):
        if not re.fullmatch(r"rltool(\.\w+)+(:\w+)?", code):
            continue
        parts = re.split(r"[.:]", code)
        depth = max(
            d
            for d in range(1, len(parts) + 1)
            if (module := ROOT.joinpath(*parts[:d])).with_suffix(".py").is_file() or module.is_dir()
        )
        file = ROOT.joinpath(*parts[:depth]).with_suffix(".py")
        if depth < len(parts):
            names = {
                node.name
                for node in ast.parse(file.read_text()).body
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            } | (set(api.__all__) if file.name == "api.py" else set())
            assert parts[depth] in names, f"{page}: {code}"


def test_the_configuration_reference_is_up_to_date():
    assert PAGES["docs/configuration.md"] == generator().configuration_page(), "run: python docs/generate.py"


def test_every_setting_has_a_meaning_in_the_reference():
    without = re.findall(r"^\| (`[\w.]+`) \|.*\|  \|$", PAGES["docs/configuration.md"], re.MULTILINE)
    # What these are is in their names, or in the line of the section.
    allowed = {"engine", "device", "optimizer.decay_style", "optimizer.beta1", "optimizer.beta2", "optimizer.eps"}
    assert {name.strip("`") for name in without} <= allowed


def test_settings_without_a_flag_are_those_that_the_reference_names():
    without = set()
    verbs = ((["serve-engines"], ServeConfig), (["router", "start"], RouterConfig), (["gateway"], GatewayConfig))
    for verb, model in verbs:
        command, _ = leaf(verb)
        without |= set(model.model_fields) - {parameter.name for parameter in command.params}
    assert without == generator().FLAGLESS
    assert all(f"`{name}`" in generator().CONFIGURATION_HEAD for name in without)


@cache
def strings_of_the_code() -> str:
    """All string constants of the package, those of f-strings too, each followed by a zero byte."""
    constants = (
        node.value
        for file in sorted((ROOT / "rltool").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return "\0".join(constants)


def quoted_messages() -> list[str]:
    return re.findall(r"^### `(.+)`$", PAGES["docs/troubleshooting.md"], re.MULTILINE)


@pytest.mark.parametrize("quoted", quoted_messages())
def test_every_quoted_error_message_is_one_of_the_code(quoted):
    pieces = [piece.strip() for piece in quoted.split("...") if len(piece.strip()) > 3]
    assert pieces
    assert all(piece in strings_of_the_code() for piece in pieces)


def python_example(containing: str, page: str = "docs/extending.md") -> str:
    """The indented block of the page with this text."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", PAGES[page], re.MULTILINE)
    [block] = [block for block in blocks if containing in block]
    return "\n".join(line.removeprefix("    ") for line in block.splitlines())


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("brevity", check_reward_function),
        ("two_turns", check_generate_function),
        ("best_of_group", check_advantage_function),
        ("one_sided", check_loss_function),
    ],
)
def test_the_examples_keep_their_contracts(name, check, monkeypatch, tmp_path):
    # A file, and not a module made here: a reward function is imported by a process of its own.
    module = f"example_of_the_docs_{name}"
    (tmp_path / f"{module}.py").write_text(python_example(f"def {name}("))
    monkeypatch.syspath_prepend(str(tmp_path))
    check(f"{module}:{name}")


def test_the_hook_of_the_docs_tells_the_advantage_of_the_docs():
    names: dict[str, Any] = {"Sample": Sample}
    exec(python_example("def more_of_what_is_hard("), names)
    groups = [example_group(4), example_group(2)]
    for number, group in enumerate(groups):
        names["difficulty"](group)
        for sample in group:
            sample.group_id, sample.versions = number, [VersionSpan("v", 0, len(sample.response_ids))]
    batch = samples_to_batch([sample for group in groups for sample in group])
    assert batch.metadata["difficulty"].tolist() == [0.25] * 4 + [0.5] * 2
    advantages = names["more_of_what_is_hard"](batch, AlgorithmConfig())
    assert advantages.tolist() == pytest.approx([-0.125, -1 / 24, 1 / 24, 0.125, -0.25, 0.25])


def texts_that_people_read() -> str:
    """Every string of the package that is no docstring: what errors and progress lines are made of."""
    found = []
    for file in (ROOT / "rltool").rglob("*.py"):
        if file.name == "renamed.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
        ]
    return "\n".join(found)


def test_every_deadline_is_named_by_what_tells_that_it_has_passed():
    said = texts_that_people_read()
    unnamed = [name for name in DeadlinesConfig.model_fields if not re.search(rf"deadlines\.{name}\b", said)]
    assert unnamed == []


def test_the_environment_of_the_docs_can_be_won():
    names: dict[str, type] = {}
    exec(python_example("class Guess", "docs/agents.md"), names)
    game = names["Guess"](limit=10)

    async def play() -> tuple[list[str], float | None]:
        start = await game.reset(Task(0, (Message("user", "hello"),), None, {}, seed=13))
        first = await game.step(Message("assistant", "5"))
        assert (await game.step(Message("assistant", "3"))).done
        return [message.text for message in (*start.messages, *first.messages)], await game.reward()

    assert asyncio.run(play()) == (["hello", "Guess a number below 10.", "lower"], 1.0)


def test_the_page_of_models_is_up_to_date_and_names_every_architecture():
    assert PAGES["docs/models.md"] == generator().models_page(), "run: python docs/generate.py models"
    named = re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", PAGES["docs/models.md"])
    assert set(named) == set(supported_architectures())


def test_the_page_of_tinkers_api_is_up_to_date_and_names_tests_that_exist():
    page = PAGES["docs/tinker-api.md"]
    assert page == generator().tinker_page(), "run: python docs/generate.py tinker-api"
    files = [*(ROOT / "tests/contract/tinker").glob("test_*.py"), *(ROOT / "tests/e2e").glob("test_*.py")]

    def tests_in(file):
        return re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)

    there = {name for file in files for name in tests_in(file)}
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named and named <= there
    # That a named test calls its route is checked where it runs.
    looks = [file.parent / name for file in files for name in (file.name, "conftest.py")]
    checks = {look for look in looks if look.exists() and "def calls_what_the_docs_say(" in look.read_text()}
    checked = [file for file in files if checks & {file, file.parent / "conftest.py"}]
    callers = set(re.findall(r"`(test_\w+)` \|$", page.partition("Recipes of")[0], re.MULTILINE))
    assert callers <= {name for file in checked for name in tests_in(file)}


def test_the_page_of_rooms_is_up_to_date_and_every_room_says_what_it_is():
    assert PAGES["docs/rooms.md"] == generator().rooms_page(), "run: python docs/generate.py rooms"
    rooms = re.findall(r"^\| `rltool/(\w+)/` \|", PAGES["docs/rooms.md"], re.MULTILINE)
    assert sorted(rooms) == sorted(file.parent.name for file in (ROOT / "rltool").glob("*/__init__.py"))


def test_every_sub_package_says_what_is_not_in_it():
    files = (ROOT / "rltool").glob("*/*/__init__.py")
    rows = dict(re.findall(r"^\| `rltool/(\w+/\w+)/` \| (.*) \|$", PAGES["docs/rooms.md"], re.MULTILINE))
    assert set(rows) == {file.parent.relative_to(ROOT / "rltool").as_posix() for file in files}
    for package, said in rows.items():
        _, _, elsewhere = said.partition("Not here: ")
        assert elsewhere, f"rltool/{package}/__init__.py does not say what may not be there: Not here: ..."
        for place in re.findall(r"[\w/.]+", " ".join(re.findall(r"\(([^)]*)\)", elsewhere))):
            assert (ROOT / "rltool" / place).exists(), f"rltool/{package}/__init__.py names {place}"


def test_every_page_that_the_code_names_exists():
    files = [file for folder in ("rltool", "recipes", "benchmarks") for file in (ROOT / folder).rglob("*.*")]
    named = {
        page
        for file in files
        if file.suffix in (".py", ".toml")
        for page in re.findall(r"(?<![\w/])docs/[a-z-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert named <= set(PAGES)
