"""These tests need the simulated driver, and import vLLM. Elsewhere they are not collected."""

import os

collect_ignore_glob = [] if "CUDASIM_NODE" in os.environ else ["test_*.py"]
