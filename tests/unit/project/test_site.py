"""The site of docs/, checked without its builder: every page is in the menu, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
BESIDE = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "recipes/README.md",
    "containers/README.md",
    "examples/README.md",
    "recipes/arithmetic/README.md",
)


def pages(entry: object) -> list[str]:
    """Of a menu: nested lists and tables with file names at their ends."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for item in inner for page in pages(item)]


def test_every_page_is_in_the_menu_once():
    assert sorted(pages(SITE["nav"])) == sorted(file.name for file in (ROOT / "docs").glob("*.md"))


def test_the_first_page_has_a_picture_that_is_there_and_the_commands_of_its_processes():
    first = (ROOT / "docs" / pages(SITE["nav"])[0]).read_text()
    [picture] = re.findall(r"!\[[^\]]+\]\((\S+\.svg)\)", first)
    texts = {element.text for element in ElementTree.parse(ROOT / "docs" / picture).iter() if element.text}
    assert {"rltool serve-engines", "rltool router", "rltool train"} <= texts
    assert len(first.splitlines()) < 40, "thirty seconds"


def test_nothing_of_the_site_is_fetched_from_elsewhere():
    assert SITE["theme"]["font"] is False
    assert "://" not in (ROOT / "mkdocs.yml").read_text()


def test_links_that_leave_the_site_are_named_in_place_of_linked():
    spec = importlib.util.spec_from_file_location("lay_out_site", ROOT / "docs" / "lay_out_site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    given = "see [the recipe](../recipes/arithmetic/README.md) and [data](data.md#rows)"
    assert site.page(given) == (
        "see the recipe (`recipes/arithmetic/README.md` in the repository) and [data](data.md#rows)"
    )


@pytest.mark.parametrize("page", BESIDE)
def test_every_link_of_a_page_beside_the_site_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        assert "://" in target or ((ROOT / page).parent / target.partition("#")[0]).exists(), f"{page}: {target}"


def test_the_tutorials_configuration_is_one(tmp_path):
    [text] = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    assert tomllib.loads(text)["reward"]["function"] == "my_rewards:right"
    (tmp_path / "run.toml").write_text(text)
    assert load_config(TrainConfig, [tmp_path / "run.toml"], []).config.steps == 50


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_reward_that_is_shown_pays_for_the_row_that_is_shown(page):
    from rltool.rollout.sample import Sample

    text = (ROOT / page).read_text()
    source = re.search(r"^    def right\(.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)[0]
    names: dict = {}
    exec("\n".join(line[4:] for line in source.splitlines()), names)
    row = yaml.safe_load(re.search(r'^    (\{"prompt".*\})$', text, re.MULTILINE)[1])
    sample = Sample(group_id=0, index=0, prompt_index=0, prompt_ids=[1], label=row["label"])
    assert (names["right"](sample, " 42."), names["right"](sample, "24")) == (1.0, 0.0)


def test_make_docs_and_the_extra_name_the_same_package():
    pins = (ROOT / "requirements/docs.txt").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [name] = [requirement.split(">=")[0] for requirement in extras["docs"]]
    assert f"\n{name}==" in pins
