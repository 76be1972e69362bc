"""Shadow of upstream's ``flashinfer.pod``: the same module, with workspaces that grow."""

from flashinfer.elastic import shadow

shadow.load(__name__, __file__, patch="flashinfer.elastic.attention.patches:pod")
