"""Time fused all-reduce + residual + RMSNorm against the other ways to compute it, on one host.

``cli`` is the command, ``launch`` starts a process for each GPU, ``session`` is what each of them
does, ``methods`` are the contestants. Every method goes through the same procedure (``stopwatch``)
on the same inputs (``problem``) and is checked against float64 before it is timed.
"""
