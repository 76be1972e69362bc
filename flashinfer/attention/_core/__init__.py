"""Shadow of upstream's ``flashinfer.attention._core``: the same, with workspaces that grow."""

from flashinfer.elastic import shadow

shadow.load(__name__, __file__, patch="flashinfer.elastic.attention.patches:attention")
