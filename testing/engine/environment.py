"""Environment variables of the tests' engines."""

from testing import workers

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request with logprobs compiles C++ for 15 s
    # The same threads with and without connector, for bitwise equal results.
    "VLLM_CPU_OMP_THREADS_BIND": str(workers.core()),
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONHASHSEED": "0",
}

LOAD_GATE = "LMCACHE_TEST_LOAD_GATE"
"""Variable with the path of a file. While it exists, loads wait. A process whose load waits writes to it."""

STORE_GATE = "LMCACHE_TEST_STORE_GATE"
"""The same for stores."""

NODE = "LMCACHE_TEST_NODE"
"""Variable with the id of a process, in whose network and mount namespace the engine runs."""

PROCESS = "LMCACHE_TEST_PROCESS"
"""Variable of an engine with the id that its process gets in a new PID namespace."""

PIPELINE = "LMCACHE_TEST_PIPELINE"
"""Variable of an engine whose pipeline stages compute on CPUs (``served``)."""
