"""Attention workspaces that grow instead of failing.

The path of one call: upstream's ``plan`` or launcher is reached through the proxy of
:mod:`.modules`, which finds the buffers among the arguments by :mod:`.signatures`, looks up their
replacements in the :mod:`.pool`, and when upstream reports a shortage (:mod:`.overflow`) or a call
needs more than it would notice (:mod:`.sizing`), has the pool make a larger one
(:mod:`.allocation`). :mod:`.patches` puts the proxies into upstream's modules, and :mod:`.wrappers`
shows grown integer workspaces on upstream's wrapper objects.

Importing this package imports torch; the pure modules do so too, through it.
"""

from .pool import Usage, WorkspaceError, report

__all__ = ["Usage", "WorkspaceError", "report"]
