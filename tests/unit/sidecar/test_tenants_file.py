"""The file with budgets of tenants: its format, and handling of invalid files."""

import hashlib
import io
import logging
import re
from pathlib import Path

import pytest

from lmcache_sidecar.command import main
from lmcache_sidecar.files.tenants import TenantsFile
from lmcache_sidecar.pages.stats import document
from lmcache_sidecar.pages.tenant_stats import tenants_part
from lmcache_store import keys
from lmcache_store.tenant_names import MAX_NAMED
from lmcache_store.tiers.budgets import NO_SALT, Budget, short_tenant
from lmcache_store.tiers.stats import MemoryStats

NAMESPACE = b"n" * 32
HASH, OTHER_HASH = "a" * 64, "b" * 64


def named(*entries: str) -> str:
    """A file with these tenants. Each one without a salt file has a salt."""
    hashes = [HASH, OTHER_HASH]
    return "named: [{}]".format(
        ", ".join(
            f"{{{entry}}}" if "salt" in entry else f"{{{entry}, saltHash: {hashes.pop(0)}}}"
            for entry in entries
        )
    )


class Bench:
    """A tenants file of one namespace."""

    def __init__(self, folder: Path, plain: Budget = NO_SALT) -> None:
        self.path, self.salt_path = folder / "tenants.yaml", folder / "salt"
        self.file = TenantsFile(str(self.path), plain)
        self.file.add_namespace(NAMESPACE)

    def follow(self, text: str | None = None) -> str:
        """Use this text; returns the problem, without the path."""
        if text is not None:
            self.path.write_text(text)
        self.file.follow()
        self.file.resolve()
        return self.file.problem.replace(f"{self.path}: ", "")

    @property
    def digest(self) -> str:
        digest: str = document([tenants_part(self.file, MemoryStats())])["tenants"]["tenants_digest"]
        return digest

    @property
    def names(self) -> list[str]:
        return [budget.name for budget in self.file.salted.listed]

    def budget(self, salt: str) -> Budget:
        return self.file.budgets.of(short_tenant(keys.tenant(salt, NAMESPACE)))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_budgets_of_named_tenants_by_hash_and_by_file(bench: Bench):
    bench.salt_path.write_text("pepper\n")
    text = f"""
default: {{memoryPercent: 50, priority: 1}}
named:
- name: search
  saltHash: {keys.salt_hash("s3cret").hex()}
  minMemoryPercent: 20
  lowerTierBytes: 1Ki
  priority: -100
- {{name: batch-2, saltFile: {bench.salt_path}, memoryPercent: 100}}
"""
    assert bench.follow(text) == ""
    assert bench.budget("s3cret") == Budget("search", 50, 20, 1024, -100)
    assert bench.budget("pepper") == Budget("batch-2", 100)
    assert bench.budget("unknown") == Budget("default", 50, 0, 0, 1)
    assert bench.names == ["default", "search", "batch-2"]
    assert bench.follow("") == ""
    assert bench.budget("s3cret") == Budget("default")


def test_without_a_file_tenants_have_no_bounds():
    file = TenantsFile("")
    file.follow()
    assert (file.problem, file.budgets.of(b"any")) == ("", Budget())
    facts = document([tenants_part(file, MemoryStats())])["tenants"]
    assert facts["tenants_problem"] is None
    assert facts["tenants_digest"] is None


def test_share_of_hints_is_that_of_the_tier_unless_the_file_sets_one(tmp_path: Path):
    bench = Bench(tmp_path, Budget(retain_percent=40))
    bench.follow(f"named: [{{name: search, saltHash: {keys.salt_hash('s').hex()}}}]")
    assert {bench.budget(salt).retain_percent for salt in ("s", "unknown")} == {40}
    listed = f"named: [{{name: search, saltHash: {keys.salt_hash('s').hex()}, retainPercent: 100}}]"
    assert bench.follow(f"default: {{retainPercent: 0}}\n{listed}") == ""
    assert (bench.budget("s").retain_percent, bench.budget("unknown").retain_percent) == (100, 0)
    assert bench.file.budgets.of(b"").retain_percent == 40, "requests without a salt have no entry"
    assert not bench.file.budgets.has_limits
    bench.follow("default: {retainPercent: 7}\n" + listed.replace(", retainPercent: 100", ""))
    assert bench.budget("s").retain_percent == 7


def test_share_of_hints_needs_no_file():
    budgets = TenantsFile("", Budget(retain_percent=0)).budgets
    assert [budgets.of(tenant).retain_percent for tenant in (b"", b"any")] == [0, 0]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("named: {a: b}", "named: must be a list of up to 64 tenants"),
        ("other: 1", "key 'other' is unknown"),
        ("default: 5", "default: must hold keys and values"),
        ("default: {memorypercent: 5}",
         "default: key 'memorypercent' is unknown; did you mean 'memoryPercent'?"),
        ("default: {memoryPercent: 0}", "default: memoryPercent: '0' is not a percentage from 1 to 100"),
        ("default: {priority: 101}", "default: priority: '101' is not a priority from -100 to 100"),
        ("default: {retainPercent: 101}", "default: retainPercent: '101' is not a percentage from 0 to 100"),
        ("default: {priority: [1]}", "default: priority: '' is not a priority"),
        ("default: {lowerTierBytes: 1025Ti}", "default: lowerTierBytes: must be at most 1024Ti"),
        # Metrics cannot show 400 digits.
        (f"default: {{lowerTierBytes: {'9' * 400}}}", "default: lowerTierBytes: must be at most 1024Ti"),
        ("named: [a]", "named[0]: must hold keys and values"),
        (f"named: [{{saltHash: {HASH}}}]", "named[0]: name: write up to 63 lower-case letters"),
        (named("name: A"), "named[0]: name: write"),
        (named("name: default"), "named[0]: name: write"),
        ("named: [{name: a}]", "named[0] (a): set either saltHash or saltFile"),
        (named(f"name: a, saltHash: {HASH}, saltFile: /x"), "named[0] (a): set either saltHash or saltFile"),
        (named("name: a, saltHash: abc"), "named[0] (a): saltHash: must be 64 hexadecimal digits"),
        (named("name: a, lowerTierBytes: 5Q"), "named[0] (a): lowerTierBytes: '5Q' is not a size"),
        (named("name: a, memoryPercent: 5, minMemoryPercent: 6"),
         "named[0] (a): minMemoryPercent 6 is more than memoryPercent 5"),
        ("default: {memoryPercent: 20}\n" + named("name: a, minMemoryPercent: 30"),
         "minMemoryPercent 30 is more than memoryPercent 20"),
        (named("name: a", "name: a"), "named[1]: name 'a' is used twice"),
        (named("name: a, saltFile: /absent/x", "name: a"), "named[1]: name 'a' is used twice"),
        (named("name: a, minMemoryPercent: 60", "name: b, minMemoryPercent: 41"),
         "the sum of all minMemoryPercent is 101"),
        # Guarantees of missing and of equal salts count: otherwise, a new salt would make the file invalid.
        (named("name: a, saltFile: /absent/x, minMemoryPercent: 60", "name: b, minMemoryPercent: 60"),
         "the sum of all minMemoryPercent is 120"),
        (named(*(f"name: {name}, saltHash: {HASH}, minMemoryPercent: 60" for name in "ab")),
         "the sum of all minMemoryPercent is 120"),
        ("named: [", "is not YAML"),
    ],
)  # fmt: skip
def test_invalid_file_changes_nothing_and_is_reported(bench: Bench, caplog, text: str, mistake: str):
    bench.follow(f"named: [{{name: search, saltHash: {keys.salt_hash('s').hex()}, priority: 7}}]")
    with caplog.at_level(logging.ERROR):
        assert mistake in bench.follow(text)
    assert bench.budget("s").priority == 7
    assert "The list of tenants with budgets is still default, search" in caplog.text
    facts = document([tenants_part(bench.file, MemoryStats())])["tenants"]
    assert mistake in facts["tenants_problem"]
    assert bench.follow("") == ""
    assert document([tenants_part(bench.file, MemoryStats())])["tenants"]["tenants_problem"] == ""


def test_file_with_too_many_tenants_is_refused(bench: Bench):
    entries = [f"{{name: t{number}, saltHash: {number:064x}}}" for number in range(MAX_NAMED + 1)]
    assert bench.follow(f"named: [{', '.join(entries[1:])}]") == ""
    assert len(bench.names) == MAX_NAMED + 1
    assert "named: the list has 65 tenants: reduce it to at most 64" in bench.follow(
        f"named: [{', '.join(entries)}]"
    )
    assert "t0" not in bench.names, "the former file is in use"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/absent/x", "/absent/x can't be read: check that the Secret exists and is mounted"),
        ("/dev/null", "/dev/null is empty: write the tenant's salt"),
        ('"no file\\0can have it"', ""),
        ('"no file\\uD800can have it"', ""),
    ],
)
def test_salt_that_is_missing_costs_only_its_tenant_the_budget(bench: Bench, caplog, path: str, problem: str):
    text = f"""
default: {{memoryPercent: 50}}
named:
- {{name: batch, saltFile: {path}, minMemoryPercent: 30}}
- {{name: search, saltHash: {keys.salt_hash("s3cret").hex()}, minMemoryPercent: 20}}
"""
    with caplog.at_level(logging.ERROR):
        reported = bench.follow(text)
    assert reported.startswith(f"named[0] (batch): saltFile: {problem}")
    reported.encode()  # logs and reports are UTF-8
    assert bench.budget("s3cret") == Budget("search", 50, 20)
    assert bench.budget("other") == Budget("default", 50)
    assert "default, search, without tenants whose salts cannot be used" in caplog.text
    assert bench.follow() == reported


def test_tenant_whose_salt_is_deleted_gets_new_shares(bench: Bench):
    bench.salt_path.write_text("pepper")
    bench.follow(f"named: [{{name: a, saltFile: {bench.salt_path}, minMemoryPercent: 20}}]")
    bench.salt_path.unlink()
    problem = bench.follow(f"named: [{{name: a, saltFile: {bench.salt_path}, minMemoryPercent: 30}}]")
    assert "saltFile" in problem
    assert bench.budget("pepper").min_memory_percent == 30
    bench.follow("")
    bench.follow(f"named: [{{name: a, saltFile: {bench.salt_path}}}]")
    assert bench.budget("pepper").name == "default"  # the salt of a tenant that was removed is not remembered


def test_second_tenant_with_a_salt_loses_only_its_budget(bench: Bench, caplog):
    hashed = keys.salt_hash("pepper").hex()
    text = f"""
named:
- {{name: a, saltHash: {hashed}, minMemoryPercent: 10}}
- {{name: b, saltFile: {bench.salt_path}, minMemoryPercent: 20}}
- {{name: c, saltHash: {hashed}}}
- {{name: d, saltHash: {HASH}, minMemoryPercent: 30}}
"""
    bench.salt_path.write_text("pepper")
    with caplog.at_level(logging.ERROR):
        problem = bench.follow(text)
    assert problem == (
        "named[1] (b): has the same salt as a, whose budget counts: give each tenant its own salt, or remove"
        " one of them"
    )
    assert (bench.budget("pepper").name, bench.names) == ("a", ["default", "a", "d"])
    assert bench.digest == hashlib.sha256(text.encode()).hexdigest()
    assert problem in caplog.text
    assert not {"pepper", hashed} & set(re.findall(r"\w+", caplog.text))
    bench.salt_path.write_text("salt of b")
    assert bench.follow().startswith("named[2] (c): has the same salt as a")
    assert bench.budget("salt of b") == Budget("b", 100, 20)


def test_digest_is_of_the_text_in_use(bench: Bench):
    assert "can't be read" in bench.follow()
    bench.follow("named: [")
    assert bench.digest == "", "the file is missing, or invalid"
    text = f"named: [{{name: a, saltFile: {bench.salt_path}}}]  # ä\n"
    assert "can't be read" in bench.follow(text)
    used = hashlib.sha256(text.encode()).hexdigest()
    assert bench.digest == used, "a missing salt does not stop the budgets of others"
    bench.salt_path.write_text("s3cret")
    assert (bench.follow(), bench.digest) == ("", used)
    bench.salt_path.write_text("another salt")
    assert bench.follow() == ""
    assert (bench.budget("s3cret").name, bench.budget("another salt").name) == ("default", "a")
    assert bench.digest == used
    bench.follow("default: 5")
    assert bench.digest == used, "the budgets in use are those of the former text"
    bench.path.unlink()
    assert "can't be read" in bench.follow()
    assert bench.digest == used
    text = "default: {lowerTierBytes: 1024Ti}"
    assert bench.follow(text) == "", "a missing file is read when it appears"
    assert bench.digest == hashlib.sha256(text.encode()).hexdigest()
    assert bench.file.budgets.default.disk_bytes == 1 << 50, "the largest bound on disk"


def test_bytes_on_disk_count_for_the_salt_under_each_name_and_in_each_namespace(bench: Bench):
    def owners(name: str) -> set[str]:
        bench.follow(f"named: [{{name: {name}, saltHash: {keys.salt_hash('s').hex()}}}]")
        namespaces = NAMESPACE, b"m" * 32
        bench.file.add_namespace(namespaces[1])
        bench.file.resolve()
        return {
            bench.file.budgets.owner(short_tenant(keys.tenant("s", namespace))) for namespace in namespaces
        }

    former = owners("search")
    assert len(former) == 1
    assert owners("renamed") == former
    other_salts = {
        bench.file.budgets.owner(short_tenant(keys.tenant(salt, NAMESPACE))) for salt in ("x", "y")
    }
    assert len(other_salts | former) == 3, "each other salt counts for itself"


def test_salt_hash_command_ignores_one_newline(monkeypatch, capsys):
    salts = {b"s3cret": "s3cret", b"s3cret\n": "s3cret", b"a\n\n": "a\n", b" \xc3\xa9": " é"}
    for text, salt in salts.items():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert main(["salt-hash"]) == 0
        assert capsys.readouterr().out == keys.salt_hash(salt).hex() + "\n"


@pytest.mark.parametrize(("text", "mistake"), [(b"\n", "no salt"), (b"", "no salt"), (b"\xff", "not UTF-8")])
def test_salt_hash_command_refuses_what_is_no_salt(monkeypatch, capsys, text: bytes, mistake: str):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["salt-hash"]) == 2
    assert mistake in capsys.readouterr().err
