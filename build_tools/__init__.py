"""How the wheel is built: the toolkit, the kernels, the name and the platform tag.

``setup.py`` and ``scripts/`` drive these modules; nothing of this package is installed.
"""
