"""Elastic workspaces for FlashInfer.

Importing this package costs nothing: no torch, no CUDA, no compiled library. The modules that
patch FlashInfer import what they need when FlashInfer itself is imported.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
