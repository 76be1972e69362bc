"""Shadow of ``flashinfer/comm/trtllm_mnnvl_ar.py``, which it loads and patches in its place."""

from flashinfer.elastic import shadow

shadow.load(__name__, __file__, patch="flashinfer.elastic.allreduce:install")
