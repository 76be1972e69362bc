"""The failure that was reported, in upstream's own code, and the same call with this wheel.

A server with eight GPUs reports 42 tokens of 6144 bf16 elements when it creates its workspace and
then forces one-shot for 40 of them. FlashInfer 0.6.x has allocated two-shot's 1179648 bytes, wants
3932160, and raises.

:mod:`.upstream` shows that, :mod:`.gpus` makes the call on the GPUs that are there, :mod:`.judge`
compares the result with float64, and :mod:`.report` prints it all. The CPU emulation of the
kernels is no part of the wheel; ``scripts/reproduce.py`` of the repository brings it along.
"""
