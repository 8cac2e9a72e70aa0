"""Steps of ``make gpu-check`` that are killed or can't run, and the page that says so."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import copies, page, results, shared_files
from benchmarks.gpu.page import FAILED, LATE, MISSING, PASSED, Outcome
from benchmarks.gpu.plan import STEPS, Step, missing
from benchmarks.gpu.results import Results
from benchmarks.gpu.steps import arena, facts, library
from benchmarks.gpu.steps import tests as tests_step
from lmcache_client.cuda.errors import CudaError
from testing.child_process import wait_until
from tests.harness.fences import output


def make_results(folder):
    noted = Results(folder, "facts")
    section = noted.section("Copies", ("size", "GB/s"), "How fast.")
    section.add("2 MiB", "50.1")
    return noted, section


def test_rows_written_before_a_kill_are_on_the_page(tmp_path):
    make_results(tmp_path)
    path = tmp_path / "facts.jsonl"
    path.write_text(path.read_text() + '{"of": "Copies", "row": ["4 Ki')
    outcome = Outcome("facts", LATE, 60, entries=results.read(tmp_path, "facts"))
    text = page.write(tmp_path, {"GPU": "H100"}, [outcome], is_simulated=False).read_text()
    assert "**stopped at its time limit** after 60 s: not completely measured" in text
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
    assert output("how-to/check-your-gpu.md", "make gpu-check\n").endswith("\ngpu-check: passed\n")
    late = page.last_line([Outcome("arena", LATE, 50)])
    assert late == "gpu-check: arena (stopped at its time limit): not completely measured"
    late = page.last_line([Outcome("facts", LATE, 60, entries=outcomes[0].entries[:-1])])
    assert late == "gpu-check: 1 of 1 steps failed: facts (wrong bytes): do not use it"


def test_step_is_killed_with_its_children_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(script(tmp_path, "sleep 1000 & echo $!; wait")))
    log = tmp_path / "logs" / "facts.log"
    wait_first_for(lambda: log.read_text().endswith("\n"), monkeypatch)
    step = Step("facts", 1, "what", "meaning")
    assert program.run(step, tmp_path, 100, is_tiny=False).state == LATE
    wait_for_end(log.read_text().strip())


def test_files_of_a_killed_step_are_removed_and_those_of_other_runs_are_not(tmp_path, monkeypatch, capsys):
    run = tmp_path / tmp_path.name  # unique: other tests run at the same time
    of_another_run = shared_files.FOLDER / f"{shared_files.prefix(run)[:-1]}other"
    left_by_step = shared_files.FOLDER / f"{shared_files.prefix(run)}arena-1"
    wait_first_for(lambda: (left_by_step / "model").exists(), monkeypatch)
    commands = f"trap '' TERM; mkdir {left_by_step}; touch {left_by_step}/model; while true; do sleep 1; done"
    monkeypatch.setattr(sys, "executable", str(script(tmp_path, commands)))
    monkeypatch.setattr(program, "_STOP_SECONDS", 0.1)
    of_another_run.touch()
    try:
        assert program.run(Step("facts", 1, "what", "meaning"), run, 100, is_tiny=False).state == LATE
        assert not left_by_step.exists()
        assert of_another_run.exists(), "it belongs to another run"
    finally:
        of_another_run.unlink()
    assert f"removed from /dev/shm: {left_by_step.name}" in capsys.readouterr().out


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


def test_tests_that_hang_are_killed_and_named(tmp_path, monkeypatch):
    process = ["sh", "-c", "sleep 1000 & echo $! > part; mv part child; wait"]
    wait_first_for(lambda: (tmp_path / "child").exists(), monkeypatch)
    with mock.patch.object(tests_step, "ROOT", tmp_path):
        assert tests_step._status(process, dict(os.environ), 1.0) is None
    wait_for_end((tmp_path / "child").read_text().strip())

    notes = tmp_path / "notes"
    ended = [{"test": "test_0", "outcome": outcome, "reason": ""} for outcome in ("started", "passed")]
    lines = [json.dumps(each) for each in (*ended, {"test": "test_1", "outcome": "started", "reason": ""})]
    notes.write_text("\n".join([*lines, '{"test": "te']))
    noted = Results(tmp_path, "tests")
    tests_step._report(noted, notes, None, ["tests/gpu"], 120)
    (problem,) = results.problems(results.read(tmp_path, "tests"))
    assert problem.what == "the tests did not end in time; still running: test_1"


@pytest.mark.parametrize(
    ("seconds_per_gib", "seconds_left", "gib"),
    [(0.1, 40, 64), (0.5, 40, 32), (2.0, 40, 8), (2.0, -1, 1 / 32)],
)
def test_arena_is_populated_in_a_share_of_the_time(seconds_per_gib, seconds_left, gib):
    assert arena._fitting_bytes(64 << 30, seconds_per_gib, seconds_left) == gib * 2**30


def test_memory_limit_of_the_container_bounds_files_in_shared_memory():
    with mock.patch("benchmarks.gpu.shared_files.available_memory", return_value=5000):
        assert shared_files.free_bytes(1000) == 4000
        assert shared_files.free_bytes(6000) == 0
    with mock.patch("benchmarks.gpu.shared_files.available_memory", return_value=None):
        assert shared_files.free_bytes(1 << 60) > 4000


def test_process_that_hangs_or_has_ended_is_killed_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(script(tmp_path, "echo '{}'; exec sleep 1000")))
    importer = facts.Importer()
    with monkeypatch.context() as patch:
        patch.setattr(facts, "_ANSWER_SECONDS", 1.0)
        with pytest.raises(facts.NoAnswerError, match="no answer within 1 s"):
            importer.open(b"handle")
    assert importer._process.returncode is not None
    monkeypatch.setattr(sys, "executable", str(script(tmp_path, "exit 1")))
    with pytest.raises(RuntimeError, match="could not be started: it has ended"):
        facts.Importer()


def test_error_of_a_pageable_copy_is_the_cell_of_its_row():
    buffers = mock.Mock()
    buffers.gbytes.side_effect = CudaError("cuMemcpyAsync", 1, "CUDA_ERROR_INVALID_VALUE")
    assert copies._pageable_speed(buffers, 4096, is_store=True).startswith("cuMemcpyAsync: CUDA_ERROR")


def test_answer_is_wrong_only_if_its_logit_is_clearly_below_the_best():
    logits = torch.tensor([-10.0, 9.5, 10.0, 0.0])
    assert [library.logit_gap(logits, token) <= library._MAX_LOGIT_GAP for token in range(4)] == [
        *(False, True, True, False)
    ]


def wait_first_for(condition, monkeypatch):
    """Let a process do something before the time begins in which it is waited for."""
    wait = subprocess.Popen.wait

    def wait_late(process, timeout=None):
        wait_until(condition)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_late)


def wait_for_end(pid):
    """Wait until a process that was killed has ended. Nothing may be left to collect its status."""
    stat = Path(f"/proc/{pid}/stat")
    wait_until(
        lambda: not stat.exists() or stat.read_text().split(") ")[1][0] in "ZX", what="the child has ended"
    )


def script(folder, commands):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return path
