"""The reasons that conditions have, all of them: programs match on these words, and people look them up."""

from __future__ import annotations

from typing import Literal

Expected = Literal[
    "AsDeclared", "Attached", "Available", "Complete", "Counting", "EnginesReady", "NoEngine", "Pinned",
    "Reachable", "Ready", "Recommending", "Replacing", "ResizePending", "Resizing", "ScaledToZero", "Scaling",
    "ShardsReady", "Sizing", "Starting",
]  # fmt: skip
"""Of what is as it was declared, or on its way there."""
Trouble = Literal[
    "ApiError", "AutoscalingFrozen", "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError",
    "CudaIPCUnavailable", "DiskTierOff", "EngineNotAttached", "FailedBinding", "FailedCreate", "FailedMount",
    "FieldContested", "ImagePullBackOff", "InternalError", "InvalidSpec", "MemoryNotPinned", "NameTaken",
    "NoAnswer", "NoEngineReady", "NodeLost", "OOMKilled", "PodFailed", "PodsWithoutCache",
    "ProgressDeadlineExceeded", "Refused", "RemoteTierNotShared", "RemoteTierUnreachable",
    "ResizeInfeasible", "ShardsMissing", "SidecarNotReady", "Unschedulable",
]  # fmt: skip
"""Of what stands in the way. Each has a page in docs/runbooks."""
Reason = Expected | Trouble
