"""``kubectl lmcache doctor``: checks an installation and its clusters, and says how to repair them.

``reading`` collects `Facts` from the API server, sidecars and engines. Each check in ``checks`` is a pure
function of the facts that yields results. ``command`` prints them.
"""

from __future__ import annotations

from lmcache_cli.commands.doctor.command import add_arguments

__all__ = ["add_arguments"]
