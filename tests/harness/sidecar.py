"""See ``tools.processes``."""

from tools.processes import REPOSITORY, SidecarProcess, wait_until

__all__ = ["REPOSITORY", "SidecarProcess", "wait_until"]
