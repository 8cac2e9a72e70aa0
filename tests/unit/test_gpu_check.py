"""Steps of ``make gpu-check`` that are killed or can't run, and the page that says so."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import page, results
from benchmarks.gpu.page import FAILED, LATE, MISSING, PASSED, Outcome
from benchmarks.gpu.plan import STEPS, Step, missing
from benchmarks.gpu.results import Results
from benchmarks.gpu.steps import tests as tests_step


def make_results(folder, step="facts"):
    noted = Results(folder, step)
    section = noted.section("Copies", ("size", "GB/s"), "How fast.")
    section.add("2 MiB", "50.1")
    return noted, section


def test_rows_written_before_a_kill_are_on_the_page(tmp_path):
    make_results(tmp_path)
    path = tmp_path / "facts.jsonl"
    path.write_text(path.read_text() + '{"of": "Copies", "row": ["4 Ki')
    outcome = Outcome("facts", LATE, 60, entries=results.read(tmp_path, "facts"))
    text = page.write(tmp_path, {"GPU": "H100"}, [outcome], is_simulated=False).read_text()
    assert "**stopped at its time limit** after 60 s" in text
    assert "| 2 MiB | 50.1 |" in text
    assert "4 Ki" not in text


def test_cells_can_not_break_a_table(tmp_path):
    _, section = make_results(tmp_path)
    section.add("a|b\nc", "1")
    assert "| a/b c | 1 |" in results.markdown(results.read(tmp_path, "facts"))


def test_repeated_step_replaces_its_earlier_result_and_the_others_stay(tmp_path):
    make_results(tmp_path)
    first = [Outcome("facts", LATE, 60, entries=results.read(tmp_path, "facts")), Outcome("bench", FAILED, 5)]
    page.write(tmp_path, {}, first, is_simulated=False)
    before = page.earlier(tmp_path, ["bench"])
    text = page.write(tmp_path, {}, [Outcome("bench", PASSED, 6), *before], is_simulated=False).read_text()
    assert "| 2 MiB | 50.1 |" in text
    assert text.index("## facts") < text.index("## bench")
    assert "**passed** after 6 s" in text
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


def test_last_line_names_failures_their_meaning_and_what_did_not_run(tmp_path):
    noted, _ = make_results(tmp_path)
    noted.problem("wrong bytes", "do not use it")
    noted.problem("another", "also bad")
    outcomes = [
        Outcome("facts", FAILED, 3, entries=results.read(tmp_path, "facts")),
        Outcome("bench", PASSED, 4),
        Outcome("vllm", MISSING, why="no vllm"),
    ]
    assert page.last_line(outcomes) == (
        "gpu-check: 1 of 3 steps failed: facts (wrong bytes and 1 more): do not use it;"
        " not run: vllm (no vllm)"
    )
    assert page.last_line(outcomes[1:2]) == "gpu-check: passed"
    late = page.last_line([Outcome("arena", LATE, 50)])
    assert "arena (stopped at its time limit): the start of a large arena" in late


@pytest.mark.parametrize(("exit_status", "state"), [(0, PASSED), (1, FAILED)])
def test_state_is_the_exit_status(tmp_path, exit_status, state, monkeypatch):
    monkeypatch.setattr(program.sys, "executable", str(script(tmp_path, f"exit {exit_status}")))
    assert program.run(STEPS[0], tmp_path, 100, is_tiny=False).state == state


def test_step_is_killed_with_its_children_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(program.sys, "executable", str(script(tmp_path, "sleep 1000 & echo $!; wait")))
    step = Step("facts", 1, "what", "meaning")
    assert program.run(step, tmp_path, 100, is_tiny=False).state == LATE
    child = (tmp_path / "logs" / "facts.log").read_text().strip()
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split(") ")[1][0] in "ZX", "the child runs"


def test_missing_package_is_named_with_its_command(tmp_path):
    step = Step("vllm", 10, "what", "meaning", (("no_such_module", "no-such-package"), ("json", "json")))
    outcome = program.run(step, tmp_path, 100, is_tiny=False)
    assert outcome.state == MISSING
    assert outcome.why.startswith("missing: no-such-package. Run: ")
    assert "-m pip install no-such-package" in outcome.why


def test_package_inside_a_missing_package_is_missing():
    assert missing((("no_such.module", "a"), ("json.decoder", "b"))) == ["a"]


def test_step_without_time_is_not_started(tmp_path):
    assert program.run(STEPS[0], tmp_path, 3, is_tiny=False).why == "no time was left"


def test_all_limits_fit_into_ten_minutes():
    assert sum(step.seconds for step in STEPS) <= 570


def test_only_skips_that_need_the_simulated_driver_are_allowed(tmp_path):
    notes = tmp_path / "notes"
    entries = [("passed", ""), ("skipped", "Skipped: a real driver takes no orders"), ("skipped", "no vLLM")]
    notes.write_text(
        "".join(
            json.dumps({"test": f"test_{n}", "outcome": outcome, "phase": "call", "reason": reason}) + "\n"
            for n, (outcome, reason) in enumerate(entries)
        )
    )
    noted = Results(tmp_path, "tests")
    tests_step._report(noted, notes, 0, ["tests/gpu"], 1)
    (problem,) = results.problems(results.read(tmp_path, "tests"))
    assert problem.what == "test_2 was skipped: no vLLM"


@pytest.mark.parametrize(
    ("status", "least", "problem"), [(4, 0, "pytest ended"), (0, 9, "only 0 tests passed")]
)
def test_run_without_tests_is_a_problem(tmp_path, status, least, problem):
    noted = Results(tmp_path, "tests")
    tests_step._report(noted, tmp_path / "absent", status, ["tests/gpu"], least)
    assert noted.num_problems == 1
    assert results.problems(results.read(tmp_path, "tests"))[0].what.startswith(problem)


def script(folder, commands):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return path
