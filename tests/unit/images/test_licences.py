"""Licences of shipped packages: read from metadata, compared with the list, and current in the docs."""

import pytest

from tools.provenance import licences
from tools.provenance.distributions import UNKNOWN, Distribution, image_locks, installed, parse


@pytest.mark.parametrize("image", ["operator", "sidecar"])
def test_shipped_licences_are_allowed(image):
    assert list(licences.problems({package: [image] for package in installed(image_locks(image))})) == []


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True), ("GPL-3.0-only", False), ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True), ("MPL-2.0 AND (Apache-2.0 OR GPL-3.0-only)", True),
        ("MPL-2.0 AND (AGPL-3.0-only OR GPL-3.0-only)", False),
        ("MIT OR GPL-3.0-only AND GPL-2.0-only", True), ("GPL-3.0-only WITH GCC-exception-3.1", False),
    ],
)  # fmt: skip
def test_expressions(expression, allowed):
    assert licences.is_allowed(expression) is allowed


@pytest.mark.parametrize("text", ["", "MIT AND", "(MIT", "MIT)", "Do what you want"])
def test_text_that_is_no_expression_is_reported(text):
    [line] = licences.problems({Distribution("x", "1", text): ["sidecar"]})
    assert "no SPDX expression" in line


APPROVED = "Classifier: License :: OSI Approved"


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ("License-Expression: MIT AND Apache-2.0\nLicense: something", "MIT AND Apache-2.0"),
        ("License: 3-Clause BSD License", "BSD-3-Clause"),
        ("License: GPLv3", "GPLv3"),
        (f"License: Copyright\n        text\n{APPROVED} :: BSD License", "BSD-3-Clause"),
        (f"{APPROVED} :: GNU General Public License v3 (GPLv3)", UNKNOWN),
        ("Summary: nothing", UNKNOWN),
    ],
)
def test_licence_in_metadata(fields, licence):
    package = parse(f"Metadata-Version: 2.1\nName: Some.Package\nVersion: 1.0\n{fields}\n\ndescription\n")
    assert package == Distribution("some-package", "1.0", licence)


def test_unknown_licence_is_a_problem():
    [line] = licences.problems({Distribution("x", "1", UNKNOWN): ["operator", "sidecar"]})
    assert line.startswith("x 1 (operator, sidecar): the licence is unknown")
