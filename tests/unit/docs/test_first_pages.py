"""The README and the home page: figures of the benchmarks, and a way in that ends in an answer."""

import re

import pytest

from testing.child_process import REPOSITORY
from tests.harness.fences import DOCS, fences

README, HOME = REPOSITORY / "README.md", DOCS / "index.md"
BENCHMARKS = (DOCS / "reference" / "benchmarks.md").read_text()
_, SECTION = BENCHMARKS.split("\n## `vllm`: ")
MEASURED = {
    name: float(milliseconds.replace(",", ""))
    for name, milliseconds in re.findall(
        r"^\| (cold, with the connector|memory hit|remote hit)[^|]*\| ([\d.,]+) ms \|",
        SECTION.split("\n## ")[0],
        re.MULTILINE,
    )
}


@pytest.mark.parametrize("page", [README, HOME], ids=str)
@pytest.mark.parametrize("hit", ["memory hit", "remote hit"])
def test_ratios_are_those_of_the_benchmarks(page, hit):
    cold, text = round(MEASURED["cold, with the connector"]), page.read_text()
    milliseconds = round(MEASURED[hit])
    assert f"| {cold:,} ms |" in text
    assert f"| {milliseconds} ms | {cold / milliseconds:.0f} times sooner |" in text
    assert re.search(rf"answers {cold / milliseconds:.0f} times sooner", text)


def test_install_ends_with_the_state_of_the_object_that_it_creates():
    install = next(fence.text for fence in fences(README, "sh") if "helm install" in fence.text)
    (example,) = re.findall(r"apply -f (\S+)", install)
    (name,) = re.findall(r"^  name: (\S+)$", (REPOSITORY / example).read_text(), re.MULTILINE)
    assert f"wait lmcluster/{name} " in install
    assert install.splitlines()[-1].startswith(f"kubectl lmcache status {name} ")
