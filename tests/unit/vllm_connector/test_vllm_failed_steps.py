"""The log of vLLM after a step that failed: what it shows of the connector."""

import pytest
from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.v1.core.sched.output import SchedulerOutput

from lmcache_client.core.jobs import GroupStore, StepMeta, StoreJob

pytestmark = pytest.mark.vllm


def test_log_of_a_failed_step_contains_no_row_key():
    """A row key and the cluster's key decrypt a row of an encrypted tier."""
    key, tenant = bytes(range(64, 128)), bytes(range(32))
    stores = [StoreJob(7, "request-9", (GroupStore(0, 0, key, (3, 4)),), tenant=tenant)]
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = StepMeta(stores=stores, reclaimed={7})
    logged = prepare_object_to_dump(output)
    assert "rows of stores=[(7, 'request-9', 1)]" in logged
    for secret in (key, tenant):
        shown = repr(secret), secret.hex(), repr(list(secret)), repr(tuple(secret))
        assert not [form for form in shown if form.strip("b'[]()") in logged]
