"""The commands for users, also as ``kubectl lmcache``: they read a cluster and change nothing in it.

``connection`` connects to the API server, ``gather`` collects what a command shows, and ``printing`` prints
it. Each module named in `COMMANDS` is one command, such as ``doctor``. Its views are pure functions of what
was gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "status": "show pods, tiers, conditions and advice of a cluster",
    "top": "show what the pods of clusters do at present",
    "explain": "show why prompts were computed",
    "hints": "show the hints that retain KV in the pods of clusters",
    "report": "write a zip file for a bug report: objects, Events, figures and logs",
    "doctor": "check an installation and its clusters, and say how to repair them",
    "curve": "show the hit ratio and value of each size of a cluster's cache tier",
}
"""Commands with what they do. Each is a module with ``add_arguments(parser)``, imported if it is used."""
